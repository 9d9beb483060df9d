"""`benchmarks/training/gpu.py`: its arithmetic, and that it says so where there is no card."""

import pytest
import torch
from benchmarks.training import gpu
from click.testing import CliRunner
from tests.trainer.pretended_card import pretended_card


@pytest.fixture
def script() -> dict:
    return vars(gpu)


def test_work_is_counted_forward_and_backward(script) -> None:
    """A linear layer of 6 to 5: 2·6·5 operations forward, twice that backward with a gradient of its input."""
    layer, rows = torch.nn.Linear(6, 5), torch.ones(4, 6, requires_grad=True)
    assert script["flops_of_an_image"](lambda: layer(rows).sum().backward(), 4) == 3 * 2 * 6 * 5


def test_the_work_of_fedmae_is_that_of_its_blocks(script, monkeypatch) -> None:
    """Three times the forward products, by hand: 24·T·D² + 4·T²·D a block, patches and the layers between.

    The first layer has no gradient of its input. Encoder: class token and a quarter of the patches; decoder: all.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def blocks(tokens: int, width: int, depth: int) -> int:
        return depth * (24 * tokens * width**2 + 4 * tokens**2 * width)

    embed = 2 * 196 * 768 * 48
    between = 2 * 50 * 48 * 64 + 2 * 197 * 64 * 768
    expected = 3 * (blocks(50, 48, 2) + blocks(197, 64, 2) + between) + 2 * embed
    assert script["fedmae_work"]("vit:48x2/16", width=64, depth=2) == pytest.approx(expected, rel=0.02)


def test_the_work_that_is_told_is_of_the_network_that_is_timed(script, monkeypatch) -> None:
    """The sizes are those of the row; nothing is counted here, the formula holds for any size."""
    backbone, width, depth = script["fedmae_work"].__defaults__
    assert {backbone, f"{width}x{depth}"} <= set(script["ROWS"]["FedMAE"][1])
    monkeypatch.setattr(gpu, "fedmae_work", lambda: 3.0)
    monkeypatch.setattr(gpu, "flops_of_an_image", lambda epoch, images: 7.0)
    assert script["counted_work"]() == {"FedMAE": 3.0, "FedCLF": 7.0}


def test_share_and_ratio_belong_together(script) -> None:
    """By hand: 2 GFLOP an image at 1,000 images/s are 2 TFLOP/s, of a peak of 10 a fifth."""
    one = {"images_per_second": {"edgefl": 1000.0, "plain-0": 400.0, "plain-2": 500.0}}
    first = {**one, "flops_of_an_image": 2e9, "bf16": {"measured_peak_flops": 1e13}}
    other = {"images_per_second": {"edgefl": 100.0, "plain": 200.0}}
    rows = script["figures"]({"FedEvPrompt": first, "FedMAE": other, "FedCLF": other}, {"FedMAE": 1e10, "FedCLF": 4e9})
    assert rows["FedEvPrompt"] == {"edgefl": 1000, "plain": 500, "ratio": 2, "gflops": 2, "share": pytest.approx(0.2)}
    assert (rows["FedMAE"]["ratio"], rows["FedMAE"]["share"]) == (0.5, pytest.approx(0.1))
    machine = {"date": "2026-01-01", "card": "a card", "cards": "1 card", "torch": "2", "python": "3"}
    page = script["page"](rows, machine, 1e13, {"FedMAE": {"told": 3 * 2**30, "given": 2 * 2**30}}, "| a table |")
    assert "| FedEvPrompt | 1,000 | 500 | 2.00 | 2.0 | 20.0% |" in page and "10 TFLOP/s" in page
    assert "| FedMAE | 3,072 | 2,048 | 1.50 |" in page and "| a table |" in page


@pytest.mark.parametrize(
    ("method", "hyper"), [("fedevprompt", {}), ("fedmae", {"decoder_width": 32, "decoder_depth": 1})]
)
def test_told_memory_is_set_beside_the_allocators(script, method, hyper, monkeypatch, one_thread) -> None:
    """On the pretended card, whose tensors nobody counts: the allocator is asked once the steps were played."""
    asked = []
    with pretended_card():
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: asked.append("from zero"))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: asked.append("most") or 7)
        found = script["step_bytes"](method, "vit:64x4/12", 36, 8, **hyper)
    assert asked == ["from zero", "most"] and found["given"] == 7 and found["told"] > 0


def test_without_a_card_it_says_so_and_writes_nothing(script, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = script["PAGE"].read_bytes() if script["PAGE"].exists() else None
    found = CliRunner().invoke(script["main"], [])
    assert found.exit_code == 1 and "this machine has no CUDA device" in found.output
    assert (script["PAGE"].read_bytes() if script["PAGE"].exists() else None) == before

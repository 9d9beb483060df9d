"""Whole runs with `--device cuda` on a pretended card, and what such a card refuses (`tests.trainer.pretended_card`).

docs/design.md 5: a run on `cuda` leaves what one on the processor leaves; without autocast the arithmetic is the same
here, so its digest is, too.
"""

import json

import pytest
import torch
from tests.trainer.conftest import edgefl_train
from tests.trainer.pretended_card import CARD, pretended_card

WORDS = ("--preset", "tiny", "--image-px", "36", "--images-per-site", "8")


def on_card(*words: object) -> dict:
    with pretended_card():
        return edgefl_train(*words, "--device", "cuda", "--json").json()


def test_a_run_on_a_card_is_finished_and_judged(ward, tmp_path) -> None:
    found = on_card("run", "fedevprompt", "--data", ward, *WORDS, "--out", tmp_path / "run")
    assert found["mean_balanced_accuracy"] is not None
    machine = json.loads((tmp_path / "run" / "environment.json").read_text())["machine"]
    assert machine["cuda"] == "a pretended card"


def test_an_encoder_is_learned_probed_and_judged_on_a_card(ward, tmp_path) -> None:
    """What `run` and `evaluate --maps` compute outside a method's halves."""
    encoder, tuned = tmp_path / "encoder", tmp_path / "tuned"
    words = ("--set", "batch=8", "--set", "decoder_width=32", "--backbone", "tiny", "--probe-every", "1")
    on_card("run", "fedmae", "--data", ward, *WORDS, *words, "--out", encoder)
    on_card("run", "fedavg", "--data", ward, *WORDS, "--backbone", f"run:{encoder}", "--out", tuned)
    assert "maps" in str(on_card("evaluate", tuned, "--data", ward, "--maps"))


def test_without_autocast_it_learns_what_the_processor_learns(ward, tmp_path) -> None:
    words = ("run", "fedevprompt", "--data", ward, *WORDS, "--autocast", "none")
    card = on_card(*words, "--out", tmp_path / "card")
    plain = edgefl_train(*words, "--device", "cpu", "--out", tmp_path / "cpu", "--json").json()
    assert card["state_sha256"] == plain["state_sha256"]


def test_the_pretended_card_refuses_what_a_card_refuses() -> None:
    """PyTorch's own refusals, of which its documentation has the sentences."""
    with pretended_card():
        there, here = torch.ones(4, 3, device=CARD), torch.ones(4, 3)
        assert (there.device, here.device) == (CARD, torch.device("cpu"))
        for mixed in (
            lambda: there * here,
            lambda: there @ here.T,
            lambda: here[torch.zeros(2, dtype=torch.int64, device=CARD)],
            lambda: torch.nn.functional.cross_entropy(there, torch.zeros(4, dtype=torch.int64)),
            lambda: torch.cat([there, here]),
            lambda: there.normal_(generator=torch.Generator()),
        ):
            with pytest.raises(RuntimeError, match=r"same device|indices should be|for generator"):
                mixed()
        with pytest.raises(TypeError, match="can't convert cuda"):
            there.numpy()
        assert (there * torch.tensor(2.0)).device == CARD  # a lone number may lie anywhere
        assert there[torch.zeros(2, dtype=torch.int64)].device == CARD  # an index may lie on the processor
        assert here.copy_(there).device == torch.device("cpu")
        leaf = torch.nn.Linear(3, 2).to(CARD)
        torch.nn.functional.cross_entropy(leaf(there), torch.zeros(4, dtype=torch.int64, device=CARD)).backward()
        assert leaf.weight.grad is not None and leaf.weight.grad.device == CARD

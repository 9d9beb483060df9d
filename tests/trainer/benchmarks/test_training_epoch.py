"""`benchmarks/training/training_epoch.py`: an epoch against the plain PyTorch loop (docs/methods.md 1.3 to 1.5)."""

import json
import math
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks.training import training_epoch
from click.testing import CliRunner

QUICK = ("--backbone", "tiny", "--image-px", "36", "--photo-px", "48", "--images", "10", "--batch", "4", "--maps", "7",
         "--repeats", "1", "--workers", "0", "--device", "cpu")  # fmt: skip


@pytest.fixture
def script() -> dict:
    return vars(training_epoch)


@pytest.fixture
def started(script, monkeypatch):
    """The loops for which a Python is really started; the others are measured in this one, which has PyTorch."""
    real: list[str] = []

    def run(command, **options):
        loop = command[command.index("--only") + 1]
        if loop in real:
            return subprocess.run(command, **options)
        done = CliRunner().invoke(script["main"], command[command.index("--only") :])
        return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)

    monkeypatch.setattr(training_epoch, "subprocess", SimpleNamespace(run=run))
    return real


@pytest.fixture
def case(script, tmp_path):
    script["draw_photos"](tmp_path / "photos", 10, 48)
    sizes = {"image_px": 36, "images": 10, "batch": 4, "maps": 7}
    return script["make_case"](tmp_path / "photos", "tiny", sizes, "cpu")


@pytest.mark.slow
def test_equal_losses_and_figures_that_belong_together(script, tmp_path, started):
    started.append("plain-0")
    run = CliRunner().invoke(script["main"], [*QUICK, "--photos", str(tmp_path / "photos"), "--json"])
    found = json.loads(run.stdout)
    assert (found["images"], found["batch"], found["tokens"], found["maps_of_a_class"]) == (10, 4, 9, 7)
    assert found["losses"]["edgefl"] == pytest.approx(found["losses"]["plain"], rel=1e-4)
    assert len(found["losses"]["plain"]) == 3 and found["loss_difference"] <= 1e-4
    seconds = found["cpu_seconds"]
    assert found["ratio"] == seconds["plain-0"] / seconds["edgefl"] and math.isfinite(found["ratio"])
    assert run.exit_code == (0 if found["ratio"] >= found["target"] else 1)
    for pair in found["memory_bytes"].values():
        assert 0 < pair["before"] <= pair["peak"]
    for loop in ("edgefl", "plain"):
        named = {name: part[loop] for name, part in found["parts"].items()}
        assert sum(value for name, value in named.items() if name != "whole") == pytest.approx(named["whole"])
    assert len(list((tmp_path / "photos").rglob("*.jpg"))) == 10


def test_all_terms_count_in_the_losses_that_are_compared(case):
    """Without the peers' maps, and without the evidence that the KL term punishes, the losses are others."""
    from dataclasses import replace

    from benchmarks.training import training_loops

    whole = training_loops.plain_epoch(case, 0)[0]
    ones = {name: np.ones_like(maps) for name, maps in case.maps.items()}
    assert abs(training_loops.plain_epoch(replace(case, maps=ones), 0)[0] - whole) > 1e-3 * whole
    evidence, target, prior = torch.tensor([[1.0, 3.0]]), torch.tensor([0]), torch.ones(2)
    with_kl, without = (training_loops.plain_evidential_loss(evidence, target, prior, w) for w in (1.0, 0.0))
    assert float(with_kl - without) == pytest.approx(math.log(4) - 3 / 4, rel=1e-5)  # KL(Dir(1, 4) ‖ Dir(1, 1))


def test_loops_that_differ_are_refused(script, case, monkeypatch):
    """A wrong distance in the plain loop stops the benchmark before anything is timed."""
    from benchmarks.training import training_loops

    from edgefl_protocol.errors import EdgeflError

    right = training_loops.plain_distance
    monkeypatch.setattr(training_loops, "plain_distance", lambda *given: 1.1 * right(*given))
    with pytest.raises(EdgeflError, match="do not compute the same loss"):
        script["compare_losses"](case)


def test_the_plain_loop_turns_and_orders_as_the_site_does(case):
    """Photograph by photograph: the pixels of the two loops' batches are equal but for rounding."""
    from benchmarks.training import training_loops

    from edgefl_trainer.augment import dihedral

    site = case.site
    rng = site.rng("augment", training_loops.ROUND, 0)
    own = [dihedral(images, rng) for images, _ in site.batches(site.train, 4, training_loops.ROUND, 0)]
    for images, (planes, _) in zip(own, training_loops.plain_batches(case, 0), strict=True):
        torch.testing.assert_close(planes, site.backbone.normalise(images), atol=1e-5, rtol=1e-5)


def test_operations_of_a_network_counted_by_hand(script, case):
    """Width 64, 4 blocks, 10 tokens, prefix 2 (50·9/196): by the sizes of its products."""
    linear = 2 * 10 * 64 * (3 * 64 + 64 + 2 * 4 * 64)  # query, key, value; projection; both layers of the MLP
    attention = 2 * (2 * 10 * 12 * 64)  # logits and mix
    forward = 2 * 9 * (3 * 12 * 12) * 64 + 4 * (linear + attention)
    backward = 4 * (linear + 2 * attention) - 2 * 10 * 64 * 3 * 64 - 2 * 10 * 12 * 64  # nothing before the first prefix
    assert script["flops_of_an_image"](case) == forward + backward


@pytest.mark.slow
def test_an_unknown_backbone_is_one_sentence(script, started):
    run = CliRunner().invoke(script["main"], ["--backbone", "vit:nothing", "--images", "2", "--photo-px", "48"])
    assert run.exit_code == 1 and run.stdout == "" and "there is no backbone" in run.stderr
    assert "Traceback" not in run.stderr

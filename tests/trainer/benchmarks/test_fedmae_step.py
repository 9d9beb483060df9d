"""`benchmarks/training/fedmae_step.py`: FedMAE's step is that of MAE's public recipe (arXiv 2111.06377, section 3)."""

import json

import pytest
from benchmarks.training import fedmae_step
from click.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("--backbone", "vit:32x2/12", "--image-px", "36", "--images", "12", "--batch", "4", "--decoder", "32x1",
         "--repeats", "1", "--device", "cpu")  # fmt: skip


def test_three_steps_of_both_loops_have_the_same_losses():
    """Masking, loss of hidden patches and AdamW: the third loss depends on two updates of every weight."""
    run = CliRunner().invoke(fedmae_step.main, [*QUICK, "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["losses"]["edgefl"] == pytest.approx(found["losses"]["plain"], rel=1e-4)
    assert len(set(found["losses"]["plain"])) == 3
    assert all(found["images_per_second"][name] > 0 for name in ("edgefl", "plain"))
    assert 0 < found["wait_share"] < 1  # what `local_round` tells a run


def test_another_loss_is_found(monkeypatch):
    """A plain loop that counts visible patches, too, is no longer the same: nothing is timed."""
    script = vars(fedmae_step)
    plain = script["plain_loss"]
    monkeypatch.setitem(script["plain_steps"].__globals__, "plain_loss", lambda *given: plain(*given) * 1.01)
    run = CliRunner().invoke(script["main"], list(QUICK))
    assert run.exit_code == 1 and "do not compute the same loss" in run.output

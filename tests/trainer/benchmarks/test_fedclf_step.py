"""`benchmarks/training/fedclf_step.py`: FedCLF's step is momentum contrast (arXiv 1911.05722, algorithm 1)."""

import json

import pytest
from benchmarks.training import fedclf_step
from click.testing import CliRunner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

QUICK = ("--network", "cnn:resnet10t", "--image-px", "32", "--images", "8", "--batch", "4", "--repeats", "1")


def test_three_steps_of_both_loops_have_the_same_losses():
    """The third loss depends on two updates of encoder, slow copy and negatives."""
    run = CliRunner().invoke(fedclf_step.main, [*QUICK, "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout.splitlines()[0])
    assert found["losses"]["edgefl"] == pytest.approx(found["losses"]["plain"], rel=1e-4)
    assert len(set(found["losses"]["plain"])) == 3
    assert all(found["images_per_second"][name] > 0 for name in ("edgefl", "plain"))


def test_another_momentum_is_found(monkeypatch):
    """A plain loop whose slow copy moves otherwise is no longer the same: nothing is timed."""
    script = vars(fedclf_step)
    plain = script["PlainContrast"].__call__

    def otherwise(self, *given):
        loss = plain(self, *given)
        for theirs, ours in zip(self.slow.parameters(), self.model.parameters(), strict=True):
            theirs.data.copy_(ours.data)
        return loss

    monkeypatch.setattr(script["PlainContrast"], "__call__", otherwise)
    run = CliRunner().invoke(script["main"], list(QUICK))
    assert run.exit_code == 1 and "do not compute the same loss" in run.output

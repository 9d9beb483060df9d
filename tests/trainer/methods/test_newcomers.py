"""docs/methods.md 8.4: what a site that took part in nothing scores with, for every method of the table."""

import numpy as np
import pytest
from tests.trainer.methods.conftest import play
from tests.trainer.methods.test_conformance import backbone, small

from edgefl_trainer.contract import declared
from edgefl_trainer.engine.judging.held_out import newcomers, without_model
from edgefl_trainer.engine.models import predict
from edgefl_trainer.methods import METHODS

__all__ = ["backbone"]  # a fixture: two blocks
AT_HOME = {"local", "fedevprompt", "fedproto", "feddistill", "pfedpg", "pfl-vqa"}  # the head never leaves: NA in papers


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_newcomer_scores_or_has_no_model(name, make_task, make_site):
    task, method = make_task(), small(name)
    server, _ = play(method, task, {"a": make_site(task, count=8)})
    new = make_site(task, "new", seed=9)
    found = newcomers(method, task, server, {"new": new})
    if not declared(method).encoder:  # what is said before training is what comes of it
        assert (without_model(name, method.start(task, ["a", "b"]), ["new"]) is None) is (set(found) == {"new"})
    if declared(method).encoder or name in AT_HOME:
        assert found == {}
        return
    scores = predict(found["new"], new.train.images)
    assert np.isfinite(scores.probabilities).all()
    assert np.allclose(scores.probabilities.sum(axis=1), 1, atol=1e-5)


def test_a_head_that_stays_at_home_leaves_a_newcomer_without_model(make_task, make_site):
    """`share=b` averages b-prompts only (docs/methods.md 1.6)."""
    task = make_task()
    for share, expected in (("b", set()), ("bt", {"new"})):
        method = small("fedavg", share=share)
        server, _ = play(method, task, {"a": make_site(task, "a")})
        assert set(newcomers(method, task, server, {"new": make_site(task, "new", seed=9)})) == expected
        said = without_model("fedavg", method.start(task, ["a"]), ["new"])
        assert (said is None) is bool(expected)
        assert without_model("fedavg", method.start(task, ["a"]), []) is None

"""Training that leaves the finite numbers: it stops with site, round and step, and what stood before stays."""

import numpy as np
import pytest
import torch
from tests.trainer.methods.conftest import backbone, make_site, make_task  # noqa: F401
from tests.trainer.methods.test_conformance import Silent

from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.local_engine import InProcessSite, LocalEngine
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.learning.epochs import check_finite
from edgefl_trainer.methods import METHODS

EXPLODES = {"lr": 10.0, "weight_decay": 1.0, "clip": 0.0, "momentum": 0.0, "batch": 1, "lr_decay": 1.0}  # w ← −9w


def engine(folder, make_task, make_site, rounds):  # noqa: F811
    task = make_task(rounds=rounds)
    method = build(METHODS["head"], {**EXPLODES, "readout": "cls", "head_norm": "none"})
    sites = {name: InProcessSite(method, make_site(task, name, seed=i)) for i, name in enumerate("ab")}
    folder.mkdir(exist_ok=True)
    return LocalEngine(method=method, task=task, sites=sites, folder=folder, observer=Silent())


def test_a_run_that_explodes_keeps_the_rounds_before(tmp_path, make_task, make_site):  # noqa: F811
    """Twelve steps a round, each ninefold, pass the largest float32 in round 4; resumed, it stops there again."""
    with pytest.raises(TrainingError, match=r"site a (is|diverged).* in round 4") as first:
        engine(tmp_path / "run", make_task, make_site, 8).run()
    assert "lower the learning rate" in str(first.value)
    progress = Checkpoints(tmp_path / "run" / "checkpoints").progress()
    assert progress.phases == 3
    kept = Checkpoints(tmp_path / "run" / "checkpoints").load_state(progress.server)
    assert all(np.isfinite(value).all() for value in kept.arrays.values())
    assert kept.digest() == engine(tmp_path / "short", make_task, make_site, 3).run().server.digest()
    with pytest.raises(TrainingError) as second:
        engine(tmp_path / "run", make_task, make_site, 8).run()
    assert str(second.value) == str(first.value)


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_the_sentence_names_site_round_and_step(value, said, make_task, make_site):  # noqa: F811
    site = make_site(make_task(), "north")
    with pytest.raises(TrainingError, match=f"site north is {said} in round 3, step 8: lower the learning rate"):
        check_finite(torch.tensor(value), site, 3, 7)
    assert check_finite(torch.tensor(0.25), site, 3, 7) == 0.25

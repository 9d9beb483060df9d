"""The gate of FedEvPrompt's graph on wrong steps, run eagerly in place of a traced graph.

Source: docs/design.md, section 9.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl_export import training_gates
from edgefl_export.errors import GateError
from edgefl_export.training_gates import StepParity, check_training
from edgefl_export.training_members import _rates, training_step
from edgefl_protocol.training import TrainingPlan
from edgefl_trainer.learning.evidential import EvidentialRecipe

Tensors = dict[str, Tensor]


@pytest.fixture
def judge(predictor, monkeypatch) -> Callable[..., list[StepParity]]:
    recipe = EvidentialRecipe(batch=8, b_blocks=1, head_norm="standardise", readout="cls")
    plan = TrainingPlan(
        trained=recipe.trained, rates=_rates(recipe), weight_decay=recipe.weight_decay, batch=8, epochs=1,
        epochs_before=0, anneal_epochs=2, anneal_clock="run", kd_weight=1e-6, kd_peers="sum", prior_floor=1e-2,
        balance="none", augment="dihedral", seed=0,
    )  # fmt: skip
    step = training_step(predictor, plan)

    def run(graph: Callable[[Tensors], Tensors], inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
        return {name: value.detach().numpy() for name, value in graph(given).items()}

    monkeypatch.setattr(training_gates, "onnxruntime", SimpleNamespace(InferenceSession=lambda graph, providers: graph))
    monkeypatch.setattr(training_gates, "run_step", run)

    def found(**changed: Callable[[Tensor], Tensor]) -> list[StepParity]:
        def graph(given: Tensors) -> dict[str, Tensor]:
            given = {**given, **{name: change(given[name]) for name, change in changed.items()}}
            return step(given["image"], given["target"], given)

        return check_training(graph, step, plan, predictor.tensors)

    return found


def test_the_right_step_passes(judge):
    assert max(figure.worst for figure in judge()) < 1e-5


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_decay", torch.zeros_like),
        ("kl_weight", torch.zeros_like),
        ("kd_weight", torch.zeros_like),
        ("optimizer.step", lambda count: count + 1),
    ],
)
def test_a_wrong_step_is_refused(judge, name, change):
    """docs/design.md 9: a graph without decay, KL or distillation, or with another count of steps, makes no bundle."""
    with pytest.raises(GateError, match="differs from the trainer by"):
        judge(**{name: change})

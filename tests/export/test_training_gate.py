"""The gate of FedEvPrompt's graph on wrong steps, run eagerly in place of a traced graph.

Source: docs/design.md, section 9.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from edgefl_export.errors import GateError
from edgefl_export.methods import fedevprompt
from edgefl_export.methods.fedevprompt import FedEvPromptTrainerSteps, prompt_form, step_of
from edgefl_export.parity import step_parity
from edgefl_export.parity.step_parity import StepParity, check_steps
from edgefl_protocol.bundle.fedevprompt_plan import FedEvPromptPlan
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.maps.sharing import MapSharing
from edgefl_trainer.losses import evidential_loss, rollout_distillation
from edgefl_trainer.rollout import max_normalise, rollout_from_factors

Tensors = dict[str, Tensor]


@pytest.fixture
def judge(predictor, monkeypatch) -> Callable[..., list[StepParity]]:
    recipe = EvidentialRecipe(batch=8, b_blocks=1, head_norm="standardise", readout="cls")
    plan = FedEvPromptPlan(
        trained=recipe.trained, rates=recipe.rates, weight_decay=recipe.weight_decay, batch=8, epochs=1,
        epochs_before=0, anneal_epochs=2, anneal_clock="run", kd_weight=1e-6, kd_peers="sum", prior_floor=1e-2,
        balance="none", augment="dihedral", seed=0, form=prompt_form(predictor, MapSharing()),
    )  # fmt: skip
    step = step_of(plan, predictor)

    def run(graph: Callable[[Tensors], Tensors], inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
        return {name: value.detach().numpy() for name, value in graph(given).items()}

    monkeypatch.setattr(step_parity, "onnxruntime", SimpleNamespace(InferenceSession=lambda graph, providers: graph))
    monkeypatch.setattr(step_parity, "run_step", run)

    def found(wrong: Mapping[str, object] | None = None, **changed: Callable[[Tensor], Tensor]) -> list[StepParity]:
        def graph(given: Tensors) -> dict[str, Tensor]:
            given = {**given, **{name: change(given[name]) for name, change in changed.items()}}
            with pytest.MonkeyPatch.context() as patch:  # the step alone is wrong, not the trainer's beside it
                for name, value in (wrong or {}).items():
                    patch.setattr(fedevprompt, name, value)
                return step(given)

        return check_steps(graph, FedEvPromptTrainerSteps(step, plan, predictor.tensors))

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


def without_kl_gradient(evidence: Tensor, target: Tensor, prior: Tensor, kl_weight: Tensor) -> Tensor:
    squared = evidential_loss(evidence, target, prior, torch.zeros_like(kl_weight))
    return evidential_loss(evidence, target, prior, kl_weight).detach() + squared - squared.detach()


def without_gradient_of_the_scale(factors: Sequence[Tensor]) -> Tensor:
    maps = rollout_from_factors(factors)
    return maps * (max_normalise(maps) / maps.clamp(min=1e-30)).detach()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rollout_distillation", lambda *given: rollout_distillation(*given).detach()),
        ("evidential_loss", without_kl_gradient),
        ("travelling_map", without_gradient_of_the_scale),
        ("BETAS", (0.9, 0.998)),
    ],
    ids=["distillation", "KL", "normalisation of a map", "moments"],
)
def test_a_wrong_gradient_behind_a_right_loss_is_refused(judge, name, wrong):
    """docs/design.md 9, distillation and KL active: a step that shows the right loss and learns without a part of it
    is seen by what it learns, at the usual distillation weight of 1e-6 too."""
    with pytest.raises(GateError, match=r"within 10 steps (optimizer\.|prompts\.|head\.)"):
        judge({name: wrong})

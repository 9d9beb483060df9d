"""The gate of FedCLF's graphs on wrong steps: with every draw of pictures that it may choose, each is refused.

In place of a traced graph the gate is given the step itself, run eagerly: right once, and wrong in one way each time.
Source: docs/design.md, section 9.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from edgefl_export.errors import GateError
from edgefl_export.methods import fedclf
from edgefl_export.methods.fedclf import FedCLFStep, FedCLFTrainerSteps, check_contrast, contrast_plan, network
from edgefl_export.parity import step_parity
from edgefl_protocol.bundle.fedclf_plan import SECOND, FedCLFPlan
from edgefl_protocol.bundle.learning_plan import NEXT
from edgefl_protocol.rules.slow_encoder import SLOW
from edgefl_trainer.engine.hyper_parameters import build
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import load_backbone

PIXELS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Outputs = dict[str, Tensor]
Change = Callable[[FedCLFStep, LearningNetwork, Outputs], Outputs]


@pytest.fixture(scope="module")
def learner() -> tuple[LearningNetwork, FedCLFPlan]:
    backbone, method = load_backbone("cnn:test_resnet", image_px=36, seed=1), build(FedCLF, {"batch": 16, "queue": 40})
    settings = RunSettings(method="fedclf", data=("lesions:",), backbone="cnn:test_resnet", image_px=36, preset="tiny")
    model = network(method.contrast, backbone.spec, 4, backbone)
    return model, contrast_plan(method, settings, backbone.spec, model)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is what it would have been traced from."""

    def run(graph: Callable[[Outputs], Outputs], inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
        return {name: value.detach().numpy() for name, value in graph(given).items()}

    for module in (step_parity, fedclf):
        monkeypatch.setattr(module, "onnxruntime", SimpleNamespace(InferenceSession=lambda graph, providers: graph))
        monkeypatch.setattr(module, "run_step", run)


def judge(learner: tuple[LearningNetwork, FedCLFPlan], change: Change):
    model, plan = learner
    step = FedCLFStep.of(model, plan, *PIXELS)
    trainer = FedCLFTrainerSteps(deepcopy(model), plan, load_backbone("cnn:test_resnet", image_px=36, seed=1).spec)
    return check_contrast(lambda given: change(step, model, given), step.encoded, trainer)


class InferenceNorm(FedCLFStep):
    """Batch norm with running statistics, which still move as they should."""

    whole: LearningNetwork

    def features(self, views, tensors):
        _, moved = super().features(views, tensors)
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        given = {name: tensors[name] for name in (*self.plan.parameters, *self.plan.statistics)}
        return functional_call(deepcopy(self.whole).eval(), given, ((views - mean) / std,)), moved


def inference_norm(step: FedCLFStep, model: LearningNetwork, given: Outputs) -> Outputs:
    wrong = InferenceNorm(step.model, step.plan, step.mean, step.std)
    object.__setattr__(wrong, "whole", model)
    return wrong(given)


def with_setting(name: str, value: float) -> Change:
    return lambda step, model, given: step({**given, name: torch.tensor(value)})


def late_keys(step: FedCLFStep, model: LearningNetwork, given: Outputs) -> Outputs:
    """The slow encoder answers before it follows: loss and gradients are of the older one."""
    right, before = step(given), step({**given, "key_momentum": torch.tensor(1.0)})
    kept = {name: value for name, value in right.items() if name.startswith(NEXT + SLOW)}
    return {**before, **kept}


def follows_learned(step: FedCLFStep, model: LearningNetwork, given: Outputs) -> Outputs:
    """The slow encoder follows what the step learned, not what it began with."""
    found, m = step(given), given["key_momentum"]
    moved = {NEXT + SLOW + name: given[SLOW + name] * m + found[NEXT + name] * (1 - m) for name in step.plan.parameters}
    return {**found, **moved}


def biased_variance(step: FedCLFStep, model: LearningNetwork, given: Outputs) -> Outputs:
    """A running variance that divides by n where PyTorch divides by n − 1, in a layer of 16 positions an image."""
    found = step(given)
    name = next(name for name in reversed(step.plan.statistics) if name.endswith("running_var"))
    now = found[NEXT + name] - 0.9 * given[name]
    return {**found, NEXT + name: 0.9 * given[name] + now * (1 - 1 / (16 * len(given[SECOND])))}


def slow_statistics_stay(step: FedCLFStep, model: LearningNetwork, given: Outputs) -> Outputs:
    return {**step(given), **{NEXT + SLOW + name: given[SLOW + name] for name in step.plan.statistics}}


WRONG: dict[str, Change] = {
    "batch norm of inference": inference_norm,
    "no weight decay": with_setting("weight_decay", 0.0),
    "another momentum": with_setting("momentum", 0.89),
    "a slow encoder that stays": with_setting("key_momentum", 1.0),
    "a slow encoder that follows ten times slower": with_setting("key_momentum", 0.999),
    "keys of before": late_keys,
    "a slow encoder that follows the next": follows_learned,
    "variance over n": biased_variance,
    "slow statistics that stay": slow_statistics_stay,
}
SOON = ("another momentum", "keys of before")  # what the quick tests try


def test_a_step_without_labels_balances_no_classes(learner):
    """docs/design.md, section 5: the default is none; a head learned with balanced classes says nothing of FedCLF."""
    backbone = load_backbone("cnn:test_resnet", image_px=36, seed=1)
    head = RunSettings(method="head", data=("lesions:",), balance="class")
    assert contrast_plan(FedCLF(), head, backbone.spec, learner[0]).balance == "none"


def test_the_right_step_passes(learner):
    """docs/design.md 9: ‖Δ‖₂/‖reference‖₂ ≤ 1e-4 for tensors and loss, ≤ 1e-3 for moments, of this very reference."""
    figures = judge(learner, lambda step, model, given: step(given))
    allowed = {figure.quantity: figure.allowed for figure in figures}
    assert allowed.pop("momentum buffers") == 1e-3 and allowed.pop("counters") == 0
    assert allowed.pop("most draws of a step") == 8 and figures[-1].worst >= 1  # what was chosen is told
    assert set(allowed) == {
        "loss", "parameters", "statistics", "slow parameters", "slow statistics", "features",
    } and set(allowed.values()) == {1e-4}  # fmt: skip


@pytest.mark.parametrize("way", [way if way in SOON else pytest.param(way, marks=pytest.mark.slow) for way in WRONG])
def test_a_wrong_step_is_refused(learner, way):
    """docs/design.md 9: eight draws of pictures find none with which a step that learns otherwise would pass."""
    with pytest.raises(GateError, match="differs from the trainer by"):
        judge(learner, WRONG[way])

"""The graph of `HeadAvg`: one step of SGD on the head as a pure function, its record, and the gate's reference."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tests.integration.headavg.method import HEAD, HeadAvg
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl_export.graphs.training import TRACED_BATCH
from edgefl_export.methods.learned_method import LearnedMethod, PreparedStep, Traceable
from edgefl_export.parity.score_parity import parity_images
from edgefl_export.parity.step_parity import Arrays, batch_size, check_steps
from edgefl_protocol.bundle.learning_plan import GRAPH, NEXT
from edgefl_protocol.bundle.step_plan import StepPlan
from edgefl_trainer.engine.hyper_parameters import hyper_values
from edgefl_trainer.models.cnn import Backbone


@dataclass(frozen=True)
class HeadStep:
    backbone: Backbone

    def loss(self, tensors: Mapping[str, Tensor]) -> Tensor:
        seen = self.backbone(self.backbone.normalise(tensors["image"])).readout("cls")
        return cross_entropy(seen @ tensors["head.weight"].T + tensors["head.bias"], tensors["target"])

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: tensors[name].detach().requires_grad_(True) for name in HEAD}
        loss = self.loss({**tensors, **leaves})
        gradients = dict(zip(HEAD, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        learned = {NEXT + name: tensors[name] - tensors["lr"] * gradients[name] for name in HEAD}
        return {"loss": loss.detach(), **learned}


class TrainerSteps:
    """PyTorch's own SGD; see `Reference`."""

    tries = 1

    def __init__(self, step: HeadStep, lr: float, weights: Arrays) -> None:
        self._step, self._lr = step, lr
        self._head = {name: torch.tensor(weights[name], requires_grad=True) for name in HEAD}
        self._optimizer = torch.optim.SGD(self._head.values(), lr=lr)

    def batch(self, index: int) -> Arrays:
        count, classes = batch_size(index), len(self._head["head.bias"])
        image = parity_images(self._step.backbone.spec.image_px, count, index)
        return {"image": image, "target": np.arange(count) % classes, "lr": np.asarray(self._lr, np.float32)}

    def step(self, given: Arrays) -> float:
        loss = self._step.loss({**{name: torch.from_numpy(given[name]) for name in ("image", "target")}, **self._head})
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def state(self) -> Arrays:
        return {name: value.detach().numpy().copy() for name, value in self._head.items()}

    def restore(self, state: Arrays) -> None:
        raise AssertionError("a step is tried once")

    def quantity(self, name: str) -> str:
        return name


def prepare(run, predictor, weights) -> PreparedStep:
    method, backbone = run.settings.build_method(), predictor.module.backbone
    step, side = HeadStep(backbone), backbone.spec.image_px
    plan = StepPlan(
        kind="headavg", settings={"lr": method.lr}, fixed={}, defaults=hyper_values(HeadAvg()),
        state={name: ("float32", weights[name].shape) for name in HEAD}, figures=("loss",),
        given={"image": ("uint8", (None, side, side, 3)), "target": ("int64", (None,)), "lr": ("float32", ())},
        needs_labels=True, frozen_sha256=backbone.spec.sha256, batch=method.batch, epochs=run.settings.epochs,
        balance=run.settings.balance, seed=run.settings.seed,
    )  # fmt: skip
    example = {
        "image": torch.zeros((TRACED_BATCH, side, side, 3), dtype=torch.uint8),
        "target": torch.zeros(TRACED_BATCH, dtype=torch.int64), "lr": torch.tensor(0.5),
        **{name: torch.from_numpy(np.array(weights[name])) for name in HEAD},
    }  # fmt: skip
    outputs = ("loss", *(NEXT + name for name in HEAD))
    graph = Traceable(step=step, example=example, outputs=outputs, free={"image": "batch", "target": "batch"})
    return PreparedStep(
        plan=plan,
        graphs={GRAPH: graph},
        check=lambda graphs: check_steps(graphs[GRAPH], TrainerSteps(step, method.lr, weights)),
    )


LEARNED = LearnedMethod(
    offers="headavg", fits=lambda run, predictor: isinstance(run.settings.build_method(), HeadAvg), prepare=prepare
)

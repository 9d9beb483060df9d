"""The gate of a training graph: it must learn what the trainer's PyTorch step learns, or there is no bundle.

Three steps of the trainer lead to a trained state; from it, trainer and graph take ten steps each on the same batches,
KL and distillation active, every step with the other settings that a round can have. Then ‖Δ‖₂/‖reference‖₂ ≤ 1e-4 for
each trainable tensor and for the loss, ≤ 1e-3 for the optimiser's moments. The reference is the trainer's own: its
losses, its term, PyTorch's AdamW. Source: docs/design.md, section 9.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from edgefl_export.errors import GateError
from edgefl_export.gates import gate_images
from edgefl_export.training_step import FedEvPromptStep
from edgefl_protocol.bundle.training_plan import (
    COUNTS,
    FIRST_MOMENT,
    MEANS,
    NEXT,
    RATE,
    SECOND_MOMENT,
    STEP,
    TrainingPlan,
    constants,
    fresh_state,
)
from edgefl_trainer.learning.attention_buffer import Distillation
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.losses import evidential_loss
from edgefl_trainer.models.head import dirichlet_summary, evidence_of
from edgefl_trainer.models.vit import ViTOutput
from edgefl_trainer.rollout import max_normalise, rollout_from_factors

WARM_STEPS, STEPS = 3, 10
BATCH = 8
TENSORS, MOMENTS = 1e-4, 1e-3  # allowed ‖Δ‖₂/‖reference‖₂
DECAY = 1.0  # in place of the plan's, an input too: a graph that leaves 0.01 out differs by half of what is allowed
KD_WEIGHT = 1e-4  # at least, an input too: at the usual 1e-6 a graph whose distillation has no gradient passes

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class StepParity:
    """‖Δ‖₂/‖reference‖₂ of one quantity after ten steps; for `loss`, over the ten losses."""

    quantity: str
    worst: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Within the gate; never for a value that is not a number."""
        return self.worst <= self.allowed


@dataclass(frozen=True)
class Batches:
    """What the steps of a comparison are given: one entry a step, and what stays the same."""

    images: tuple[NDArray[np.uint8], ...]
    targets: tuple[NDArray[np.int64], ...]
    settings: tuple[Mapping[str, float], ...]
    peers: Arrays


def drawn_batches(plan: TrainingPlan, side_px: int, classes: int, tokens: int, seed: int = 0) -> Batches:
    """Drawn pictures and labels for the gate; the last batch is smaller, as in an epoch.

    Args:
        plan: tells the KD weight; a small one is raised.
        side_px: side of the network's input.
        classes: K.
        tokens: N.
        seed: of the drawing.
    """
    rng = np.random.default_rng(seed)
    count = WARM_STEPS + STEPS
    sizes = [BATCH] * (count - 1) + [BATCH // 2 + 1]
    images = tuple(gate_images(side_px, size, seed + index) for index, size in enumerate(sizes))
    targets = tuple(rng.integers(0, classes, size) for size in sizes)
    weight = max(plan.kd_weight, KD_WEIGHT)
    settings = tuple(
        {"kl_weight": min(1.0, 0.1 * (index + 1)), "kd_weight": weight, "weight_decay": DECAY} for index in range(count)
    )
    means = rng.random((classes, tokens), np.float32)
    held = np.arange(classes, dtype=np.float32) % 3  # some classes no peer holds
    means = np.where(held[:, None] > 0, means / means.max(axis=1, keepdims=True), 0).astype(np.float32)
    return Batches(images, targets, settings, {MEANS: means, COUNTS: held})


class TrainerSteps:
    """The trainer's own step, one batch at a time, with PyTorch's AdamW."""

    def __init__(self, step: FedEvPromptStep, plan: TrainingPlan, weights: Mapping[str, NDArray[Any]]) -> None:
        self._module, self._gram = step.module, step.gram
        self.tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        for name in plan.trained:
            self.tensors[name].requires_grad_(True)
        groups = [{"params": [self.tensors[name]], "lr": plan.rates[name]} for name in plan.trained]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=plan.weight_decay)
        self._plan = plan

    def step(
        self,
        image: NDArray[np.uint8],
        target: NDArray[np.int64],
        settings: Mapping[str, float],
        peers: Arrays,
        *,
        need_maps: bool = True,
    ) -> float:
        """Learn one batch; returns the loss before the step. Without `need_maps`, distillation is left out."""
        tensors, module = self.tensors, self._module
        output = module.output(torch.from_numpy(image), tensors, need_attention=need_maps)
        features = module.features(output, tensors)
        evidence = evidence_of(module.logits(features, tensors), module.options.evidence)
        wanted = torch.from_numpy(target)
        loss = evidential_loss(evidence, wanted, tensors["prior"], settings["kl_weight"])
        if need_maps:
            assert isinstance(output, ViTOutput)
            maps = max_normalise(rollout_from_factors(output.factors))
            seen = Step(features, dirichlet_summary(evidence, tensors["prior"])[0], maps, wanted, tensors)
            means, counts = (torch.from_numpy(peers[name]) for name in (MEANS, COUNTS))
            loss = loss + Distillation(settings["kd_weight"], means, counts, self._gram)(seen)
        for group in self._optimizer.param_groups:
            group["weight_decay"] = settings["weight_decay"]
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def state(self) -> Arrays:
        """Tensors, moments and step count by their names in the graph."""
        found: Arrays = {}
        for name in self._plan.trained:
            moments = self._optimizer.state[self.tensors[name]]
            found[name] = self.tensors[name].detach().numpy().copy()
            found[FIRST_MOMENT + name] = moments["exp_avg"].numpy().copy()
            found[SECOND_MOMENT + name] = moments["exp_avg_sq"].numpy().copy()
            found[STEP] = np.asarray(int(moments["step"]), np.int64)
        return found


def check_training(
    graph: bytes,
    step: FedEvPromptStep,
    plan: TrainingPlan,
    weights: Mapping[str, NDArray[Any]],
    batches: Batches | None = None,
) -> list[StepParity]:
    """Run the gate.

    Args:
        graph: serialised training graph.
        step: what it was traced from.
        plan: its record.
        weights: the bundle's values.
        batches: three batches to warm up and ten to compare; drawn ones by default.

    Returns:
        The figure of every trainable tensor, moment and the loss.

    Raises:
        GateError: a figure beyond the gate; the sentence names the worst.
    """
    spec = step.module.vit.spec
    given = batches or drawn_batches(plan, spec.image_px, len(weights["prior"]), spec.tokens)
    trainer = TrainerSteps(step, plan, weights)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    fixed = {**constants(plan, weights), **given.peers, **rate_inputs(plan)}
    state = fresh_state(plan, weights)
    losses: list[tuple[float, float]] = []
    for index, (image, target, settings) in enumerate(zip(given.images, given.targets, given.settings, strict=True)):
        expected = trainer.step(image, target, settings, given.peers)
        if index < WARM_STEPS:
            state = trainer.state()
            continue
        numbers = {name: np.asarray(value, np.float32) for name, value in settings.items()}
        found = run_step(session, {"image": image, "target": target, **state, **numbers, **fixed})
        state = {name: found[NEXT + name] for name in plan.state}
        losses.append((expected, float(found["loss"])))
    figures = _compare(trainer.state(), state, np.array(losses))
    failed = [figure for figure in figures if not figure.passed]
    if failed:
        worst = max(failed, key=lambda figure: figure.worst / max(figure.allowed, 1e-30))
        raise GateError(
            f"after {STEPS} steps {worst.quantity} of the training graph differs from the trainer by {worst.worst:.1e},"
            f" allowed is {worst.allowed:.0e}; no bundle is made: try the versions of constraints.txt"
        )
    return figures


def run_step(session: onnxruntime.InferenceSession, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """One run of a training graph.

    Args:
        session: the loaded graph.
        inputs: by name.

    Returns:
        Outputs by name.
    """
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def rate_inputs(plan: TrainingPlan) -> Arrays:
    """The plan's learning rates as the graph takes them."""
    return {RATE + name: np.asarray(rate, np.float32) for name, rate in plan.rates.items()}


def _compare(expected: Arrays, found: Arrays, losses: NDArray[np.float64]) -> list[StepParity]:
    figures = [StepParity("loss", distance(losses[:, 0], losses[:, 1]), TENSORS)]
    for name, value in expected.items():
        if name == STEP:
            figures.append(StepParity(name, 0.0 if int(value) == int(found[name]) else float("inf"), 0.0))
            continue
        allowed = MOMENTS if name.startswith((FIRST_MOMENT, SECOND_MOMENT)) else TENSORS
        figures.append(StepParity(name, distance(value, found[name]), allowed))
    return figures


def distance(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """‖Δ‖₂/‖reference‖₂ in float64; infinite where it is not finite.

    Args:
        reference: the trainer's.
        other: the graph's.
    """
    wide = reference.astype(np.float64)
    scale = float(np.linalg.norm(wide))
    gap = float(np.linalg.norm(wide - other)) if np.isfinite(other).all() else float("inf")
    return gap / scale if scale > 0 else (0.0 if gap == 0 else float("inf"))

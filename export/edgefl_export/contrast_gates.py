"""The gate of FedCLF's graphs: they must learn what the trainer's PyTorch step learns, or there is no bundle.

Three steps of the trainer lead to a trained state; from it, trainer and graph take ten steps each on the same views and
negatives, the last batch smaller. Then ‖Δ‖₂/‖reference‖₂ ≤ 1e-4 for each tensor of both encoders and for the loss,
≤ 1e-3 for each momentum buffer; features of `encode.onnx` ≤ 1e-4. The reference is the trainer's own objective on
PyTorch's modules, with PyTorch's SGD. Where an activation lies within rounding of the corner of a ReLU, or two within
rounding of each other under a max-pool, a gradient goes another way on one side and nothing is wrong; in a large
network that happens every few steps. So a step that spends more than a tenth of what is allowed is taken again with
other pictures, both sides from where they stood, and the best of eight counts: a graph that learns otherwise differs
with all of them. Source: docs/design.md, section 9.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from edgefl_export.errors import GateError
from edgefl_export.training_gates import MOMENTS, STEPS, TENSORS, WARM_STEPS, StepParity, distance, run_step
from edgefl_protocol.bundle.contrast_plan import BUFFER, ENCODED, FIRST, NEGATIVES, NEXT, SECOND, VIEW, FedCLFPlan
from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_protocol.rules.slow_encoder import SLOW, key_momentum
from edgefl_trainer.augment import normalised
from edgefl_trainer.learning.unlabelled.contrast import FeatureQueue, MomentumContrast, slow_copy, unit
from edgefl_trainer.learning.unlabelled.self_supervised import Learner

BATCH, HELD = 8, 256  # pictures of a step, negatives
TRIES, ENOUGH = 8, 0.1  # draws of pictures of one step, and the share of what is allowed that ends them
ZERO = 1e-6  # of the largest tensor of a kind: below, one is zero but for rounding, such as a shift before batch norm
GRAINS = (2, 5, 11)  # patches along a side of a drawn picture, from coarse to fine

Arrays = dict[str, NDArray[Any]]
Pixels = NDArray[np.float32]  # (B, 3, px, px), in [0, 1]


@dataclass(frozen=True)
class ContrastBatch:
    """What one step is given."""

    first: Pixels
    second: Pixels
    rate: float


def drawn_batch(plan: FedCLFPlan, rng: np.random.Generator, size: int, rate: float) -> ContrastBatch:
    """Drawn pictures for the gate, two noisy views of each.

    Args:
        plan: tells the side.
        rng: of the drawing.
        size: number of pictures.
        rate: of the step.
    """
    pictures = np.mean([_patches(rng, size, grain, plan.view_px) for grain in GRAINS], axis=0)
    first, second = (  # within [0, 1] without being cut: equal pixels are ties under a max-pool
        (0.1 + 0.8 * pictures + rng.uniform(-0.1, 0.1, pictures.shape)).astype(np.float32) for _ in range(2)
    )
    return ContrastBatch(first, second, rate)


def _patches(rng: np.random.Generator, count: int, grain: int, side: int) -> NDArray[np.float64]:
    """Patches of random colour, (count, 3, side, side)."""
    length = -(-side // grain)
    small = rng.random((count, 3, grain, grain))
    return small.repeat(length, axis=2).repeat(length, axis=3)[:, :, :side, :side]


class TrainerSteps:
    """The trainer's own step, one batch at a time: its objective, PyTorch's modules and SGD."""

    def __init__(
        self,
        model: Learner,
        plan: FedCLFPlan,
        pixels: tuple[tuple[float, ...], tuple[float, ...]],
        negatives: NDArray[np.float32],
    ) -> None:
        """Take a network.

        Args:
            model: changed in place.
            plan: how it learns.
            pixels: mean and deviation of the channels.
            negatives: Q_CL, which stays as it is.
        """
        self.model, self.slow, self._pixels = model.train(), slow_copy(model, {}), pixels
        queue = FeatureQueue(len(negatives), torch.device("cpu"))
        queue.push(torch.from_numpy(negatives))
        bank = FeatureQueue(plan.queue, torch.device("cpu"))
        self._plan, m = plan, key_momentum(plan.key_momentum, 0)
        self._objective = MomentumContrast(
            self.model, self.slow, m, plan.temperature, bank, queue, None, keeps_local=False
        )
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
        )

    def step(self, batch: ContrastBatch) -> float:
        """Learn one batch; returns the loss before the step."""
        for group in self._optimizer.param_groups:
            group["lr"] = batch.rate
        views = tuple(normalised(torch.from_numpy(view), *self._pixels) for view in (batch.first, batch.second))
        loss = self._objective(views)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def features(self, views: Pixels) -> NDArray[np.float32]:
        """What the slow encoder says of views, with the statistics of their batch; moves its running ones."""
        with torch.no_grad():
            found: NDArray[np.float32] = unit(self.slow(normalised(torch.from_numpy(views), *self._pixels))).numpy()
        return found

    def state(self) -> Arrays:
        """Everything a step changes, by its names in the graph."""
        own = {name: value.detach().numpy().copy() for name, value in self.model.state_dict().items()}
        slow = {SLOW + name: value.detach().numpy().copy() for name, value in self.slow.state_dict().items()}
        moved = {
            BUFFER + name: self._optimizer.state[value]["momentum_buffer"].numpy().copy()
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }
        found = {**own, **slow, **moved}
        return {name: found[name] for name in self._plan.state}

    def restore(self, state: Arrays) -> None:
        """Go back to a state that `state` gave."""
        own = {name: torch.from_numpy(state[name].copy()) for name in self._plan.network}
        self.model.load_state_dict(own, strict=False)
        slow = {name: torch.from_numpy(state[SLOW + name].copy()) for name in self._plan.network}
        self.slow.load_state_dict(slow, strict=False)
        for name, value in self.model.named_parameters():
            if BUFFER + name in state:
                self._optimizer.state[value]["momentum_buffer"] = torch.from_numpy(state[BUFFER + name].copy())


def check_contrast(
    graph: bytes,
    encoder: bytes,
    model: Learner,
    plan: FedCLFPlan,
    pixels: tuple[tuple[float, ...], tuple[float, ...]],
) -> list[StepParity]:
    """Run the gate.

    Args:
        graph: serialised training graph.
        encoder: serialised graph of features.
        model: the network; left as it is.
        plan: the record beside the graphs.
        pixels: mean and deviation of the channels.

    Returns:
        The worst figure of each kind of tensor, of the loss and of the features, and the most draws that a step took.

    Raises:
        GateError: a figure beyond the gate; the sentence names the worst.
    """
    rng = np.random.default_rng(0)
    negatives = rng.normal(size=(HELD, FEATURES)).astype(np.float32)
    negatives /= np.linalg.norm(negatives, axis=1, keepdims=True)
    step, views = (onnxruntime.InferenceSession(one, providers=["CPUExecutionProvider"]) for one in (graph, encoder))
    trainer = TrainerSteps(deepcopy(model), plan, pixels, negatives)
    for index in range(WARM_STEPS):
        batch = drawn_batch(plan, rng, BATCH, plan.lr * (1 - 0.05 * index))
        trainer.step(batch)
    state, losses = trainer.state(), list[tuple[float, float]]()
    figures, most = list[StepParity](), 1
    for index in range(WARM_STEPS, WARM_STEPS + STEPS):
        size = BATCH if index < WARM_STEPS + STEPS - 1 else BATCH // 2 + 1
        before, tries = trainer.state(), list[_Try]()
        while len(tries) < TRIES and (not tries or tries[-1].spent > ENOUGH):
            trainer.restore(before)
            batch = drawn_batch(plan, rng, size, plan.lr * (1 - 0.05 * index))
            expected = trainer.step(batch)
            found = run_step(step, {**state, **step_inputs(plan, batch, negatives)})
            after, pair = {name: found[NEXT + name] for name in plan.state}, (expected, float(found["loss"]))
            figures = _compare(plan, trainer.state(), after, np.array([*losses, pair]))
            tries.append(_Try(figures, trainer.state(), after, pair))
        best = min(tries, key=lambda one: one.spent)
        trainer.restore(best.reference)
        most = max(most, len(tries))
        figures, state, losses = best.figures, best.found, [*losses, best.losses]
        if best.spent > 1:
            raise _failed(figures)
    own = {name: trainer.state()[SLOW + name] for name in plan.parameters}
    said = run_step(views, {VIEW: batch.second, **own})[ENCODED]
    figures.append(StepParity("features", distance(trainer.features(batch.second), said), TENSORS))
    if not figures[-1].passed:
        raise _failed(figures)
    return [*figures, StepParity("most draws of a step", most, TRIES)]


@dataclass(frozen=True)
class _Try:
    """One step of both: what differs, and where they stand."""

    figures: list[StepParity]
    reference: Arrays
    found: Arrays
    losses: tuple[float, float]

    @property
    def spent(self) -> float:
        """The largest share of what is allowed."""
        return max(figure.worst / max(figure.allowed, 1e-30) for figure in self.figures)


def _failed(figures: list[StepParity]) -> GateError:
    worst = max(figures, key=lambda figure: figure.worst / max(figure.allowed, 1e-30))
    return GateError(
        f"within {STEPS} steps {worst.quantity} of the training graph differ from the trainer by {worst.worst:.1e}, "
        f"allowed is {worst.allowed:.0e}; no bundle is made: try the versions of constraints.txt"
    )


def step_inputs(plan: FedCLFPlan, batch: ContrastBatch, negatives: NDArray[np.float32]) -> Arrays:
    """Everything that a step takes beside the state.

    Args:
        plan: settings.
        batch: two views and a rate.
        negatives: Q_CL.
    """
    numbers = {
        "rate": batch.rate, "momentum": plan.momentum, "weight_decay": plan.weight_decay,
        "key_momentum": key_momentum(plan.key_momentum, 0),
    }  # fmt: skip
    pace = {name: np.asarray(value, np.float32) for name, value in numbers.items()}
    return {FIRST: batch.first, SECOND: batch.second, NEGATIVES: negatives, **pace}


def _compare(plan: FedCLFPlan, expected: Arrays, found: Arrays, losses: NDArray[np.float64]) -> list[StepParity]:
    """The worst tensor of each kind: the encoder's, the slow encoder's, and the buffers; counters are exact."""
    kinds = {
        "parameters": plan.parameters,
        "statistics": plan.statistics,
        "slow parameters": [SLOW + name for name in plan.parameters],
        "slow statistics": [SLOW + name for name in plan.statistics],
        "momentum buffers": [BUFFER + name for name in plan.parameters],
    }
    figures = [StepParity("loss", distance(losses[:, 0], losses[:, 1]), TENSORS)]
    for kind, names in kinds.items():
        allowed = MOMENTS if kind == "momentum buffers" else TENSORS
        largest = max((_size(expected[name]) for name in names), default=0.0)
        worst = max((_apart(expected[name], found[name], ZERO * largest) for name in names), default=0.0)
        figures.append(StepParity(kind, worst, allowed))
    counters = [name for own in plan.counters for name in (own, SLOW + own)]
    same = all(int(expected[name]) == int(found[name]) for name in counters)
    figures.append(StepParity("counters", 0.0 if same else float("inf"), 0.0))
    return figures


def _apart(reference: NDArray[Any], other: NDArray[Any], zero: float) -> float:
    """The distance; none where both are zero but for rounding."""
    return 0.0 if max(_size(reference), _size(other)) < zero else distance(reference, other)


def _size(value: NDArray[Any]) -> float:
    """Root mean square; infinite where a value is not finite."""
    size = float(np.sqrt(np.mean(np.square(value, dtype=np.float64))))
    return size if np.isfinite(size) else float("inf")

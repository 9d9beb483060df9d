"""The gate of a training graph: it must learn what the trainer's PyTorch step learns, or there is no bundle.

Three steps of the trainer lead to a trained state; from it, trainer and graph take ten steps each on the same batches.
Then ‖Δ‖₂/‖reference‖₂ ≤ 1e-4 for each quantity of the state and for the loss, ≤ 1e-3 for the optimiser's moments;
counters are equal. A method gives its trainer's own step as a `Reference`, with every part of its loss active.

Where an activation lies within rounding of the corner of a ReLU, or two within rounding of each other under a max-pool,
a gradient goes another way on one side and nothing is wrong; in a large network that happens every few steps. So a
reference may ask for several `tries`: a step that spends more than a tenth of what is allowed is then taken again with
another batch, both sides from where they stood, and the best counts: a graph that learns otherwise differs with all of
them. Source: docs/design.md, section 9.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgefl_export.errors import GateError
from edgefl_protocol.bundle.learning_plan import NEXT

WARM_STEPS, STEPS = 3, 10
BATCH = 8  # pictures of a step; the last is smaller, as in an epoch
TENSORS, MOMENTS = 1e-4, 1e-3  # allowed ‖Δ‖₂/‖reference‖₂
GRAINS = (2, 5, 11)  # patches along a side of a drawn picture, from coarse to fine
ENOUGH = 0.1  # share of what is allowed below which a step is not tried again
ZERO = 1e-6  # of the largest tensor of a kind: below, one is zero but for rounding, such as a shift before batch norm

Arrays = dict[str, NDArray[Any]]


class Reference(Protocol):
    """The trainer's own step, one batch at a time."""

    @property
    def tries(self) -> int:
        """How many batches one step may be tried with."""

    def batch(self, index: int) -> Arrays:
        """Give what a step takes beside the state, from 0; with `tries`, another batch when asked again."""

    def step(self, given: Arrays) -> float:
        """Learn one batch; returns the loss before the step."""

    def state(self) -> Arrays:
        """Return a copy of everything a step changes, by its names in the graph."""

    def restore(self, state: Arrays) -> None:
        """Go back to a state that `state` gave; called where `tries` is above 1."""

    def quantity(self, name: str) -> str:
        """Return what a tensor of the state is reported as: of each quantity, the worst tensor counts."""


@dataclass(frozen=True)
class StepParity:
    """‖Δ‖₂/‖reference‖₂ of one quantity after the steps; for `loss`, over their losses."""

    quantity: str
    worst: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Within the gate; never for a value that is not a number."""
        return self.worst <= self.allowed

    @property
    def spent(self) -> float:
        """Share of what is allowed."""
        return self.worst / max(self.allowed, 1e-30)


@dataclass(frozen=True)
class _Try:
    """One step of both: what differs, and where they stand."""

    figures: list[StepParity]
    reference: Arrays
    found: Arrays
    losses: tuple[float, float]

    @property
    def spent(self) -> float:
        return max(figure.spent for figure in self.figures)


def check_steps(graph: bytes, trainer: Reference) -> list[StepParity]:
    """Run the gate.

    Args:
        trainer: its reference, before the first step; stands after the last one afterwards.

    Returns:
        The worst figure of each quantity and of the losses; with `tries`, the most batches that a step took.

    Raises:
        GateError: a figure beyond the gate; the sentence names the worst.
    """
    for index in range(WARM_STEPS):
        trainer.step(trainer.batch(index))
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    state, losses, most = trainer.state(), list[tuple[float, float]](), 1
    for index in range(WARM_STEPS, WARM_STEPS + STEPS):
        before, tries = trainer.state(), list[_Try]()
        while len(tries) < trainer.tries and (not tries or tries[-1].spent > ENOUGH):
            if tries:
                trainer.restore(before)
            tries.append(_stepped(session, trainer, trainer.batch(index), state, losses))
        best = min(tries, key=lambda one: one.spent)
        if best is not tries[-1]:
            trainer.restore(best.reference)
        most, state, losses = max(most, len(tries)), best.found, [*losses, best.losses]
        refuse(best.figures)
    drawn = [StepParity("most draws of a step", most, trainer.tries)] if trainer.tries > 1 else []
    return [*best.figures, *drawn]


def _stepped(
    session: onnxruntime.InferenceSession,
    trainer: Reference,
    given: Arrays,
    state: Arrays,
    losses: Sequence[tuple[float, float]],
) -> _Try:
    expected = trainer.step(given)
    found = run_step(session, {**given, **state})
    after, pair = {name: found[NEXT + name] for name in state}, (expected, float(found["loss"]))
    reference = trainer.state()
    return _Try([_losses([*losses, pair]), *_compare(trainer, reference, after)], reference, after, pair)


def refuse(figures: Sequence[StepParity]) -> None:
    """Raise a `GateError` that names the worst figure, where one is beyond the gate."""
    if not all(figure.passed for figure in figures):
        worst = max(figures, key=lambda figure: figure.spent)
        raise GateError(
            f"within {STEPS} steps {worst.quantity} of the training graph differs from the trainer by "
            f"{worst.worst:.1e}, and at most {worst.allowed:.0e} is allowed; no bundle is made: try the versions in "
            "constraints.txt"
        )


def run_step(session: onnxruntime.InferenceSession, inputs: Mapping[str, NDArray[Any]]) -> Arrays:
    """Run a training graph once; returns its outputs by name."""
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def batch_size(index: int) -> int:
    """Return how many pictures a step of the gate takes."""
    return BATCH if index < WARM_STEPS + STEPS - 1 else BATCH // 2 + 1


def noisy_views(rng: np.random.Generator, count: int, side: int) -> list[NDArray[np.float32]]:
    """Draw two noisy views of pictures of coloured patches, (count, 3, side, side), in [0, 1] without being cut.

    Equal pixels would be ties under a max-pool.
    """

    def patches(grain: int) -> NDArray[np.float64]:
        length, small = -(-side // grain), rng.random((count, 3, grain, grain))
        return small.repeat(length, axis=2).repeat(length, axis=3)[:, :, :side, :side]

    pictures = np.mean([patches(grain) for grain in GRAINS], axis=0)
    return [(0.1 + 0.8 * pictures + rng.uniform(-0.1, 0.1, pictures.shape)).astype(np.float32) for _ in range(2)]


def _losses(pairs: Sequence[tuple[float, float]]) -> StepParity:
    both = np.array(pairs)
    return StepParity("loss", distance(both[:, 0], both[:, 1]), TENSORS)


def _compare(trainer: Reference, expected: Arrays, found: Arrays) -> list[StepParity]:
    kinds: dict[str, list[str]] = {}
    for name in expected:
        kinds.setdefault(trainer.quantity(name), []).append(name)
    figures = []
    for kind, names in kinds.items():
        if expected[names[0]].dtype.kind == "i":
            same = all(np.array_equal(expected[name], found[name]) for name in names)
            figures.append(StepParity(kind, 0.0 if same else float("inf"), 0.0))
            continue
        zero = ZERO * max(_size(expected[name]) for name in names)
        worst = max(_apart(expected[name], found[name], zero) for name in names)
        figures.append(StepParity(kind, worst, MOMENTS if names[0].startswith("optimizer.") else TENSORS))
    return figures


def _apart(reference: NDArray[Any], other: NDArray[Any], zero: float) -> float:
    """Return the distance; none where both are zero but for rounding."""
    return 0.0 if max(_size(reference), _size(other)) < zero else distance(reference, other)


def _size(value: NDArray[Any]) -> float:
    """Root mean square; infinite where a value is not finite."""
    size = float(np.sqrt(np.mean(np.square(value, dtype=np.float64))))
    return size if np.isfinite(size) else float("inf")


def distance(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """Return ‖Δ‖₂/‖reference‖₂ in float64; infinite where it is not finite."""
    wide = reference.astype(np.float64)
    scale = float(np.linalg.norm(wide))
    gap = float(np.linalg.norm(wide - other)) if np.isfinite(other).all() else float("inf")
    return gap / scale if scale > 0 else (0.0 if gap == 0 else float("inf"))

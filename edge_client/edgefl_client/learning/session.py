"""A bundle's training graph on onnxruntime, one step at a time, whatever the method.

Guarantees: the graph is the verified one; a figure or value that is not finite never replaces the state; the same
inputs and number of threads give the same state, bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_client.runtime import check_runtime, load_graph, run_graph
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.learning_plan import GRAPH, NEXT, LearningPlan

StepState = dict[str, NDArray[Any]]
Arrays = Mapping[str, NDArray[Any]]

STEP = "the training step"  # what cannot run where the runtime fails
GO_ON = "the values before this step are kept: continue with other pictures, or begin again with --restart"


class TrainingSession:
    """Takes steps with one bundle; `advice` is told where a step gives a number that is not finite."""

    def __init__(self, bundle: Bundle, fixed: Arrays, threads: int, advice: str = GO_ON) -> None:
        check_runtime(bundle.manifest.min_runtime)
        self._fixed, self._advice = fixed, advice
        self._graph = load_graph(bundle.extras[GRAPH], threads)
        self._outputs = [value.name for value in self._graph.get_outputs()]

    def shape(self, name: str) -> tuple[Any, ...]:
        """Return the lengths of an input; a text where one is free."""
        return next(tuple(value.shape) for value in self._graph.get_inputs() if value.name == name)

    def step(self, state: Arrays, given: Arrays) -> tuple[StepState, StepState]:
        """Learn one batch.

        Args:
            state: what steps change; left as it is.
            given: the batch, and what else changes from step to step.

        Raises:
            LearningError: a figure or value is not finite (`not_finite`).
        """
        found = run_graph(self._graph, self._outputs, {**self._fixed, **given, **state}, STEP)
        if not all(np.isfinite(value).all() for value in found.values()):
            raise LearningError(f"the loss or a learned value is not a finite number; {self._advice}", "not_finite")
        changed = {name: found.pop(NEXT + name) for name in state}
        return changed, found


def plan_of(bundle: Bundle) -> LearningPlan:
    """Return how a bundle learns.

    Raises:
        LearningError: it brings no training step.
    """
    if bundle.training is None:
        raise LearningError(
            "this bundle can only score: it has no training step; ask its signer for one exported with --with-training",
            "no_training",
        )
    return bundle.training

"""FedCLF's two graphs on onnxruntime: one step of learning, and features of views.

Guarantees: the graphs are the verified ones; a loss or value that is not finite never replaces the state; the same
state, views, negatives, pace and number of threads give the same state, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.feature_queue import Features
from edgefl_client.learning.views import Views
from edgefl_client.runtime import RUNTIME_ERRORS, check_runtime, first_line, load_graph
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.contrast_plan import ENCODED, ENCODER, FIRST, NEGATIVES, NEXT, SECOND, VIEW, FedCLFPlan
from edgefl_protocol.bundle.training_plan import GRAPH
from edgefl_protocol.errors import BundleError

State = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step leaves: the new state, the loss before it, and the slow encoder's features of the second views."""

    state: dict[str, NDArray[Any]]
    loss: float
    keys: Features


class ContrastSession:
    """Takes steps with one bundle.

    Args:
        bundle: a verified bundle of this kind.
        plan: how it learns.
        threads: of one step.

    Raises:
        BundleError: the runtime is older than the bundle asks for, or cannot load a graph.
    """

    def __init__(self, bundle: Bundle, plan: FedCLFPlan, threads: int) -> None:
        check_runtime(bundle.manifest.min_runtime)
        self._plan = plan
        self._step = load_graph(bundle.extras[GRAPH], threads)
        self._encoder = load_graph(bundle.extras[ENCODER], threads)

    def step(
        self, state: State, views: tuple[Views, Views], negatives: Features, *, rate: float, key_momentum: float
    ) -> Stepped:
        """Learn one batch.

        Args:
            state: arrays under `FedCLFPlan.state`; left as they are.
            views: two of each picture, (B, 3, px, px), B at least 2.
            negatives: Q_CL.
            rate: of this step.
            key_momentum: m.

        Raises:
            LearningError: the loss or a value is not finite (`not_finite`).
            BundleError: the runtime failed.
        """
        plan = self._plan
        pace = {
            "rate": rate,
            "momentum": plan.momentum,
            "weight_decay": plan.weight_decay,
            "key_momentum": key_momentum,
        }
        given = {
            FIRST: views[0],
            SECOND: views[1],
            NEGATIVES: negatives,
            **{name: state[name] for name in plan.state},
            **{name: np.asarray(value, np.float32) for name, value in pace.items()},
        }
        found = _run(self._step, list(plan.outputs), given)
        if not all(np.isfinite(value).all() for value in found.values()):
            raise LearningError(
                "the loss or a learned value is not a finite number; the values before this round are kept: go on with "
                "other pictures, or tell the federation's operator",
                "not_finite",
            )
        changed = {name: found[NEXT + name] for name in plan.state}
        return Stepped(state=changed, loss=float(found["loss"]), keys=found["keys"])

    def features(self, parameters: State, views: Views) -> Features:
        """Features of a batch, with the statistics of the batch.

        Args:
            parameters: of a network, by name.
            views: (B, 3, px, px), B at least 2.

        Returns:
            Rows of length 1, (B, 128).

        Raises:
            LearningError: a value is not finite (`not_finite`).
            BundleError: the runtime failed.
        """
        given = {VIEW: views, **{name: parameters[name] for name in self._plan.parameters}}
        found: Features = _run(self._encoder, [ENCODED], given)[ENCODED]
        if not np.isfinite(found).all():
            raise LearningError("a feature is not a finite number; tell the federation's operator", "not_finite")
        return found


def _run(graph: onnxruntime.InferenceSession, outputs: list[str], given: State) -> dict[str, NDArray[Any]]:
    try:
        return dict(zip(outputs, graph.run(outputs, dict(given)), strict=True))
    except RUNTIME_ERRORS as error:
        raise BundleError(f"the training step cannot run: {first_line(error)}", "graph_run") from error

"""One step of learning: the bundle's training graph on onnxruntime.

Guarantees: the graph is the verified one; a loss or value that is not finite never replaces the state; the same state,
batch, settings and number of threads give the same state, bit for bit.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_client.runtime import RUNTIME_ERRORS, check_runtime, first_line, load_graph
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.training_plan import FIGURES, GRAPH, MEANS, NEXT, RATE, Plan, TrainingPlan, constants
from edgefl_protocol.errors import BundleError

State = dict[str, NDArray[Any]]


class TrainingSession:
    """Takes steps with one bundle.

    Args:
        bundle: a verified bundle.
        plan: how it learns.
        prior: (K,) of this device's own pictures.
        threads: of one step.

    Raises:
        BundleError: the runtime is older than the bundle asks for, or cannot load the graph.
    """

    def __init__(self, bundle: Bundle, plan: TrainingPlan, prior: NDArray[np.float32], threads: int) -> None:
        check_runtime(bundle.manifest.min_runtime)
        self._plan = plan
        rates = {RATE + name: np.asarray(rate, np.float32) for name, rate in self._plan.rates.items()}
        self._fixed: State = {
            **constants(self._plan, bundle.weights),
            **rates,
            "prior": prior,
            "weight_decay": np.asarray(self._plan.weight_decay, np.float32),
            "kd_weight": np.asarray(self._plan.kd_weight, np.float32),
        }
        self._graph = load_graph(bundle.extras[GRAPH], threads)

    @property
    def tokens(self) -> int:
        """Number N of patches."""
        return next(int(value.shape[1]) for value in self._graph.get_inputs() if value.name == MEANS)

    def step(
        self,
        state: Mapping[str, NDArray[Any]],
        images: NDArray[np.uint8],
        labels: NDArray[np.int64],
        kl_weight: float,
        peers: Mapping[str, NDArray[np.float32]],
    ) -> tuple[State, dict[str, float]]:
        """Learn one batch.

        Args:
            state: arrays under `TrainingPlan.state`; left as they are.
            images: (B, S, S, 3).
            labels: class indices, (B,).
            kl_weight: of this epoch.
            peers: result of `peer_targets`.

        Returns:
            The new state; `loss`, `kd` (its part that compares maps) and `dead` (share of pictures without evidence).

        Raises:
            LearningError: the loss or a value is not finite (`not_finite`).
            BundleError: the runtime failed.
        """
        given = {"image": images, "target": labels, "kl_weight": np.asarray(kl_weight, np.float32)}
        try:
            values = self._graph.run(list(self._plan.outputs), {**self._fixed, **peers, **state, **given})
        except RUNTIME_ERRORS as error:
            raise BundleError(f"the training step cannot run: {first_line(error)}", "graph_run") from error
        found = dict(zip(self._plan.outputs, values, strict=True))
        if not all(np.isfinite(value).all() for value in found.values()):
            raise LearningError(
                "the loss or a learned value is not a finite number; the values before this step are kept: go on with "
                "other pictures, or begin again with --restart",
                "not_finite",
            )
        return {name: found[NEXT + name] for name in self._plan.state}, {name: float(found[name]) for name in FIGURES}


def plan_of(bundle: Bundle) -> Plan:
    """How a bundle learns.

    Raises:
        LearningError: it brings no training step.
    """
    if bundle.training is None:
        raise LearningError(
            "this bundle only scores: it brings no training step; ask its signer for one exported with --with-training",
            "no_training",
        )
    return bundle.training

"""FedCLF's two graphs on onnxruntime: one step of learning, and features of views."""

from dataclasses import dataclass

import numpy as np

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.feature_queue import Features
from edgefl_client.learning.session import STEP, Arrays, StepState, TrainingSession
from edgefl_client.learning.views import Views
from edgefl_client.runtime import load_graph, run_graph
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedclf_plan import ENCODED, ENCODER, FIRST, NEGATIVES, SECOND, VIEW, FedCLFPlan

GO_ON = "the values before this round are kept: go on with other pictures, or tell the federation's operator"


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step leaves: the new state, the loss before it, and the slow encoder's features of the second views."""

    state: StepState
    loss: float
    keys: Features


class ContrastSession:
    """Takes steps with one bundle of FedCLF."""

    def __init__(self, bundle: Bundle, plan: FedCLFPlan, threads: int) -> None:
        pace = {name: np.asarray(getattr(plan, name), np.float32) for name in ("momentum", "weight_decay")}
        self._plan = plan
        self._step = TrainingSession(bundle, pace, threads, GO_ON)
        self._encoder = load_graph(bundle.extras[ENCODER], threads)

    def step(
        self, state: Arrays, views: tuple[Views, Views], negatives: Features, *, rate: float, key_momentum: float
    ) -> Stepped:
        """Learn one batch.

        Args:
            state: holds arrays under `FedCLFPlan.state`; left as it is.
            views: two of each picture, (B, 3, px, px), B at least 2.
        """
        pace = {"rate": np.asarray(rate, np.float32), "key_momentum": np.asarray(key_momentum, np.float32)}
        given = {FIRST: views[0], SECOND: views[1], NEGATIVES: negatives, **pace}
        changed, found = self._step.step({name: state[name] for name in self._plan.state}, given)
        return Stepped(state=changed, loss=float(found["loss"]), keys=found["keys"])

    def features(self, parameters: Arrays, views: Views) -> Features:
        """Return features of a batch with the statistics of the batch: rows of length 1, (B, 128).

        Args:
            views: (B, 3, px, px), B at least 2.

        Raises:
            LearningError: a value is not finite (`not_finite`).
        """
        given = {VIEW: views, **{name: parameters[name] for name in self._plan.parameters}}
        found: Features = run_graph(self._encoder, [ENCODED], given, STEP)[ENCODED]
        if not np.isfinite(found).all():
            raise LearningError("a feature is not a finite number; tell the federation's operator", "not_finite")
        return found

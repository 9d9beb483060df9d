"""FedCLF's two graphs on onnxruntime: one step of learning, and features of pictures by the network of a round.

A learner that has such a network names `FeatureEncoder` (`Learner.encoder`); with it a device learns, and contributes
features without learning. Guarantees: the network is checked against the bundle's record before it is used; no feature
holds a number that is not finite. Source: FedCLF (arXiv 2208.11278) section III; docs/decisions/0027 and 0033.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.feature_queue import Features
from edgefl_client.learning.session import STEP, Arrays, StepState, TrainingSession
from edgefl_client.learning.views import Views
from edgefl_client.runtime import check_runtime, load_graph, run_graph
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedclf_plan import ENCODED, ENCODER, FIRST, NEGATIVES, SECOND, VIEW, FedCLFPlan, begun
from edgefl_protocol.bundle.learning_plan import LearningPlan
from edgefl_protocol.rules.slow_encoder import BUFFER, SLOW, round_begins

GO_ON = "the values before this round are kept: continue with other pictures, or tell the federation's operator"


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


class FeatureEncoder:
    """The encoder of a bundle.

    Attributes:
        view_px: side of a view.
        batch: views in a batch.
        most: features that a site shares at most.
    """

    def __init__(self, bundle: Bundle, plan: LearningPlan, threads: int) -> None:
        assert isinstance(plan, FedCLFPlan)  # the record of this kind
        check_runtime(bundle.manifest.min_runtime)
        self._plan = plan
        self._graph = load_graph(bundle.extras[ENCODER], threads)
        self.view_px, self.batch, self.most = plan.view_px, plan.batch, plan.queue

    def slow(self, broadcast: Arrays, own: Arrays) -> dict[str, NDArray[Any]]:
        """Return the parameters of a round's slow encoder, whose features the sites share; see `round_network`."""
        network = round_network(self._plan, broadcast, own)
        return {name: network[SLOW + name] for name in self._plan.parameters}

    def __call__(self, parameters: Arrays, views: Views) -> Features:
        """Return features of a batch with the statistics of the batch: rows of length 1, (B, 128).

        Args:
            views: (B, 3, px, px), B at least 2.

        Raises:
            LearningError: a value is not finite (`not_finite`).
        """
        given = {VIEW: views, **{name: parameters[name] for name in self._plan.parameters}}
        found: Features = run_graph(self._graph, [ENCODED], given, STEP)[ENCODED]
        if not np.isfinite(found).all():
            raise LearningError("a feature is not a finite number; tell the federation's operator", "not_finite")
        return found


def round_network(
    plan: FedCLFPlan, broadcast: Mapping[str, NDArray[Any]], own: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return the encoder that a round begins with and its slow copy, as `begun` lays them out.

    Args:
        broadcast: what the federation sent.
        own: what the device kept of the round before.

    Raises:
        LearningError: the network is not the bundle's (`other_network`).
    """
    stayed = {name: own[name] for name in plan.stays if name in own}
    found = round_begins(broadcast, stayed, plan.momentum_encoder)
    kinds = {name: np.int64 if name in plan.counters else np.float32 for name in plan.network}
    for name in (*plan.network, *(name for name in found if name.startswith((SLOW, BUFFER)))):
        bare, value = name.removeprefix(BUFFER).removeprefix(SLOW), found.get(name)
        if value is None or bare not in kinds or value.shape != plan.shape(bare) or value.dtype != kinds[bare]:
            raise LearningError(
                f"the federation's network is not this bundle's: {name[:80]} is "
                f"{'missing' if value is None else f'of {value.dtype} {value.shape}'}; fetch its bundle with "
                "edgefl sync",
                "other_network",
            )
    return begun(plan, found)

"""The device's half of `HeadAvg`: E epochs of the bundle's step from the head that came."""

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from edgefl_client.learning.options import Report
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.round_learner import Circumstances, phase_and_round
from edgefl_client.learning.session import TrainingSession
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.step_plan import StepPlan
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.draws import epoch_order, generator

Arrays = Mapping[str, NDArray[Any]]


class HeadAvgLearner:
    """See `RoundLearner`."""

    only_in_federations: ClassVar[str | None] = "this bundle learns a federation's head: take part with edgefl sync"
    encoder: ClassVar[None] = None
    travels: ClassVar[tuple[str, ...]] = ("weights",)

    def __init__(self, bundle: Bundle, rows: Dealt, around: Circumstances) -> None:
        plan = around.options.plan(bundle)
        assert isinstance(plan, StepPlan)
        self._plan, self._rows, self._site = plan, rows.learn, around.site
        fixed = {**plan.constants(bundle.weights), **plan.numbers()}
        self._session = TrainingSession(bundle, fixed, around.options.threads or 1)

    def start(self) -> Arrays:
        """Nothing: the head comes with the broadcast."""
        return {}

    def most_reply_bytes(self, broadcast: Payload) -> int:
        return 0

    def local_round(self, state: Arrays, broadcast: Payload, report: Report) -> tuple[Arrays, Payload]:
        plan, rows, (_, round_) = self._plan, self._rows, phase_and_round(broadcast)
        head = {name: broadcast.arrays[name] for name in plan.state}
        for epoch in range(plan.epochs):
            order = epoch_order(generator(plan.seed, self._site, "order", round_, epoch), rows.labels, plan.balance)
            for chosen in batches_of(order, plan.batch):
                head, _ = self._session.step(head, {"image": rows.images[chosen], "target": rows.labels[chosen]})
        return state, Payload(head, {"n_train": len(rows), "site_sha256": digest(dict(state))})

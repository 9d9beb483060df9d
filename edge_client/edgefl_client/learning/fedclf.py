"""FedCLF on the device: an encoder learns here without labels; its weights and the device's features leave.

    warm     the bank Q_l: features of the device's pictures, one view of each             _warm
    train    E epochs of momentum contrast against Q_CL; the slow encoder's features
             enter Q_l, and Q_CL takes B of the others' in each step                       _learn
    final    with `bn=local`: batch norm, sent once                                        _final
    reply    the encoder (all of it, or all but batch norm) and what of Q_l the round
             made, in `final` nothing of Q_l; `n_train` weighs it

The names of what travels are those of the trainer's method, so devices and GPU sites learn in one federation. Orders
and the others' features that enter are the trainer's draws; views are this device's own (`views`). A device without
others has its own features as negatives. Guarantees: the same state, broadcast, pictures, site and number of threads
give the same bits, however often it was killed or paused on the way; features have unit length. The method:
`edgefl_trainer.methods.fedclf`; its graph: `edgefl_export.methods.fedclf`. Source: arXiv 2208.11278, section III;
docs/methods.md, FedCLF; docs/design.md, sections 7 and 9; docs/decisions/0027.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.checkpoint import CHANGED, Point, digest_of, same_form
from edgefl_client.learning.contrast_session import ContrastSession, FeatureEncoder, round_network
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.feature_queue import FeatureQueue, Features, received
from edgefl_client.learning.limits import check_step_memory
from edgefl_client.learning.options import Report
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.round_learner import Arrays, Circumstances, Keeper, phase_and_round, rounds_of
from edgefl_client.learning.views import Views, draw, views
from edgefl_client.runtime import processors
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedclf_plan import FedCLFPlan
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.rules import feature_rows
from edgefl_protocol.rules.batches import LEAST_BATCH, cut
from edgefl_protocol.rules.draws import bank_rng, epoch_order, generator, order_rng, remote_rng
from edgefl_protocol.rules.feature_rows import BANK, FEATURES, are_features, first_order, have_unit_length
from edgefl_protocol.rules.negatives import (
    collapse_warning,
    draw_others,
    entering,
    first_negatives,
    mean_similarity,
    most_negatives,
)
from edgefl_protocol.rules.rates import epochs_done, falling_rate
from edgefl_protocol.rules.slow_encoder import SLOW, key_momentum, local_steps

QUEUE = "negatives"  # Q_CL in a point, beside the state
ENTRY_BYTES = 128  # of a payload's header for an array, beside its name


class FedCLFLearner:
    """See `RoundLearner`.

    Args:
        rows: pictures that teach; whether they have labels is not looked at.

    Raises:
        LearningError: there are too few different pictures for a step.
    """

    only_in_federations: ClassVar[str | None] = (
        "this bundle learns FedCLF, which works only within a federation and changes no score: take part with "
        "edgefl sync, which remembers these pictures"
    )

    encoder: ClassVar[type[FeatureEncoder] | None] = FeatureEncoder

    def __init__(self, bundle: Bundle, rows: Dealt, around: Circumstances) -> None:
        plan = around.options.plan(bundle)
        assert isinstance(plan, FedCLFPlan)  # the record of this kind
        if rows.learn.different < LEAST_BATCH:
            raise LearningError(
                f"a step needs {LEAST_BATCH} different pictures, but there are {rows.learn.different}; name more",
                "few_images",
            )
        self._bundle, self._plan, self._rows, self._around = bundle, plan, rows.learn, around
        self._threads = around.options.threads or processors()
        self._encoder = FeatureEncoder(bundle, plan, self._threads)

    @cached_property
    def _session(self) -> ContrastSession:
        """What takes steps: loaded with the first, for a warm exchange takes none and the graph is large."""
        return ContrastSession(self._bundle, self._plan, self._threads)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `RoundLearner`."""
        return ("features", "weights") if self._plan.shares else ("weights",)

    def start(self) -> Arrays:
        """Begin with nothing: the encoder comes with the broadcast, the bank with the warm phase."""
        return {}

    def most_reply_bytes(self, broadcast: Payload) -> int:
        """Count the encoder, its slow copy where that travels, and a full bank but in `final`; see `RoundLearner`."""
        plan = self._plan
        phase, _ = phase_and_round(broadcast)
        names = {"train": plan.leaves, "final": plan.norm}.get(phase, ())
        values = sum(math.prod(plan.shape(name)) * (8 if name in plan.counters else 4) for name in names)
        bank = 2 * FEATURES * plan.queue if plan.shares and phase != "final" else 0
        return values + bank + sum(map(len, names)) + ENTRY_BYTES * (5 + len(names))

    def local_round(self, state: Arrays, broadcast: Payload, report: Report) -> tuple[Arrays, Payload]:
        """Fill the bank, learn, or send what stayed; see `RoundLearner`."""
        phase, _ = phase_and_round(broadcast)
        if phase == "warm":
            return self._warm(state, broadcast)
        if phase == "final":
            own = {name: value for name, value in state.items() if name in self._plan.norm}
            return state, self._reply(state, own, None)
        if phase != "train":
            raise LearningError(f"this method has no phase {phase}", "other_phase")
        network = round_network(self._plan, broadcast.arrays, state)
        point = self._resumed(state, broadcast, network, report)
        if point.stage == "learning":
            self._check_step(point.state)
            point = self._learn(point, broadcast, report)
        return self._divided(point)

    def _warm(self, state: Arrays, broadcast: Payload) -> tuple[Arrays, Payload]:
        network = round_network(self._plan, broadcast.arrays, state)
        new = {BANK: self._bank(state, {name: network[name] for name in self._plan.parameters}).rows}
        return new, self._reply(new, {}, new[BANK])

    def _bank(self, state: Arrays, encoder: Mapping[str, NDArray[Any]]) -> FeatureQueue:
        """Q_l as the device left it; where it has none yet, its pictures' features of today."""
        plan, empty = self._plan, FeatureQueue.empty(self._plan.queue)
        if BANK in state:
            kept = state[BANK]
            if not are_features(kept) or kept.dtype != np.float32 or not have_unit_length(kept):
                raise LearningError(
                    "the bank of features is damaged; begin again with edgefl train --restart", "damaged"
                )
            return empty.pushed(kept)
        rng = bank_rng(plan.seed, self._around.site)
        order = first_order(rng, len(self._rows))[: plan.queue]
        self._check_memory(lambda size: self._encoder(encoder, self._some(size)), len(order))
        found = [self._encoder(encoder, self._view(rng, part)) for part in cut(order, plan.batch)]
        return empty.pushed(np.concatenate(found))

    def _view(self, rng: np.random.Generator, chosen: NDArray[np.int64]) -> Views:
        images = self._rows.images[chosen]
        return views(images, draw(rng, len(images), images.shape[1]), self._plan.view_px)

    def _resumed(self, state: Arrays, broadcast: Payload, network: Mapping[str, NDArray[Any]], report: Report) -> Point:
        """The point to go on from: kept in this very round with these pictures and settings, or the round's start."""
        _, round_ = phase_and_round(broadcast)
        before = digest({**broadcast.arrays, **{f"site.{name}": value for name, value in state.items()}})
        begun_ = digest_of(self._bundle.sha256, self._around.site, str(round_), before)
        given = digest_of(self._rows.digest(), self._plan.to_bytes().decode())
        kept = self._around.points.load()
        point = None if kept is None else Point.from_payload(kept)
        queues = (BANK, QUEUE)
        if point is not None and point.begun == begun_ and set(queues) <= point.state.keys():
            tensors = {name: value for name, value in point.state.items() if name not in queues}
            if same_form(tensors, network):
                if point.given == given:
                    return point
                report({"warning": CHANGED})
        slow = {name: network[SLOW + name] for name in self._plan.parameters}
        bank, others = self._bank(state, slow), self._others(broadcast)
        negatives = bank.rows
        if others is not None:
            negatives = first_negatives(bank.rows, others, keeps_local=self._plan.keeps_local)
        return Point(begun=begun_, given=given, round=round_, state={**network, BANK: bank.rows, QUEUE: negatives})

    def _others(self, broadcast: Payload) -> Features | None:
        return received(broadcast) if self._plan.shares else None

    def _learn(self, point: Point, broadcast: Payload, report: Report) -> Point:
        """Epochs from a point on."""
        plan, keeper, site = self._plan, Keeper(self._around), self._around.site
        rounds, others = rounds_of(broadcast), self._others(broadcast)
        for epoch in range(point.epoch, plan.epochs):
            order = epoch_order(order_rng(plan.seed, site, point.round, epoch), self._rows.labels, "none")
            parts = cut(order, plan.batch)
            m = key_momentum(plan.key_momentum, local_steps(rounds, plan.epochs, len(parts)))
            remote = self._remote(point, others, len(order))
            for step in range(point.step, len(parts)):
                done = epochs_done(point.round, plan.epochs, epoch, step, len(parts))
                rate = falling_rate(plan.lr, done, rounds, plan.epochs)
                point = self._step(point, parts[step], rate, m, None if others is None else next(remote))
                told = {"epoch": epoch + 1, "epochs": plan.epochs, "step": step + 1, "steps": len(parts)}
                report({**told, "loss": point.sums["loss"] / max(1.0, point.sums["pictures"])})
                keeper.stepped(point)
            self._summarise(point, rounds, report)
            point = point.next_epoch()
        return keeper.learned(point)

    def _check_step(self, state: Arrays) -> None:
        def take(size: int) -> None:
            view = self._some(size)
            self._session.step(state, (view, view), state[QUEUE], rate=0.0, key_momentum=1.0)

        self._check_memory(take, len(self._rows))

    def _check_memory(self, take: Callable[[int], object], pictures: int) -> None:
        """Refuse batches of so many pictures in all that would take too much; `take` tries one of a given size."""

        def largest(batch: int) -> int:
            return max(map(len, cut(np.arange(pictures), batch)))

        check_step_memory(self._around.options.limits, self._plan.batch, largest, take, LEAST_BATCH)

    def _some(self, size: int) -> Views:
        return self._view(np.random.default_rng(0), np.arange(size) % len(self._rows))

    def _remote(self, point: Point, others: Features | None, count: int) -> Iterator[Features]:
        """What of the others' features enters Q_CL, a part each step; draws before the point are used up."""
        if others is None:
            return
        plan = self._plan
        rng = remote_rng(plan.seed, self._around.site, point.round)
        sizes = [len(part) for part in cut(np.arange(count), plan.batch)]
        for _ in range(point.epoch):
            for size in sizes:
                draw_others(rng, len(others), size)
        for step, size in enumerate(sizes):
            chosen = draw_others(rng, len(others), size)
            if step >= point.step:
                yield others[chosen]

    def _step(self, point: Point, chosen: NDArray[np.int64], rate: float, m: float, remote: Features | None) -> Point:
        """One batch: two views of each picture, the graph's step, and the queues."""
        plan, state = self._plan, point.state
        rng = generator(plan.seed, self._around.site, "views", point.round, point.epoch, point.step)
        pair = (self._view(rng, chosen), self._view(rng, chosen))
        found = self._session.step(state, pair, state[QUEUE], rate=rate, key_momentum=m)
        bank = FeatureQueue(plan.queue, state[BANK]).pushed(found.keys)
        negatives = bank
        if remote is not None:
            keeps_local, held = plan.keeps_local, state[QUEUE]
            negatives = FeatureQueue(most_negatives(plan.queue, len(held), keeps_local=keeps_local), held)
            for rows in entering(found.keys, remote, keeps_local=keeps_local):
                negatives = negatives.pushed(rows)
        similarity = mean_similarity(found.keys.sum(axis=0, dtype=np.float64), len(found.keys))
        figures = {"loss": found.loss, "similarity": similarity, "pictures": 1.0}
        return point.stepped({**found.state, BANK: bank.rows, QUEUE: negatives.rows}, figures, len(chosen))

    def _summarise(self, point: Point, rounds: int, report: Report) -> None:
        """Say how an epoch went, and half-way and at the end of a run where features tell little apart."""
        means = {name: value / point.sums["pictures"] for name, value in point.sums.items() if name != "pictures"}
        report({"summary": point.epoch + 1, "loss": means["loss"], "key_similarity": means["similarity"]})
        if (warning := collapse_warning(means["similarity"], point.round, rounds)) is not None:
            report({"warning": warning})

    def _divided(self, point: Point) -> tuple[Arrays, Payload]:
        """What stays on the device, and what leaves."""
        plan, state = self._plan, point.state
        new = {name: state[name] for name in (*plan.stays, BANK)}
        made = feature_rows.made_in_round(new[BANK], len(self._rows), plan.epochs)
        return new, self._reply(new, {name: state[name] for name in plan.leaves}, made)

    def _reply(self, state: Arrays, sent: Arrays, features: NDArray[Any] | None) -> Payload:
        scalars: dict[str, int | float | str] = {"n_train": len(self._rows), "site_sha256": digest(dict(state))}
        shared = feature_rows.sent(features) if self._plan.shares and features is not None else {}
        return Payload({**sent, **shared}, scalars)

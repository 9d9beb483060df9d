"""FedEvPrompt on the device: prompts and head learn here and stay here, a few rollout maps a class or their mean leave.

    learn   E epochs of the training graph, the others' maps as targets (eq. 2, 4, 7)       _learn
    judge   new values against the bundle's and those in use, on pictures held back  learning_gate.judge
    reply   of each class, the M maps of lowest vacuity of the pictures it learned from,    _reply
            of which the picture gate refers none; or the mean of these. Vacuity is that
            of the learned values alone, as at a GPU site: what was fitted after learning
            (temperature, discount) does not count                                 as_learned

The maps that leave are those of the learned values where these are no worse than the bundle's by their gate, else those
of the bundle's values; what scores now decides nothing of a reply. The state goes on in both cases, as at every site;
its digest is what the reply carries. Guarantees: the same state, broadcast, pictures, site and number of threads give
the same bits, however often it was killed or paused on the way. The method: `edgefl_trainer.methods.fedevprompt`; its
graph: `edgefl_export.methods.fedevprompt`. Source: arXiv 2411.10071, section 3 and Fig. 1; docs/design.md, sections 7
and 9.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgefl_client.learning.checkpoint import CHANGED, Point, digest_of, same_form
from edgefl_client.learning.contrast_session import FeatureEncoder
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.learning_gate import BATCH, judge
from edgefl_client.learning.limits import check_step_memory
from edgefl_client.learning.options import Report
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.learning.picture_rows import fit_rows
from edgefl_client.learning.round_learner import Arrays, Circumstances, Keeper, phase_and_round
from edgefl_client.learning.session import TrainingSession
from edgefl_client.runtime import load_graph, processors, run_graph
from edgefl_client.scoring.personal import PersonalState
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.fedevprompt_plan import (
    COUNTS,
    FIGURES,
    MEANS,
    RATE,
    FedEvPromptPlan,
    constants,
    fresh_state,
)
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.pictures.light import own_range_of
from edgefl_protocol.rules.batches import batches_of
from edgefl_protocol.rules.class_prior import class_prior, counts_shown
from edgefl_protocol.rules.dead_evidence import dead_warning
from edgefl_protocol.rules.draws import augment_rng, dihedral, epoch_order, order_rng, symmetries
from edgefl_protocol.rules.maps import most_certain, peer_targets, reply_maps


class FedEvPromptLearner:
    """See `RoundLearner`; the pictures are of at least two classes."""

    only_in_federations: ClassVar[str | None] = None
    encoder: ClassVar[type[FeatureEncoder] | None] = None
    travels: ClassVar[tuple[str, ...]] = ("maps",)

    def __init__(self, bundle: Bundle, rows: Dealt, around: Circumstances) -> None:
        self._bundle, self._learn_rows, self._held, self._around = bundle, rows.learn, rows.held, around
        self._classes = len(bundle.labels.classes)
        plan = around.options.plan(bundle)
        assert isinstance(plan, FedEvPromptPlan)  # the record of this kind
        self._plan = plan
        counts = np.bincount(rows.learn.labels, minlength=self._classes)
        self._seen = tuple(bool(count) for count in counts)
        self._prior = class_prior(counts_shown(counts, plan.balance), plan.prior_floor).astype(np.float32)
        self._threads = around.options.threads or processors()
        self._session = TrainingSession(bundle, step_constants(bundle, plan, self._prior), self._threads)

    def start(self) -> Arrays:
        """Begin with the bundle's values and moments of zero."""
        return fresh_state(self._plan, self._bundle.weights)

    def most_reply_bytes(self, broadcast: Payload) -> int:
        """Count a few maps as nothing; see `RoundLearner`."""
        return 0

    def local_round(self, state: Arrays, broadcast: Payload, report: Report) -> tuple[Arrays, Payload]:
        """Learn, judge, reply; see `RoundLearner`."""
        phase, round_ = phase_and_round(broadcast)
        if phase != "train":
            raise LearningError(f"this method learns in train phases, but the round is of phase {phase}", "other_phase")
        tokens = self._session.shape(MEANS)[1]
        targets = peer_targets(broadcast.arrays, self._classes, tokens, self._plan.kd_peers)
        peers = dict(zip((MEANS, COUNTS), targets, strict=True))
        point = self._resumed(state, round_, peers, report)
        if point.stage == "learning":
            self._check_memory(point.state, peers)
            point = self._learn(point, peers, report)
        graph = load_graph(self._bundle.score_onnx, self._threads)
        weights = personal_weights(self._bundle, self._plan, point.state, self._prior)
        shared = weights if self._judged(graph, weights, round_, report) else self._bundle.weights
        return point.state, self._reply(graph, shared, digest(dict(point.state)), report)

    def _resumed(self, state: Arrays, round_: int, peers: dict[str, NDArray[np.float32]], report: Report) -> Point:
        """The point to go on from: kept in this very round, or the round's start.

        Where pictures, settings or the others' maps have changed since, it is the start: what leaves is of the pictures
        that taught.
        """
        begun = digest_of(self._bundle.sha256, self._around.site, str(round_), digest(dict(state)))
        given = digest_of(self._learn_rows.digest(), self._plan.to_bytes().decode(), digest(dict(peers)))
        kept = self._around.points.load()
        point = None if kept is None else Point.from_payload(kept)
        if point is not None and point.begun == begun and same_form(point.state, state):
            if point.given == given:
                return point
            report({"warning": CHANGED})
        return Point(begun=begun, given=given, round=round_, state=state)

    def _check_memory(self, state: Arrays, peers: Mapping[str, NDArray[np.float32]]) -> None:
        rows = self._learn_rows

        def take(size: int) -> None:
            some = np.arange(size) % len(rows)
            self._session.step(state, {**peers, **step_batch(rows.images[some], rows.labels[some], 0.0)})

        def largest(batch: int) -> int:
            return min(batch, len(rows))

        check_step_memory(self._around.options.limits, self._plan.batch, largest, take, least=1)

    def _learn(self, point: Point, peers: Mapping[str, NDArray[np.float32]], report: Report) -> Point:
        """Epochs from a point on."""
        plan, keeper = self._plan, Keeper(self._around)
        steps = -(-len(self._learn_rows) // plan.batch)
        for epoch in range(point.epoch, plan.epochs):
            for images, labels in self._batches(point):
                given = step_batch(images, labels, plan.kl_weight(point.round, epoch))
                state, found = self._session.step(point.state, {**peers, **given})
                figures = {name: float(found[name]) for name in FIGURES}
                point = point.stepped(state, figures, len(labels))
                told = {"epoch": epoch + 1, "epochs": plan.epochs, "step": point.step, "steps": steps}
                report({**told, "loss": figures["loss"]})
                keeper.stepped(point)
            self._summarise(point, report)
            point = point.next_epoch()
        return keeper.learned(point)

    def _batches(self, point: Point) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
        """What is left of an epoch: pictures turned, and their labels."""
        rows, plan = self._learn_rows, self._plan
        epoch = (plan.seed, self._around.site, point.round, point.epoch)
        order, rng = epoch_order(order_rng(*epoch), rows.labels, plan.balance), augment_rng(*epoch)
        for step, chosen in enumerate(batches_of(order, plan.batch)):
            drawn = symmetries(rng, len(chosen)) if plan.augment == "dihedral" else None
            if step < point.step:  # learned before the stop; its draws are used up all the same
                continue
            images = rows.images[chosen]
            yield images if drawn is None else dihedral(images, drawn), rows.labels[chosen]

    def _summarise(self, point: Point, report: Report) -> None:
        """Say how an epoch went."""
        means = {name: value / len(self._learn_rows) for name, value in point.sums.items()}
        report({"summary": point.epoch + 1, **means})
        if (warning := dead_warning(means["dead"], point.round, point.epoch)) is not None:
            report({"warning": warning})

    def _judged(
        self, graph: onnxruntime.InferenceSession, weights: Mapping[str, NDArray[Any]], round_: int, report: Report
    ) -> bool:
        """The gate: whether the learned values may be shared."""
        in_use = self._around.in_use
        total = (2 if in_use is None else 3) * len(self._held)
        verdict = judge(
            graph,
            self._bundle,
            weights,
            self._seen,
            self._held,
            lambda done: report({"judging": done, "pictures": total}),
            in_use=in_use,
        )
        light = own_range_of(fit_rows(self._learn_rows).lights, self._bundle.preprocess.colour)
        self._around.judged(
            PersonalState(
                bundle_sha256=self._bundle.sha256, weights=weights, seen=self._seen, verdict=verdict,
                images=len(self._learn_rows), round=round_, light=light,
            )
        )  # fmt: skip
        return verdict.no_worse_than_bundle

    def _reply(
        self, graph: onnxruntime.InferenceSession, weights: Mapping[str, NDArray[Any]], site_sha256: str, report: Report
    ) -> Payload:
        """The most certain maps of the pictures it learned from."""
        if not self._around.maps_per_class:
            return Payload({}, {"site_sha256": site_sha256})
        rows, scored = self._learn_rows, list[tuple[NDArray[np.float32], NDArray[np.float32]]]()
        values = as_learned(weights)
        for start in range(0, len(rows), BATCH):
            given = {"image": rows.images[start : start + BATCH], **values}
            found = run_graph(graph, ("vacuity", "map"), given, "the model")
            scored.append((found["vacuity"], found["map"]))
            report({"choosing": min(start + BATCH, len(rows)), "pictures": len(rows)})
        vacuity, maps = (np.concatenate(parts) for parts in zip(*scored, strict=True))
        fit = np.array([index for index in range(len(rows)) if index not in rows.unfit], np.int64)
        chosen = most_certain(vacuity[fit], rows.labels[fit], self._around.maps_per_class)
        return Payload(reply_maps(maps[fit], chosen, self._around.sent_maps), {"site_sha256": site_sha256})


def step_constants(bundle: Bundle, plan: FedEvPromptPlan, prior: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Return what every step of a round takes alike: the bundle's constants, prior (K,), rates and weights."""
    numbers = {**{RATE + name: rate for name, rate in plan.rates.items()}, "weight_decay": plan.weight_decay}
    numbers["kd_weight"] = plan.kd_weight
    settings = {name: np.asarray(value, np.float32) for name, value in numbers.items()}
    return {**constants(plan, bundle.weights), **settings, "prior": prior}


def step_batch(images: NDArray[np.uint8], labels: NDArray[np.int64], kl_weight: float) -> dict[str, NDArray[Any]]:
    """Return a batch as a step takes it: images (B, S, S, 3), labels (B,), and the epoch's KL weight."""
    return {"image": images, "target": labels, "kl_weight": np.asarray(kl_weight, np.float32)}


def personal_weights(
    bundle: Bundle, plan: FedEvPromptPlan, state: Mapping[str, NDArray[Any]], prior: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    """Put what was learned into the scoring graph's tensors.

    Args:
        bundle: brings those that do not learn, temperature among them.
        state: arrays under `FedEvPromptPlan.state`.
        prior: (K,) of this device's own pictures.
    """
    learned = {name: state[name] for name in plan.trained}
    return {**bundle.weights, **learned, "prior": prior}


def as_learned(weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Put into the scoring graph's tensors what leaves evidence as it was learned: temperature 1, nothing unusual."""
    plain = {"temperature": 1.0, "usual.whitening": 0.0}  # under 0 the distance of every feature is 0
    return {name: np.full_like(value, plain[name]) if name in plain else value for name, value in weights.items()}

"""`edgefl train`: one round of local learning, from the owner's table of labelled pictures to personal values.

    read    prepare the pictures, hold 15 % of each class back (at least 20)
    go on   from the checkpoint of this very round, or from the values of the round before, or from the bundle's
    learn   E epochs; every now and then, and before any stop, a checkpoint
    judge   bundle against personal values on the pictures held back; only what passes is kept for scoring and sharing

Guarantees: killed at any moment and started again, the round ends with the same values, bit for bit (same number of
threads); the pictures never leave the process; a limit stops it between two steps and loses none.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_client.contribution import read_labels
from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import Checkpoint, load_checkpoint, only_one, save_checkpoint
from edgefl_client.learning.draws import dihedral, epoch_order, generator, symmetries
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.gate import judge
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.peers import peer_targets
from edgefl_client.learning.personal import PersonalState, load_personal, save_personal
from edgefl_client.learning.rows import Rows, hold_back, read_rows, skewed_prior
from edgefl_client.learning.session import TrainingSession
from edgefl_client.learning.verdict import Verdict
from edgefl_client.runtime import load_graph, processors
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.payload import Payload, digest
from edgefl_protocol.training import COUNTS, TrainingPlan, fresh_state

ALONE = "device"  # the site's name of a device that is a member of no federation
PROBES = (1, 4)  # pictures of the two steps that show how memory grows
NO_EVIDENCE = 0.5  # share of pictures without evidence above which a warning is due


@dataclass(frozen=True, kw_only=True)
class _Round:
    """What one round learns from and with."""

    bundle: Bundle
    plan: TrainingPlan
    site: str
    learn: Rows
    held: Rows
    prior: NDArray[np.float32]
    options: TrainOptions
    threads: int


def run_train(
    home: Home, bundle: Bundle, table: Path, options: TrainOptions, *, site: str = ALONE, others: Payload | None = None
) -> dict[str, Any]:
    """Learn one round, or go on with one that was stopped.

    Args:
        home: the device's home.
        bundle: the verified bundle to learn with.
        table: CSV with the columns image and label, and lesion_id where known.
        options: what the caller changes.
        site: this member's name, which enters the draws.
        others: the newest broadcast of the others' maps; None for none.

    Returns:
        What `edgefl train --json` prints.

    Raises:
        LearningError: too few pictures or too little memory, no training step, another process, or a loss that is
            not finite.
        EdgeflError: a picture or a file cannot be used.
    """
    started = options.limits.clock()
    plan = options.plan(bundle)
    with only_one(home):
        rows = _read(bundle, table, options)
        before = None if options.restart else load_checkpoint(home, bundle)
        held, limits = hold_back(rows, bundle.labels.classes, {} if before is None else before.limits)
        learn, judged = rows.take(~held), rows.take(held)
        del rows  # as large as both
        balanced = plan.balance == "class"
        work = _Round(
            bundle=bundle, plan=plan, site=site, learn=learn, held=judged, options=options,
            prior=skewed_prior(learn.labels, len(bundle.labels.classes), plan.prior_floor, balanced=balanced),
            threads=options.threads or processors(),
        )  # fmt: skip
        session = TrainingSession(bundle, plan, work.prior, work.threads)
        point, reason = _begin(work, session.tokens, before, others, limits), None
        if point.stage == "learning":
            _check_memory(work, session, point)
            point, reason = _learn(work, home, session, point, started)
        verdict = None if reason else _judge(work, home, point)
        kept = load_personal(home, bundle)
    return _facts(work, point, reason, verdict, kept)


def _read(bundle: Bundle, table: Path, options: TrainOptions) -> Rows:
    listed = read_labels(table, bundle.labels.classes)
    # They are there twice while they are dealt into those that teach and those that judge.
    allowed, needed = options.limits.memory_mib, 2 * len(listed) * bundle.preprocess.size**2 * 3 / 2**20
    if allowed is not None and needed > allowed:
        raise LearningError(
            f"the {len(listed)} pictures of the table take {needed:.0f} MiB of memory as the network reads them, "
            f"allowed are {allowed}: allow more, or name fewer pictures",
            "memory",
        )

    def report(done: int) -> None:
        options.report({"reading": done, "pictures": len(listed)})

    return read_rows(listed, bundle.preprocess, options.formats, report)


def _begin(
    work: _Round, tokens: int, before: Checkpoint | None, others: Payload | None, limits: Mapping[str, str]
) -> Checkpoint:
    """The point to go on from: this very round's, or a new round's start."""
    named = "\x1f".join((work.learn.digest(), work.site, work.plan.to_bytes().decode()))
    digest_of_work = hashlib.sha256(named.encode()).hexdigest()
    if before is not None and before.stage != "judged":
        if before.work == digest_of_work:
            return before
        work.options.report(
            {"warning": "pictures or settings have changed since learning stopped: a new round begins with its values"}
        )
    state = fresh_state(work.plan, work.bundle.weights) if before is None else before.state
    peers = peer_targets(others, work.plan, len(work.bundle.labels.classes), tokens)
    return Checkpoint(
        bundle_sha256=work.bundle.sha256, work=digest_of_work, stage="learning", limits=limits, state=state,
        round=1 if before is None else before.round + 1, epoch=0, step=0, peers=peers,
    )  # fmt: skip


def _check_memory(work: _Round, session: TrainingSession, point: Checkpoint) -> None:
    """Refuse before the work what would take too much memory; the memory of a step grows with its batch.

    Raises:
        LearningError: a batch would take more than is allowed (`memory`); the sentence names one that fits.
    """
    limits, batch = work.options.limits, min(work.plan.batch, len(work.learn))
    if limits.memory_mib is None:
        return
    used = []
    for size in PROBES:  # results are thrown away
        some = np.arange(size) % len(work.learn)
        session.step(point.state, work.learn.images[some], work.learn.labels[some], 0.0, point.peers)
        used.append(limits.memory())
    each = (used[1] - used[0]) / (PROBES[1] - PROBES[0])
    needed = used[1] + each * (batch - PROBES[1])
    if max(used[0], needed) <= limits.memory_mib:
        return
    fits = PROBES[0] + int((limits.memory_mib - used[0]) / each) if each > 0 else 0
    raise LearningError(
        f"a step of {batch} pictures needs about {needed:.0f} MiB of memory, allowed are {limits.memory_mib}: "
        + (f"use --batch {fits}" if fits >= 1 else "allow more, one picture does not fit either"),
        "memory",
    )


def _learn(
    work: _Round, home: Home, session: TrainingSession, point: Checkpoint, started: float
) -> tuple[Checkpoint, str | None]:
    """Epochs from a point on; the point reached, and the limit that stopped it or None."""
    plan, options, clock = work.plan, work.options, work.options.limits.clock
    saved = clock()
    for epoch in range(point.epoch, plan.epochs):
        named = (plan.seed, work.site)
        order = epoch_order(generator(*named, "order", point.round, epoch), work.learn.labels, plan.balance)
        rng = generator(*named, "augment", point.round, epoch)
        steps = -(-len(order) // plan.batch)
        for step in range(steps):
            chosen = order[step * plan.batch : (step + 1) * plan.batch]
            drawn = symmetries(rng, len(chosen)) if plan.augment == "dihedral" else None
            if step < point.step:  # learned before the stop; its draws are used up all the same
                continue
            images = work.learn.images[chosen]
            state, figures = session.step(
                point.state,
                images if drawn is None else dihedral(images, drawn),
                work.learn.labels[chosen],
                plan.kl_weight(point.round, epoch),
                point.peers,
            )
            sums = {name: point.sums[name] + len(chosen) * figures[name] for name in figures}
            point = replace(point, state=state, epoch=epoch, step=step + 1, sums=sums)
            options.report(
                {"epoch": epoch + 1, "epochs": plan.epochs, "step": step + 1, "steps": steps, "loss": figures["loss"]}
            )
            reason = options.limits.reached(started)
            if reason is not None or clock() - saved >= options.checkpoint_seconds:
                save_checkpoint(home, point)
                saved = clock()
            if reason is not None:
                return point, reason
        point = _next_epoch(work, point, epoch)
    point = replace(point, stage="learned")
    save_checkpoint(home, point)
    return point, None


def _next_epoch(work: _Round, point: Checkpoint, epoch: int) -> Checkpoint:
    """Say how the epoch went; the first step of the next."""
    means = {name: value / len(work.learn) for name, value in point.sums.items()}
    work.options.report({"summary": epoch + 1, **means})
    if means["dead"] > NO_EVIDENCE and (point.round, epoch) > (1, 0):
        work.options.report({"warning": f"{means['dead']:.0%} of the pictures raise no evidence: they teach nothing"})
    return replace(point, epoch=epoch + 1, step=0, sums=dict.fromkeys(point.sums, 0.0))


def _judge(work: _Round, home: Home, point: Checkpoint) -> Verdict:
    """The gate; what passes is kept for scoring and sharing."""
    weights = personal_weights(work.bundle, work.plan, point.state, work.prior)
    counts = np.bincount(work.learn.labels, minlength=len(work.bundle.labels.classes))
    seen = tuple(bool(count) for count in counts)
    graph = load_graph(work.bundle.score_onnx, work.threads)
    total = 2 * len(work.held)
    verdict = judge(
        graph, work.bundle, weights, seen, work.held,
        lambda done: work.options.report({"judging": done, "pictures": total}),
    )  # fmt: skip
    if verdict.passed:
        state = PersonalState(
            bundle_sha256=work.bundle.sha256, weights=weights, seen=seen, verdict=verdict, images=len(work.learn),
            round=point.round,
        )  # fmt: skip
        save_personal(home, state)
    save_checkpoint(home, replace(point, stage="judged"))
    return verdict


def personal_weights(
    bundle: Bundle, plan: TrainingPlan, state: Mapping[str, NDArray[Any]], prior: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    """The scoring graph's tensors with what was learned in them.

    Args:
        bundle: brings those that do not learn, temperature among them.
        plan: names those that do.
        state: arrays under `TrainingPlan.state`.
        prior: (K,) of this device's own pictures.
    """
    learned = {name: state[name] for name in plan.trained}
    return {**bundle.weights, **learned, "prior": prior}


def _facts(
    work: _Round, point: Checkpoint, reason: str | None, verdict: Verdict | None, kept: PersonalState | None
) -> dict[str, Any]:
    weights = personal_weights(work.bundle, work.plan, point.state, work.prior)
    labels = work.bundle.labels
    names = [] if kept is None else zip(labels.classes, labels.seen, kept.seen, strict=True)
    held = np.count_nonzero(point.peers[COUNTS])
    return {
        "state": "paused" if reason else "done",
        "reason": reason,
        "round": point.round,
        "epoch": point.epoch,
        "epochs": work.plan.epochs,
        "step": point.step,
        "learned_from": len(work.learn),
        "held_back": len(work.held),
        "classes_with_others_maps": int(held),
        "peak_memory_mib": round(work.options.limits.memory(), 1),
        "weights_sha256": digest(weights),
        "state_sha256": digest(dict(point.state)),
        "gate": None if verdict is None else verdict.to_json(),
        "in_use": {
            "kind": "bundle" if kept is None else "personal",
            "round": None if kept is None else kept.round,
            "never_named": [name for name, theirs, ours in names if theirs and not ours],
        },
    }

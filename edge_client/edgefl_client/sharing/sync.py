"""`edgefl sync`: do what is due in the federation, then leave. Made to be started by cron or systemd, and killed.

    exchange   the task; a newer bundle; what waits in the outbox and is due; the round's broadcast
    learn      the open round, where the owner named pictures and the bundle brings a training step
    exchange   the reply into the outbox, and off

The keys are held during an exchange only, so other commands work while a device learns for hours; a second sync that
starts meanwhile exchanges and leaves. Every step is on the disk before the next depends on it: started again after a
kill at any moment, it goes on where it was, and nothing is sent or counted twice. What may leave is asked of the
owner's policy before the work, before a reply enters the outbox, and again when it is sent. Whatever goes wrong here,
a newer bundle and the list of revoked keys are asked for first. Source: docs/design.md, sections 9 and 10;
docs/security.md, replay window and idempotency.
"""

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.live_round import LiveRound, count_reply, drop_reply, dropped_reply, learn_live
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import remembered_table
from edgefl_client.sharing.broadcasts import (
    broadcast_file,
    forget_others,
    keep_broadcast,
    kept_broadcast,
    read_broadcast,
)
from edgefl_client.sharing.bundles import fetch_bundle
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.policy import PASSES, PolicyError, load_policy
from edgefl_client.sharing.silent import Silent, why_silent
from edgefl_client.sharing.spending import permit, read_spent
from edgefl_client.trust import models
from edgefl_client.trust.vouched_bundle import VouchedBundle
from edgefl_exchange.delivery import Delivery, Permit, settle
from edgefl_exchange.errors import ExchangeError, NotEnrolled, SignedRefusal, Unavailable, UnknownKeys
from edgefl_exchange.member import Member
from edgefl_exchange.outbox import LEARNED, WorkItem
from edgefl_protocol.durable import file_bytes
from edgefl_protocol.errors import BundleError, EdgeflError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.feature_rows import RECEIVED
from edgefl_protocol.rules.maps import is_maps
from edgefl_protocol.rules.travels import travels_of
from edgefl_protocol.sentences import counted

_LOG = logging.getLogger("edgefl.exchange")
HELD_BACK = "held_back"
NOT_PUBLISHED = "the operator has published no model yet"
ASK_AGAIN_S, MOST_ASK_AGAIN_S = 5.0, 30.0  # between two questions whether the operator has approved; it doubles
# Reasons to leave the round alone that are no failure.
_SKIPPED = frozenset({"busy", "no_model", "no_training", "other_line", "other_method", "paused"}) | PASSES


@dataclass(frozen=True, kw_only=True)
class Synced:
    """What a sync did."""

    report: dict[str, Any]  # what `--json` prints
    # why the round was not learned, bundle or broadcast not taken, or the policy not read; None: nothing failed
    problem: EdgeflError | None = None


@dataclass(frozen=True, kw_only=True)
class _Exchanged:
    """What one exchange brought."""

    federation: str
    site: str
    now_ms: int
    task: TaskReply
    sent: tuple[Delivery, ...]
    expired: int
    broadcast: dict[str, Any] | None
    problem: EdgeflError | None  # why the policy was not read, or the broadcast not taken
    bundle: dict[str, Any] | EdgeflError | None  # that of the federation; None where none is published, or not asked
    waiting: int
    queued: int | None  # round whose learned reply lies in the outbox
    keys_changed: bool  # this device's keys were 30 days old

    @property
    def replied(self) -> bool:
        """Whether the coordinator has a reply of the round."""
        here = self.task.round
        return self.task.replied or any(one.outcome == "accepted" and one.round == here for one in self.sent)


@dataclass(frozen=True, kw_only=True)
class _Learned:
    """What learning brought: a report, and a reply or what kept it from being one."""

    report: dict[str, Any] | None = None  # None where no pictures are named
    silent: Silent | None = None  # why this device replies to no round, where no pictures are named
    reply: Payload | None = None
    problem: EdgeflError | None = None


def run_sync(
    device: Device, options: TrainOptions | None = None, trusted: Sequence[bytes] = (), *, hold: bool = False
) -> Synced:
    """Do what is due, then leave.

    Args:
        options: limits, threads and report of learning; None to learn nothing.
        trusted: keys of bundle signers trusted for this call beside the list.
        hold: send nothing that lies in the outbox, nor what is learned: its owner wants to look at it first.

    Raises:
        EdgeflError: no answer or a refusal; what was not answered stays in the outbox.
    """
    first = _exchange(device, hold=hold)
    learned = _Learned() if options is None else _learn(device, first, options, trusted)
    last = first if learned.reply is None else _exchange(device, learned.reply, first.task.round, hold=hold)
    both = [first] if last is first else [first, last]
    task = last.task
    stuck = task.stuck or first.task.refusal  # of the round before; told until this one has a reply
    report = {
        "round": {
            "number": task.round,
            "state": task.state,
            "phase": task.phase,
            "deadline_ms": task.deadline_ms,
            "replied": last.replied,
            "refused": task.refused,
            "stuck": stuck or None,
        },
        "bundle": _bundle_facts(first.bundle),
        "broadcast": last.broadcast,
        "learning": learned.report,
        "silent": None if learned.silent is None else str(learned.silent),
        "sent": [dataclasses.asdict(delivery) for one in both for delivery in one.sent],
        "expired": sum(one.expired for one in both),
        "waiting": last.waiting,
        "keys_changed": any(one.keys_changed for one in both),
    }
    refused = first.bundle if isinstance(first.bundle, EdgeflError) else None
    return Synced(report=report, problem=learned.problem or refused or last.problem)


def sync_when_approved(device: Device) -> Synced:
    """Wait until the operator has approved this device, however long, then do what is due; nothing is learned.

    A coordinator that does not answer is asked again, too. A `NotEnrolled` (`shut_out`) where it goes on answering that
    it does not know these keys; nobody signed that, so it only ends the wait.
    """
    wait_s, unknown = ASK_AGAIN_S, UnknownKeys("device", "edgefl sync")
    while True:
        try:
            return run_sync(device)
        except (NotEnrolled, Unavailable) as error:
            if isinstance(error, NotEnrolled) and error.code != "pending":
                raise
            if why := unknown.heard(error):
                raise NotEnrolled(why, "shut_out") from error
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, MOST_ASK_AGAIN_S)


def _bundle_facts(found: dict[str, Any] | EdgeflError | None) -> dict[str, Any] | None:
    return {"error": {"code": found.code, "message": str(found)}} if isinstance(found, EdgeflError) else found


def _exchange(device: Device, reply: Payload | None = None, number: int = 0, *, hold: bool) -> _Exchanged:
    """Meet the coordinator once; before that, put a reply that was learned into the outbox."""
    home = device.home
    with device.member() as member:
        federation = member.membership.federation
        if reply is not None:
            with device.outbox(member.identity) as outbox:
                outbox.put_learned(federation, number, reply.to_bytes(), member.now_ms())
        task = _task(device, member)
        # Before anything that can end an exchange here: a device must not go on scoring with a revoked model.
        bundle = _fetch_bundle(home, member, task) if reply is None else None
        with device.outbox(member.identity) as outbox:
            allowed, unread = _permitted(home, member, hold=hold)
            sent = member.deliver(outbox, task, allowed, lambda item, delivery: _settled(home, item, delivery))
            task = _after(member, task, sent)
            # Only now: what can be sent is sent first, and signed answers have corrected the clock by which things age.
            expired = outbox.expire(member.now_ms())
            broadcast, problem = _fetch_broadcast(home, member, task)
            learned = [item.round for item in outbox.items(federation) if item.kind == LEARNED]
            return _Exchanged(
                federation=federation,
                site=member.membership.name,
                now_ms=member.now_ms(),
                task=task,
                sent=tuple(sent),
                expired=expired,
                broadcast=broadcast,
                problem=unread or problem,
                bundle=bundle,
                waiting=outbox.count(),
                queued=learned[0] if learned else None,
                keys_changed=member.keep_fresh(),
            )


def _task(device: Device, member: Member) -> TaskReply:
    """Ask for the task; where the answer is that nobody knows these keys, what waits grows no older than it may."""
    try:
        return member.task()
    except Unavailable as error:
        if error.keys_unknown:
            with device.outbox(member.identity) as outbox:
                dropped = outbox.expire(member.now_ms())
            if dropped:
                _LOG.warning("%s dropped from the outbox, which nobody would take: too old", counted(dropped, "item"))
        raise


def _after(member: Member, before: TaskReply, sent: Sequence[Delivery]) -> TaskReply:
    """Return the task as it stands with the reply that it has just taken, which may have closed the round."""
    if not any(one.outcome == "accepted" for one in sent):
        return before
    try:
        after = member.task()
    except ExchangeError:  # what was sent is told all the same
        after = dataclasses.replace(before, stuck="")
    return dataclasses.replace(after, stuck=after.stuck or before.refusal)


def _fetch_bundle(home: Home, member: Member, task: TaskReply) -> dict[str, Any] | EdgeflError | None:
    """Use the federation's current bundle from now on; what keeps it from that disturbs nothing else of a sync."""
    try:
        return fetch_bundle(home, member, task)
    except EdgeflError as error:
        return error


def _permitted(home: Home, member: Member, *, hold: bool) -> tuple[Permit, EdgeflError | None]:
    """Make the check before each sending; also gives why the policy cannot be read, for then nothing may leave."""
    if hold:
        return _held_back, None
    try:
        return permit(home, load_policy(home), member.now_ms), None
    except EdgeflError as error:
        unread = error
        return lambda _item, _round: unread, unread


def _held_back(_item: WorkItem, _round: int) -> PolicyError:
    return PolicyError(
        "held back because of --hold: edgefl advanced outbox shows it, and the next sync sends it", HELD_BACK
    )


def _settled(home: Home, item: WorkItem, delivery: Delivery) -> None:
    """Note what became of a learned reply, before the outbox forgets it."""
    if item.kind == LEARNED:
        settle(delivery, partial(count_reply, home, item.federation), partial(drop_reply, home, item.federation))


def _learn(device: Device, before: _Exchanged, options: TrainOptions, trusted: Sequence[bytes]) -> _Learned:
    """Learn the open round where there is something to learn from, or report what keeps the device from it."""
    home, task = device.home, before.task
    try:
        table = remembered_table(home)
        if table is None:
            return _Learned(silent=why_silent(home, dataclasses.replace(task, replied=before.replied), before.now_ms))
        why = _not_due(home, before)
        if why is not None:
            return _Learned(report={"state": "skipped", "round": task.round, "code": why[0], "message": why[1]})
        live = _live_round(home, before)
        vouched = _bundle(home, before, trusted)
        asking = dataclasses.replace(options, report=vouched.before_told(options.report))
        report, reply = learn_live(home, vouched.bundle, table, asking, live)
        if reply is not None:
            vouched.check()
            _check_reply(home, before, travels_of(reply.arrays), reply.encoded_bytes())
    except EdgeflError as error:
        skipped = error.code in _SKIPPED
        told = {"state": "skipped" if skipped else "failed", "round": task.round}
        return _Learned(report={**told, "code": error.code, "message": str(error)}, problem=None if skipped else error)
    return _Learned(report=report, reply=reply)


def _not_due(home: Home, before: _Exchanged) -> tuple[str, str] | None:
    """Give code and sentence of why there is nothing to learn now; None where the round is due."""
    task, got = before.task, before.broadcast
    if task.state != "open":
        now = f"round {task.round} is {task.state}" if task.round else "the first has not begun"
        return "not_open", f"no round is open, {now}"
    if task.refused:
        return "reply_refused", f"the reply of round {task.round} was refused"
    if before.replied:
        return "replied", f"round {task.round} has this device's reply"
    if before.queued is not None:  # also of an earlier round: until its answer is here, nobody knows what it left
        refused = any((one.outcome, one.round) == ("refused", before.queued) for one in before.sent)
        what = "was refused, and the next sync sends it again" if refused else "waits in the outbox"
        return "queued", f"the reply of round {before.queued} {what}"
    dropped = dropped_reply(home, before.federation, task.round)
    if dropped is not None:
        return "refused", f"the reply of round {task.round} does not leave: {dropped}"
    if got is None or got["error"] is not None:
        return "no_broadcast", "the round has no broadcast yet" if got is None else got["error"]["message"]
    return None


def _bundle(home: Home, before: _Exchanged, trusted: Sequence[bytes]) -> VouchedBundle:
    """Open the bundle in use, which must be the federation's."""
    if before.bundle is None and not home.current_file.exists():
        raise models.NoModel(NOT_PUBLISHED)
    bundle = models.open_model(home, models.read_file(home, None), trusted, before.now_ms)
    wanted = (before.federation, before.task.line, before.task.task)
    if bundle.manifest.line_key != wanted:
        raise BundleError(
            f"the model in use is {bundle.manifest.name}, but the round is for {'/'.join(wanted)}: the operator has to "
            "publish a bundle for it",
            "other_line",
        )
    return VouchedBundle(bundle, home, trusted)


def _live_round(home: Home, before: _Exchanged) -> LiveRound:
    assert before.broadcast is not None
    return LiveRound(
        federation=before.federation,
        site=before.site,
        task=before.task,
        broadcast=read_broadcast(Path(before.broadcast["file"])),
        permitted=lambda travels, size: _check_reply(home, before, travels, size),
    )


def _check_reply(home: Home, before: _Exchanged, travels: Sequence[str], size: int) -> None:
    """Refuse what may not enter the outbox: asked before the work with the most a reply can take, and after it."""
    task = before.task
    spent = read_spent(home, before.now_ms, federation=before.federation, round_number=task.round)
    load_policy(home).check(travels, size, spent)
    if size > task.max_reply_bytes:
        raise LearningError(
            f"the reply takes {size} bytes, but the federation allows {task.max_reply_bytes}: tell the operator",
            "too_large",
        )


def _fetch_broadcast(home: Home, member: Member, task: TaskReply) -> tuple[dict[str, Any] | None, EdgeflError | None]:
    """Keep this round's broadcast, after the last round the final one.

    Gives what is reported of it, with any refusal, and what went wrong at this device: neither ends the exchange.
    """
    if task.round < 1:
        return None, None
    membership, number = member.membership, task.round + (task.state == "done")
    try:
        forget_others(home, membership, number)
        found = kept_broadcast(home, membership, number)
        if found is None:
            found = member.broadcast(number)
            keep_broadcast(home, membership, number, found)
    except EdgeflError as error:
        if isinstance(error, ExchangeError) and not isinstance(error, SignedRefusal):
            raise
        why = {"code": error.code, "message": str(error)}
        told = {"file": None, "maps": 0, "features": 0, "bytes": 0, "error": why}
        return told, None if isinstance(error, SignedRefusal) else error
    file = broadcast_file(home, membership, number)
    maps = sum(len(array) for name, array in found.arrays.items() if is_maps(name))
    features = len(found.arrays[RECEIVED]) if RECEIVED in found.arrays else 0
    return {"file": str(file), "maps": maps, "features": features, "bytes": file_bytes(file), "error": None}, None

"""The server's side of aggregation: what is due, the worker process, and committing its result once.

Guarantees: at most one job runs; a job's result changes the store in one transaction, by compare-and-set, so a job that
is done twice (after a crash) changes it once and to the same bytes. A reply that cannot be aggregated is refused by
name and the round goes on with the others, or opens again where too few are left; the same replies are not tried twice.
So is one whose stored bytes are missing or damaged, which its sender sends again. What was made by rules, of members
or with grants that count no more is not stored: the job is done anew (`_still_counts`).
A job that the machine fails (memory, disk, time) is told in the audit log and tried again; one that was stopped with
the server is not a failure. The replies stay. Source: docs/security.md, reliability (aggregation exactly once) and
check 46.
"""

import errno
import logging
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from sqlalchemy import Connection

from edgefl_coordinator.commits.shared_commit import done_again, may_be_kept
from edgefl_coordinator.errors import STOPPED, OperatorError
from edgefl_coordinator.members import grants, membership, uploads
from edgefl_coordinator.rounds import findings, refused, shut_out, stored_broadcasts, stored_rounds
from edgefl_coordinator.rounds.jobs import MAX_RESULT_BYTES, Job, JobFiles, JobKind, make_job, read_result, write_job
from edgefl_coordinator.rounds.operator_gate import command_of
from edgefl_coordinator.rounds.task_status import STATE_SHA256, final_digest, start_is_due
from edgefl_coordinator.settings import CoordinatorSettings
from edgefl_coordinator.store import audit, inbox
from edgefl_coordinator.store.coordinator import Coordinator, counted_settings
from edgefl_coordinator.store.store import Blob, Store
from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError, StorageError
from edgefl_protocol.rules.maps import maps_in_broadcast

log = logging.getLogger("edgefl_coordinator")
RunWorker = Callable[[Path, float], None]  # a `worker_process.WorkerProcess` in production


@dataclass(frozen=True)
class Due:
    """A job that has to be done, and the members its broadcasts are for (name → key id)."""

    job: Job
    receivers: dict[str, str]
    left: frozenset[str]  # first key ids of all members that were shut out when the job was made


def step(coordinator: Coordinator, run_worker: RunWorker) -> bool:
    """Close the round if it is time, then do the job that is due, if any; return whether one was done.

    Whatever the disk, the start of a process or a damaged result raises becomes one of the errors below, so the caller
    needs no other to keep going.

    Raises:
        OperatorError: the job failed; the store is as before but for an audit row.
        StorageError: the disk is full or fails.
    """
    try:
        return _step(coordinator, run_worker)
    except OSError as error:
        raise _machine_failed(error) from error


def _step(coordinator: Coordinator, run_worker: RunWorker) -> bool:
    done_again(lambda: sweep_uploads(coordinator))
    due = done_again(lambda: next_job(coordinator))
    if due is None:
        return False
    store = coordinator.store
    folder = store.home.jobs / f"{due.job.kind}-{due.job.number}-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        if lost := lay_out(store, folder, due.job):
            done_again(lambda: _drop_lost(coordinator, due.job.number, lost))
            return True
        run_worker(folder, coordinator.settings.limits.worker_s)
        result = read_result(folder)
        done_again(lambda: commit(coordinator, due, result))
    except (EdgeflError, OSError) as error:
        known = error if isinstance(error, EdgeflError) else _machine_failed(error)
        if known.code != STOPPED:
            with store.transaction() as connection:
                detail = {"kind": due.job.kind, "error": str(known)[:300]}
                audit.append(connection, coordinator.clock(), "job_failed", str(due.job.number), detail)
        if known is error:
            raise
        raise known from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def lay_out(store: Store, folder: Path, job: Job) -> dict[str, str]:
    """Write a job into its folder, with what is no file of this machine yet: in `job.json` state and replies are.

    Returns name → blob of the replies that are missing or damaged; with such a reply there is no job.
    """
    # First: where all payloads are away, as with a disk that is not mounted, this fails, and no reply is called lost.
    state = None if job.state is None else str(store.file_of(job.state, folder / "before.payload"))
    files, lost = {}, {}
    for number, (name, blob) in enumerate(job.replies.items()):
        try:
            files[name] = str(store.file_of(blob, folder / f"reply-{number}.payload"))
        except StorageError as error:
            if error.code not in ("damaged", "missing"):
                raise
            log.error("the reply of %s in round %d is lost: %s", name, job.number, error)
            lost[name] = blob
    if not lost:
        write_job(folder, msgspec.structs.replace(job, state=state, replies=files))
    return lost


def _drop_lost(coordinator: Coordinator, number: int, lost: dict[str, str]) -> None:
    """Drop the replies whose blobs are lost, unless others have taken their place; the round goes on without them."""
    past: list[str] = []
    with coordinator.store.transaction() as connection:
        current = stored_rounds.current_round(connection)
        if current is not None and (current.number, current.state) == (number, "aggregating"):
            held = stored_rounds.replies_of(connection, number)
            gone = {name: blob for name, blob in lost.items() if held.get(name) == blob}
            past = stored_rounds.lose_replies(connection, coordinator.clock(), number, gone)
    coordinator.store.drop_blobs(past)


def _machine_failed(error: OSError) -> StorageError:
    """Say in one sentence what the machine did to a job."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    cause = "the disk is full; free space" if full else error.strerror or "input/output error"
    return StorageError(f"the round's job cannot run: {cause}", "disk_full" if full else "storage")


def next_job(coordinator: Coordinator) -> Due | None:
    """Return the job that is due now, or None."""
    settings, now_ms = coordinator.settings, coordinator.clock()
    with coordinator.store.transaction() as connection:
        inbox.forget(connection, now_ms)
        current = stored_rounds.advance(connection, settings.rounds, now_ms)
        latest = stored_rounds.latest_state(connection)
        if latest is None:
            if start_is_due(connection, settings.rounds):
                return _due(coordinator, connection, "start", 0, membership.approved(connection))
            return None
        (number, state), changes = latest, membership.changes(connection)
        aggregates = current is not None and current.state == "aggregating"
        if not aggregates and coordinator.all_served == (number + 1, changes):
            return None
        if aggregates and current is not None:
            replies = stored_rounds.replies_of(connection, current.number)
            everybody = membership.approved(connection)
            return _due(coordinator, connection, "aggregate", current.number, everybody, state, replies)
        waiting = stored_broadcasts.without_broadcast(connection, number + 1)
        if waiting:
            return _due(coordinator, connection, "broadcast", number + 1, waiting, state)
    coordinator.all_served = (number + 1, changes)  # now that what was read is committed
    return None


def sweep_uploads(coordinator: Coordinator) -> None:
    """Delete the blobs that members have stopped sending."""
    with coordinator.store.transaction() as connection:
        gone = uploads.expire(connection, coordinator.clock(), coordinator.settings.limits.blob_age_s)
    coordinator.store.drop_blobs(gone)


def commit(coordinator: Coordinator, due: Due, result: JobFiles) -> None:
    """Store a job's result once, or nothing: where it has to be done anew, or with a `StorageError`."""
    store, job = coordinator.store, due.job
    if result.problem:
        with store.transaction() as connection:
            if not _still_counts(coordinator, connection, due):
                return
            deadline_s, now_ms = coordinator.settings.rounds.deadline_s, coordinator.clock()
            past = stored_rounds.reopen_round(
                connection, now_ms, job.number, result.refused, result.problem, deadline_s
            )
        store.drop_blobs(past)
        return
    made: dict[str, stored_broadcasts.Broadcast] = {}
    adopted: list[Blob] = []
    spare: list[str] | None = None  # files that no row names
    files = list(result.broadcasts.values())
    if result.state is not None and job.kind != "broadcast":
        files.append(result.state)
    if not result.broadcasts.keys() <= due.receivers.keys():
        raise OperatorError("the aggregation worker left a damaged result: broadcasts for sites that have not asked")
    try:
        adopted = store.adopt(files)
        for (name, file), blob in zip(result.broadcasts.items(), adopted, strict=False):
            made[due.receivers[name]] = stored_broadcasts.Broadcast(blob, _others_in(coordinator, file))
        with store.transaction() as connection:
            if not _still_counts(coordinator, connection, due):
                return
            if job.kind == "broadcast":
                if made.keys() & stored_broadcasts.others_in_broadcasts(connection, job.number).keys():
                    return  # another process, which leads now, has made them
                stored_broadcasts.add_broadcasts(connection, job.number, made)
                detail = {"members": len(made)}
                audit.append(connection, coordinator.clock(), "broadcasts_made", str(job.number), detail)
                found = []
            elif stored_rounds.commit_state(connection, coordinator.clock(), job.number, adopted[-1]):
                found = _open_following(connection, coordinator, due, result, made)
            else:  # it was committed before
                found = [blob.name for blob in adopted]
        spare = found
    except StorageError as error:
        if may_be_kept(error):
            spare = []
        raise
    finally:
        store.drop_blobs([blob.name for blob in adopted] if spare is None else spare)


def _open_following(
    connection: Connection,
    coordinator: Coordinator,
    due: Due,
    result: JobFiles,
    made: dict[str, stored_broadcasts.Broadcast],
) -> list[str]:
    """Open what follows a state that was just committed; return the blobs to delete after the commit."""
    job, now_ms, following = due.job, coordinator.clock(), due.job.number + 1
    refused.refuse_replies(connection, now_ms, job.number, result.refused)
    past = stored_rounds.drop_refused(connection, job.number)
    findings.note(connection, now_ms, job.number, result)
    shut_out.note_left(connection, due.left)
    stored_rounds.set_fact(connection, "phases", list(result.phases))
    if following <= len(result.phases):
        deadline_s = coordinator.settings.rounds.deadline_s
        stored_rounds.open_round(connection, now_ms, following, result.phases[following - 1], deadline_s)
    else:
        stored_rounds.set_fact(connection, STATE_SHA256, final_digest(connection, result.state_sha256))
        detail = {"rounds": len(result.phases)}
        audit.append(connection, now_ms, "over", coordinator.settings.federation, detail)
    stored_broadcasts.add_broadcasts(connection, following, made)
    return past + stored_rounds.forget_past(connection, following)


def _others_in(coordinator: Coordinator, file: Path) -> int | None:
    """Count the sites in a broadcast of rollout maps; None for other methods, whose broadcasts are not read."""
    if not coordinator.settings.task.shares_maps:
        return None
    broadcast = Payload.from_bytes(read_bounded(file, MAX_RESULT_BYTES), MAX_RESULT_BYTES)
    return len({peer for peer, _ in maps_in_broadcast(broadcast.arrays)})


def _due(
    coordinator: Coordinator,
    connection: Connection,
    kind: JobKind,
    number: int,
    receivers: list[membership.MemberRow],
    state: str | None = None,
    replies: Mapping[str, str] | None = None,
) -> Due:
    """Make a job by the settings and of the members that count in this transaction."""
    settings, left, sent = _settings(coordinator, connection), shut_out.ever_shut_out(connection), replies or {}
    job = make_job(
        settings,
        kind,
        number,
        sites=tuple(member.name for member in receivers),
        state=state,
        replies=sent,
        gone=shut_out.still_in_state(connection, left),
        granted=_granted(connection, sent),
        gate=command_of(settings.protection.gate, coordinator.store.home.root),
        gate_s=settings.limits.gate_s,
        order_key=coordinator.derive("peer-order").hex(),
    )
    return Due(job, {member.name: member.skid for member in receivers}, frozenset(left))


def _still_counts(coordinator: Coordinator, connection: Connection, due: Due) -> bool:
    """Tell whether what a job was made with counts still: who is shut out, quorum, rules of protection, grants.

    Where one of them changed while it was done, its result holds what a member sent that was shut out meanwhile, or is
    judged by rules that count no more.
    """
    settings, job = _settings(coordinator, connection), due.job
    made = due.left, job.quorum, job.protection, job.granted
    left, granted = frozenset(shut_out.ever_shut_out(connection)), _granted(connection, job.replies)
    return made == (left, settings.rounds.quorum_min, settings.protection, granted)


def _settings(coordinator: Coordinator, connection: Connection) -> CoordinatorSettings:
    """Return the settings as the store notes them: what `set` changes counts in its own transaction there."""
    return counted_settings(connection) or coordinator.settings


def _granted(connection: Connection, replies: Mapping[str, str]) -> dict[str, int]:
    """Return the grants of those that replied: who joins meanwhile changes nothing in the round's result."""
    return {name: images for name, images in grants.granted(connection).items() if name in replies}

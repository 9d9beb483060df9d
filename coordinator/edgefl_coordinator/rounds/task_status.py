"""What a member is told about the task and the current round."""

from dataclasses import replace
from pathlib import PurePath

from sqlalchemy import Connection

from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import findings, newest_replies, refused, stored_broadcasts, stored_rounds
from edgefl_coordinator.rounds.states import cohort_allows, starts_by_itself
from edgefl_coordinator.rounds.stuck import FederationStanding, RoundFacts, standing, stuck_sentence
from edgefl_coordinator.settings import CoordinatorSettings, RoundSettings, TaskSettings
from edgefl_coordinator.store import audit, publishing
from edgefl_coordinator.store.audit_chain import RESTORED
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol import Payload, digest, state_digest
from edgefl_protocol.messages.task_reply import GATE_REFUSED, MAX_SENTENCE, TaskReply

_FAILED, _MENDED = "job_failed", ("state", "round_reopened", "broadcasts_made")  # events of the audit log
_STOPPED = "stop"
# events of the audit log that only a server writes, besides what members ask of it
_OF_SERVER = (_FAILED, *_MENDED, "serve", _STOPPED, "round_opened", "round_closed", "round_extended", "over")
_LOSSES, _LEAST = ("revoked", "reply_refused"), ("rounds.quorum_min", "rounds.min_cohort")  # events; their subjects
_MANY, _FRESH_MS = 200, 5000  # from how many members on a sentence is told again, and for how long
STATE_SHA256 = "state_sha256"  # the fact that holds the digest of server and members after the last round
_SERVER_SHA256 = "server_sha256"  # in its place in older stores: that of the server alone


def task_reply(coordinator: Coordinator, connection: Connection, member: MemberRow, now_ms: int) -> Payload:
    """Return the task as this member sees it now."""
    settings = coordinator.settings
    task, rounds = settings.task, settings.rounds
    current = stored_rounds.advance(connection, rounds, now_ms)
    number = current.number if current else 0
    exchanges = phases(connection)
    state, replied = round_state(connection), stored_rounds.has_replied(connection, member.skid, number)
    again = stored_rounds.correctable(connection, member.skid, number)
    refusal = refused.told_to(connection, member.skid, number, state, replied=replied, correctable=again)
    stuck = _stuck(coordinator, connection, number, now_ms)
    return TaskReply(
        method=task.method.rsplit(":", 1)[-1],
        task=task.name,
        line=task.line,
        classes=task.classes,
        rounds=len(exchanges) or rounds.count,
        round=number,
        phase=stored_rounds.phase_of(connection, number),
        state=state,
        deadline_ms=current.deadline_ms if current and current.state == "open" else 0,
        tokens=task.tokens if task.shares_maps else 0,
        maps_per_class=task.maps_per_class if task.shares_maps else 0,
        quorum_min=rounds.quorum_min,
        quorum_target=rounds.quorum_target,
        max_reply_bytes=settings.limits.reply_bytes,
        replied=replied or refused.reason_of(connection, member.skid, number) not in (None, refused.LOST),
        settings=task.settings,
        train_rounds=rounds.count,
        epochs=task.epochs,
        seed=task.seed,
        travels=task.travels,
        backbone={**task.backbone, "name": _without_folders(str(task.backbone.get("name", "")))},
        state_sha256=state_sha256(connection) or "",
        stuck="; ".join(filter(None, (refusal, stuck, _refused_by_gate(connection, number, state))))[:MAX_SENTENCE],
    ).to_payload()


def _refused_by_gate(connection: Connection, number: int, state: str) -> str:
    """Tell members that the round before was refused, or the last one; "" where it was not. Why, the operator knows."""
    found = findings.refused_rounds(connection)
    if state == "done":
        last = f"round {number}, the last, {GATE_REFUSED}: what was learned before it counts"
        return last if number in found else ""
    if number - 1 not in found:
        return ""
    return f"round {number - 1} {GATE_REFUSED}: its replies count for nothing, and round {number} begins where it began"


def _stuck(coordinator: Coordinator, connection: Connection, number: int, now_ms: int) -> str:
    """Say to a member that the round is stuck; "" where it is not. Among many members, as it was a moment ago.

    To find out takes a look at every member, and every member asks.
    """
    many, told = membership.count_approved(connection) > _MANY, coordinator.told_stuck
    if many and told is not None and told[0] == number and 0 <= now_ms - told[1] < _FRESH_MS:
        return told[2]
    found = how_it_stands(connection, coordinator.settings, now_ms, served=True)
    said = stuck_sentence(found, number, to_member=True)
    coordinator.told_stuck = (number, now_ms, said)
    return said


def how_it_stands(
    connection: Connection,
    settings: CoordinatorSettings,
    now_ms: int,
    *,
    served: bool,
    disowned_ms: int | None = None,
    full: str = "",
) -> FederationStanding:
    """Say whether the federation goes on.

    `served` tells that a process runs the rounds, `disowned_ms` since when the root set lists another signing key,
    `full` in which folder the store lies on a full disk. Commands name the members that they are about.
    """
    invited = len(membership.open_invites(connection, now_ms))
    found = replace(_facts(connection, settings, served), disowned_ms=disowned_ms, invited=invited, full=full)
    return standing(found if served else _unserved(connection, found), settings.rounds)


def unpublished(connection: Connection, task: TaskSettings) -> str:
    """Return line/task of the model that devices learn with where no bundle of it is published; else ""."""
    published = {(one.line, one.task) for one in publishing.current(connection)}
    return "" if (task.line, task.name) in published else f"{task.line}/{task.name}"


def _facts(connection: Connection, settings: CoordinatorSettings, served: bool) -> RoundFacts:
    rules = settings.rounds
    current, state = stored_rounds.current_round(connection), round_state(connection)
    approved = membership.approved_roles(connection)
    failing_ms = audit.since_ms(connection, _FAILED, _MENDED) if failing_job(connection, rules) else None
    pending = tuple(membership.names(connection, "pending"))
    if current is None:
        started = start_is_due(connection, rules)
        return RoundFacts(
            members=len(approved), pending=pending, started=started, failing_ms=failing_ms, served=served
        )  # fmt: skip
    over = state == "done"
    opened_ms = _opened_ms(connection, current.number)
    others = stored_broadcasts.others_in_broadcasts(connection, current.number + over)
    replied, gone = stored_rounds.answered(connection, current.number)
    here = replied | gone
    left = [skid for skid in approved if over or skid not in here]
    withheld = [others[skid] for skid in left if skid in others
                and not cohort_allows(others[skid], current.number + over, rules.min_cohort)]  # fmt: skip
    overdue_ms = stored_rounds.overdue_ms(connection, current.number)
    awaits_device = overdue_ms is not None and any(approved[skid] == "device" for skid in left)
    return RoundFacts(
        current=current,
        over=over,
        members=len(approved),
        pending=pending,
        able=len(left) - len(withheld),
        withheld=tuple(withheld),
        newcomer=len(stored_broadcasts.contributors(connection, before=current.number + over)),
        refused=len(gone & approved.keys()),
        grants=tuple(refused.grants_missing(connection, current.number).items()),
        beside=stored_rounds.counted(connection, current.number, beside=True),
        opened_ms=opened_ms,
        losses_ms=tuple(audit.times_of(connection, _LOSSES, from_ms=opened_ms)),
        raised_ms=max(audit.times_of(connection, ("setting",), _LEAST, from_ms=opened_ms), default=0),
        overdue_ms=overdue_ms,
        unpublished=unpublished(connection, settings.task) if awaits_device else "",
        failing_ms=failing_ms,
        served=served,
    )


def _opened_ms(connection: Connection, number: int) -> int:
    """Return when a round opened last: again where its replies could not be aggregated."""
    again = audit.newest_of(connection, ("round_reopened",))
    return again[2] if again and again[1] == str(number) else stored_rounds.opened_ms(connection, number)


def _unserved(connection: Connection, found: RoundFacts) -> RoundFacts:
    """Add when the last server stopped, or the folder was restored since; of a killed one when it last did something.

    Nobody notes when a server is killed, and members may have been silent for long before.
    """
    newest = audit.newest_of(connection, (*_OF_SERVER, RESTORED))
    if newest and newest[0] == _STOPPED:
        return replace(found, stopped_ms=newest[2])
    if newest and newest[0] == RESTORED:
        return replace(found, restored_ms=newest[2])
    signs = (*([newest[2]] if newest else []), *membership.heard_ms(connection).values())
    return replace(found, sign_ms=max(signs, default=None))


def _without_folders(name: str) -> str:
    """A backbone's name without the folders of this machine, such as run:first for run:runs/first."""
    kind, colon, where = name.partition(":")
    return f"{kind}:{PurePath(where).name}" if colon and kind in ("run", "file") else name


def state_sha256(connection: Connection) -> str | None:
    """Return the digest of server and members after the last round, None before it was aggregated.

    Who joins or leaves later changes it no more.
    """
    found = stored_rounds.fact(connection, STATE_SHA256)
    if isinstance(found, str):
        return found
    server = stored_rounds.fact(connection, _SERVER_SHA256)
    return final_digest(connection, server) if isinstance(server, str) else None


def final_digest(connection: Connection, server_sha256: str) -> str:
    """Return the digest of the server and the members that are approved now.

    It is that of the local engine: a member's digest is the one in its newest accepted reply (docs/design.md 5).
    """
    told, members = newest_replies.site_digests(connection), membership.approved(connection)
    return state_digest(server_sha256, {one.name: told.get(one.skid, digest({})) for one in members})


def phases(connection: Connection) -> list[str]:
    """Return the phase of every exchange in order; empty before the start."""
    found = stored_rounds.fact(connection, "phases")
    return [str(item) for item in found] if isinstance(found, list) else []


def failing_job(connection: Connection, rules: RoundSettings) -> dict[str, str | int] | None:
    """Return kind, round, error and time of the job that failed last.

    None once one has succeeded since, or it is due no more, as where the member was shut out that it was for.
    """
    found = audit.newest_of(connection, (_FAILED, *_MENDED))
    if found is None or found[0] != _FAILED:
        return None
    _, subject, at_ms, detail = found
    kind, number = str(detail["kind"]), int(subject)
    if kind == "start" and not start_is_due(connection, rules):
        return None
    if kind == "broadcast" and not stored_broadcasts.without_broadcast(connection, number):
        return None
    return {"kind": kind, "round": number, "error": str(detail["error"]), "at_ms": at_ms}


def start_is_due(connection: Connection, rules: RoundSettings) -> bool:
    """Tell, before the start, whether the members that are approved may begin."""
    approved = membership.count_approved(connection)
    wanted = bool(stored_rounds.fact(connection, "start_wanted")) and approved > 0
    return wanted or starts_by_itself(approved, rules)


def round_state(connection: Connection) -> str:
    """Return "waiting", "open", "closed" or "done"."""
    current = stored_rounds.current_round(connection)
    if current is None:
        return "waiting"
    if current.state == "done" and current.number >= len(phases(connection)):
        return "done"
    return "open" if current.state == "open" else "closed"

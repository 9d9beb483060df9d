"""What a member is told about the task and the current round."""

from sqlalchemy import Connection

from edgefl_coordinator import audit, progress
from edgefl_coordinator.coordinator import Coordinator
from edgefl_coordinator.members import Member
from edgefl_protocol import Payload
from edgefl_protocol.messages import TaskReply


def task_reply(coordinator: Coordinator, connection: Connection, member: Member, now_ms: int) -> Payload:
    """Return the task as this member sees it now."""
    settings = coordinator.settings
    task, rounds = settings.task, settings.rounds
    current = progress.advance(connection, rounds.policy, now_ms)
    number = current.number if current else 0
    exchanges = phases(connection)
    return TaskReply(
        method=task.method.rsplit(":", 1)[-1],
        task=task.name,
        line=task.line,
        classes=task.classes,
        rounds=len(exchanges) or rounds.count,
        round=number,
        phase=progress.phase_of(connection, number),
        state=round_state(connection),
        deadline_ms=current.deadline_ms if current and current.state == "open" else 0,
        tokens=task.tokens if task.shares_maps else 0,
        maps_per_class=task.maps_per_class if task.shares_maps else 0,
        quorum_min=rounds.quorum_min,
        quorum_target=rounds.quorum_target,
        max_reply_bytes=settings.limits.reply_bytes,
        replied=progress.has_replied(connection, member.skid, number),
        settings={key: int(item) if isinstance(item, bool) else item for key, item in task.settings.items()},
    ).to_payload()


def phases(connection: Connection) -> list[str]:
    """Return the phase of every exchange in order; empty before the start."""
    found = progress.fact(connection, "phases")
    return [str(item) for item in found] if isinstance(found, list) else []


def failing_job(connection: Connection) -> dict[str, str | int] | None:
    """Return kind, round, error and time of the job that failed last, None once one has succeeded since."""
    found = audit.newest_of(connection, ("job_failed", "state", "round_reopened"))
    if found is None or found[0] != "job_failed":
        return None
    _, subject, at_ms, detail = found
    return {"kind": str(detail["kind"]), "round": int(subject), "error": str(detail["error"]), "at_ms": at_ms}


def round_state(connection: Connection) -> str:
    """Return "waiting", "open", "closed" or "done"."""
    current = progress.current_round(connection)
    if current is None:
        return "waiting"
    if current.state == "done" and current.number >= len(phases(connection)):
        return "done"
    return "open" if current.state == "open" else "closed"

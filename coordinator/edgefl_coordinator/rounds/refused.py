"""Replies that aggregation refused: why, until when they are kept, and what their senders hear.

Guarantees: a refused reply counts for nothing; it is kept while its round is open, so that it can be judged again after
the operator changed what is allowed, and nobody has to learn or send it again; its sender is told round and reason. One
refused for its form may be replaced once by another (`stored_rounds.accept_reply`); never one that lies too far off:
whoever may try again learns how far is allowed. One that is lost is kept no more: its sender sends it again, as if it
had not. Source: docs/security.md 4 and check 46.
"""

from collections.abc import Mapping

from sqlalchemy import ColumnElement, Connection, bindparam, delete, exists, insert, select

from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds.judging import grant_that_allows
from edgefl_coordinator.store import audit, counts
from edgefl_coordinator.store.statements import Statement
from edgefl_coordinator.store.tables import members as member_table
from edgefl_coordinator.store.tables import refused_replies, replies
from edgefl_protocol.messages.task_reply import CORRECTABLE, REPLY_REFUSED

LOST = "what the coordinator stored of it is missing or damaged"
_MAX_REASON = 500  # characters of a reason that a member is told
REASON = select(refused_replies.c.reason).where(
    refused_replies.c.number == bindparam("number"), refused_replies.c.skid == bindparam("skid")
)
_REASON = Statement(REASON)
_OF_REPLY = (refused_replies.c.number == replies.c.number, refused_replies.c.skid == replies.c.skid)


def is_sound() -> ColumnElement[bool]:
    """Return the condition that a row of `replies` was not refused."""
    return ~exists().where(*_OF_REPLY)


def is_lost() -> ColumnElement[bool]:
    """Return the condition that a row of `replies` cannot be read any more."""
    return exists().where(*_OF_REPLY, refused_replies.c.reason == LOST)


def refuse_replies(connection: Connection, now_ms: int, number: int, refused: Mapping[str, str]) -> None:
    """Note which replies of a round aggregation refused, name → reason; they count no more, and stay for now."""
    found = (
        select(member_table.c.name, replies.c.skid)
        .join(member_table, member_table.c.skid == replies.c.skid)
        .where(replies.c.number == number, member_table.c.name.in_(refused), is_sound())
    )
    counts.drop(connection)
    for row in connection.execute(found).all():
        reason = refused[row.name]
        kept = {"number": number, "skid": row.skid, "reason": reason, "refused_ms": now_ms}
        connection.execute(insert(refused_replies).values(kept))
        audit.append(connection, now_ms, "reply_refused", row.name, {"round": number, "reason": reason})


def take_back(connection: Connection, now_ms: int, number: int) -> None:
    """Let the refused replies of a round that are still there count until they are judged again."""
    counts.drop(connection)
    kept = exists().where(*_OF_REPLY)
    count = connection.execute(delete(refused_replies).where(refused_replies.c.number == number, kept)).rowcount
    if count:
        audit.append(connection, now_ms, "judged_again", str(number), {"replies": count})


def forget(connection: Connection, now_ms: int, member: MemberRow, number: int) -> None:
    """Forget that a member's reply of a round was refused, for another takes its place."""
    mine = (refused_replies.c.number == number) & (refused_replies.c.skid == member.skid)
    counts.drop(connection)
    connection.execute(delete(refused_replies).where(mine))
    audit.append(connection, now_ms, "reply_corrected", member.name, {"round": number})


def reason_of(connection: Connection, skid: str, number: int) -> str | None:
    """Return why a member's reply of a round was refused, or None."""
    found: str | None = _REASON.value(connection, number=number, skid=skid)
    return found


def refused_since(connection: Connection, number: int) -> list[dict[str, str | int]]:
    """Return round, name and reason of the replies that aggregation refused from round `number` on."""
    found = (
        select(refused_replies.c.number, member_table.c.name, refused_replies.c.reason)
        .join(member_table, member_table.c.skid == refused_replies.c.skid)
        .where(refused_replies.c.number >= number)
        .order_by(refused_replies.c.number, member_table.c.name)
    )
    return [{"round": row.number, "name": row.name, "reason": row.reason} for row in connection.execute(found)]


def grants_missing(connection: Connection, number: int) -> dict[str, int]:
    """Return name → images whose grant would let the refused reply of a round count, of members that still belong."""
    images = {str(one["name"]): grant_that_allows(str(one["reason"])) for one in refused_since(connection, number)}
    approved = set(membership.names(connection, "approved") if images else ())
    return {name: most for name, most in images.items() if most is not None and name in approved}


def told_to(
    connection: Connection, skid: str, number: int, state: str, *, replied: bool, correctable: bool = False
) -> str:
    """Say that this member's reply of the current round was refused, and why; "" where it was not.

    Until it has replied in the current round, the same of the round before. `correctable`: another may replace it.
    """
    why = reason_of(connection, skid, number)
    if why == LOST and state == "open":
        return (
            f"the coordinator lost this member's reply of round {number}: the next edgefl sync or edgefl-train join "
            "learns and sends it again; what edgefl contribute sent has to be contributed again"
        )
    if why is not None:
        kept = "; it is judged again if the operator grants more images or changes what is allowed"
        return _sentence(number, why) + ((kept + CORRECTABLE * correctable) if state == "open" else "")
    if not replied and (why := reason_of(connection, skid, number - 1)) is not None:
        return f"{_sentence(number - 1, why)}; the round went on without it"
    return ""


def _sentence(number: int, reason: str) -> str:
    printable = "".join(one if one.isprintable() else " " for one in reason[:_MAX_REASON])
    return f"{REPLY_REFUSED} {number} was refused: {printable}"

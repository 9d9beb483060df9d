"""Rounds in the database: what `states.decide` returns, carried out in the caller's transaction.

Guarantees: a reply is stored at most once a member and round, only while the round is open; closing, committing a
result and opening the next round are compare-and-set, so doing one twice changes nothing; a reply that aggregation
refused counts for nothing, and its sender replies again in that round at most once, with another content; one that is
lost may be sent again as it was (`refused`). Source: docs/security.md, reliability and exchange policy (checks 46, 64).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, update

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import newest_replies
from edgefl_coordinator.rounds import refused as refusals
from edgefl_coordinator.rounds.judging import beside_the_average, is_beside, is_of_form
from edgefl_coordinator.rounds.states import Close, Round, accepts, decide
from edgefl_coordinator.settings import CoordinatorSettings, RoundSettings
from edgefl_coordinator.store import audit, counts, inbox
from edgefl_coordinator.store.statements import FACT, KEEP_FIRST_FACT, Statement
from edgefl_coordinator.store.store import Blob
from edgefl_coordinator.store.tables import broadcasts, facts, offers, refused_replies, replies, rounds, states
from edgefl_coordinator.store.tables import members as member_table

_CORRECTED = "corrected_{}_{}"  # the fact that a member has replaced its refused reply of a round
_OVERDUE = "overdue_{}"  # the fact that holds a round's first deadline without enough replies

_ROUND = select(*rounds.c["number", "state", "deadline_ms", "tried"], counts.kept(rounds.c.number))
_LATEST = Statement(_ROUND.order_by(rounds.c.number.desc()).limit(1))
_OF_ROUND = select(rounds.c.phase).where(rounds.c.number == bindparam("number"))
_PHASE = Statement(_OF_ROUND)
_MINE = (replies.c.number == bindparam("number")) & (replies.c.skid == bindparam("skid"))
_MINE_SOUND = select(replies.c.skid).where(_MINE, refusals.is_sound())
_SOUND = Statement(_MINE_SOUND)
_DUE = Statement(select(*(one.scalar_subquery() for one in (_MINE_SOUND, refusals.REASON, _OF_ROUND))))
_ADD_REPLY = Statement(insert(replies))
_STATE = Statement(select(states.c.number, states.c.blob).order_by(states.c.number.desc()).limit(1))


@dataclass(frozen=True)
class Accepted:
    """A reply to be stored: its blob is already durable."""

    blob: Blob
    idem: str
    names: tuple[str, ...]  # of its arrays
    site_sha256: str


@dataclass(frozen=True)
class OpenRound:
    """The open round that takes a member's reply."""

    round: Round
    phase: str
    refused: str | None  # why an earlier reply of this member was refused


def current_round(connection: Connection) -> Round | None:
    """Return the latest round, or None before the first."""
    row = _LATEST.first(connection)
    if row is None:
        return None
    number, state, deadline_ms, tried, kept = row
    count = counts.keep(connection, number, counted(connection, number)) if kept is None else int(kept)
    return Round(number=number, state=state, deadline_ms=deadline_ms, replies=count, tried=tried)


def counted(connection: Connection, number: int, *, beside: bool = False) -> int:
    """Count the replies of a round that are averaged, or the contributions beside the average; refused ones do not."""
    which = (replies.c.number == number) & (replies.c.beside == int(beside)) & refusals.is_sound()
    return connection.scalar(select(func.count()).select_from(replies).where(which)) or 0


def advance(connection: Connection, rules: RoundSettings, now_ms: int, known: Round | None = None) -> Round | None:
    """Close or extend the current round, `known` where it was read, if it is time; return it as it then stands."""
    found = known or current_round(connection)
    action = decide(found, rules, now_ms) if found else None
    if found is None or action is None:
        return found
    here = rounds.update().where(rounds.c.number == found.number, rounds.c.state == "open")
    if isinstance(action, Close):
        connection.execute(here.values(state="aggregating", closed_ms=now_ms, close_reason=action.reason))
        detail = {"reason": action.reason, "replies": found.replies}
        audit.append(connection, now_ms, "round_closed", str(found.number), detail)
    else:
        connection.execute(here.values(deadline_ms=action.deadline_ms))
        set_fact(connection, _OVERDUE.format(found.number), found.deadline_ms)  # the first one is kept
        detail = {"deadline_ms": action.deadline_ms, "replies": found.replies}
        audit.append(connection, now_ms, "round_extended", str(found.number), detail)
    return current_round(connection)


def accept_reply(
    connection: Connection, settings: CoordinatorSettings, now_ms: int, member: MemberRow, number: int, reply: Accepted
) -> list[str]:
    """Store a reply in the open round; the round closes at once when that completes its target.

    One that aggregation refused gives way to it: returns the blobs to delete after the commit.

    Raises:
        RefusedError: `no_round`, `round_closed`, `already_replied`, or `bad_contribution` where aggregation refused
            an earlier reply of this member in this round that this one cannot replace.
    """
    due = check_reply_due(connection, settings.rounds, now_ms, member, number)
    replaced = _make_room(connection, now_ms, member, number, reply.blob.sha256, due.refused)
    beside = is_beside(reply.names, beside_the_average(settings.task.travels, due.phase))
    if settings.task.most_arrays is not None:
        newest_replies.count_arrays(connection, member, len(reply.names))
    row = {"number": number, "skid": member.skid, "idem": reply.idem, "arrays": len(reply.names), "beside": int(beside)}
    stored = {"blob": reply.blob.name, "sha256": reply.blob.sha256, "bytes": reply.blob.size}
    _ADD_REPLY.send(connection, **row, **stored, site_sha256=reply.site_sha256, accepted_ms=now_ms)
    detail = {"round": number, "bytes": reply.blob.size, "sha256": reply.blob.sha256}
    audit.append(connection, now_ms, "reply_accepted", member.name, detail)
    if not beside:
        count = counts.keep(connection, number, due.round.replies + 1)
        advance(connection, settings.rounds, now_ms, replace(due.round, replies=count))
    return replaced


def check_reply_due(
    connection: Connection, rules: RoundSettings, now_ms: int, member: MemberRow, number: int
) -> OpenRound:
    """Return what takes the reply, or refuse a reply that it does not take of this member, as `accept_reply` does."""
    found = advance(connection, rules, now_ms)
    verdict = accepts(found, number, now_ms)
    if verdict == "no_round" or found is None:
        raise RefusedError("no_round", f"round {number} has not been opened; ask for the task again")
    if verdict == "round_closed":
        raise RefusedError("round_closed", f"round {number} accepts no more replies; ask for the task again")
    sound, why, phase = _DUE.first(connection, number=number, skid=member.skid) or (None, None, None)
    if sound is not None:
        raise RefusedError("already_replied", f"{member.name} has already replied in round {number}")
    if why not in (None, refusals.LOST) and not correctable(connection, member.skid, number):
        raise _refused(number, why)
    return OpenRound(found, phase or "", why)


def correctable(connection: Connection, skid: str, number: int) -> bool:
    """Tell whether a member may replace its refused reply of a round: it was of the wrong form, and is its first."""
    why = refusals.reason_of(connection, skid, number)
    return why is not None and is_of_form(why) and fact(connection, _CORRECTED.format(number, skid)) is None


def _make_room(
    connection: Connection, now_ms: int, member: MemberRow, number: int, sha256: str, why: str | None
) -> list[str]:
    """Drop the reply that was refused, `why` says it, and its blob; refuse the same content again."""
    if why is None:
        return []
    mine = (replies.c.number == number) & (replies.c.skid == member.skid)
    if why != refusals.LOST and connection.scalar(select(replies.c.sha256).where(mine)) == sha256:
        raise _refused(number, why)
    refusals.forget(connection, now_ms, member, number)
    if why != refusals.LOST:  # that was no fault of its sender's
        set_fact(connection, _CORRECTED.format(number, member.skid), True)
    return _drop(connection, mine)


def _refused(number: int, why: str) -> RefusedError:
    return RefusedError("bad_contribution", f"the reply of round {number} was refused: {why}"[:500])


def has_replied(connection: Connection, skid: str, number: int) -> bool:
    """Tell whether this member's reply of this round is stored, and was not refused."""
    return _SOUND.value(connection, number=number, skid=skid) is not None


def lose_replies(connection: Connection, now_ms: int, number: int, lost: Mapping[str, str]) -> list[str]:
    """Drop the replies, name → blob, that cannot be read any more; return the blobs to delete after the commit.

    Their senders may send the same again, under the same key.
    """
    refusals.refuse_replies(connection, now_ms, number, dict.fromkeys(lost, refusals.LOST))
    return _drop_unanswered(connection, (replies.c.number == number) & replies.c.blob.in_(lost.values()))


def drop_lost(connection: Connection) -> list[str]:
    """Drop the lost replies of the round under way that an older version kept, as `lose_replies` does.

    With their first answers, which would tell a member that sends one again that it counts.
    """
    under_way = replies.c.number.in_(select(rounds.c.number).where(rounds.c.state != "done"))
    return _drop_unanswered(connection, under_way & refusals.is_lost())


def _drop_unanswered(connection: Connection, which: ColumnElement[bool]) -> list[str]:
    """Delete replies as if they had never come; return the names of their blobs."""
    for row in connection.execute(select(replies.c.skid, replies.c.idem).where(which)).all():
        inbox.forget_answer(connection, row.skid, row.idem)
    return _drop(connection, which)


def drop_open_reply(connection: Connection, skid: str) -> list[str]:
    """Drop a revoked member's reply of the round that is still open; return the blobs to delete after the commit."""
    open_rounds = select(rounds.c.number).where(rounds.c.state == "open")
    dropped = _drop(connection, (replies.c.skid == skid) & replies.c.number.in_(open_rounds))
    if dropped:
        try_again(connection)
    return dropped


def reopen_round(
    connection: Connection, now_ms: int, number: int, refused: Mapping[str, str], problem: str, deadline_s: int
) -> list[str]:
    """Open a round again whose replies could not be aggregated; nothing changes where it is not being aggregated.

    It keeps the replies of members who still belong; refused ones count no more. Its first deadline is the one from now
    on. Returns the blobs to delete after the commit.
    """
    gone = select(member_table.c.skid).where(member_table.c.state == "revoked")
    here = update(rounds).where(rounds.c.number == number, rounds.c.state == "aggregating")
    deadline_ms = now_ms + deadline_s * 1000
    if connection.execute(here.values(state="open", deadline_ms=deadline_ms, problem=problem)).rowcount != 1:
        return []
    connection.execute(delete(facts).where(facts.c.key == _OVERDUE.format(number)))
    refusals.refuse_replies(connection, now_ms, number, refused)
    dropped = _drop(connection, (replies.c.number == number) & replies.c.skid.in_(gone))
    left = counted(connection, number)
    connection.execute(update(rounds).where(rounds.c.number == number).values(tried=left))
    detail = {"problem": problem, "replies": left, "deadline_ms": deadline_ms}
    audit.append(connection, now_ms, "round_reopened", str(number), detail)
    return dropped


def try_again(connection: Connection) -> None:
    """Let the open round close with the replies it has, although they could not be aggregated before."""
    connection.execute(update(rounds).where(rounds.c.state == "open").values(tried=0, problem=None))


def judge_again(connection: Connection, now_ms: int) -> None:
    """Let the refused replies of the open round count until they are judged again: what is allowed has changed."""
    found = current_round(connection)
    if found is not None and found.state == "open":
        refusals.take_back(connection, now_ms, found.number)
        try_again(connection)


def drop_refused(connection: Connection, number: int) -> list[str]:
    """Drop the refused replies of a round that is over; return the blobs to delete after the commit."""
    return _drop(connection, (replies.c.number == number) & ~refusals.is_sound())


def problem_of(connection: Connection, number: int) -> str | None:
    """Return why an open round was opened again, or None."""
    return connection.scalar(select(rounds.c.problem).where(rounds.c.number == number, rounds.c.state == "open"))


def _drop(connection: Connection, which: ColumnElement[bool]) -> list[str]:
    """Delete replies; return the names of their blobs."""
    counts.drop(connection)
    blobs = [name for name in connection.scalars(select(replies.c.blob).where(which)) if name is not None]
    connection.execute(delete(replies).where(which))
    return blobs


def replies_of(connection: Connection, number: int) -> dict[str, str]:
    """Return member name → blob of every reply of a round that counts, but of members that were shut out since."""
    found = (
        select(member_table.c.name, replies.c.blob)
        .join(member_table, member_table.c.skid == replies.c.skid)
        .where(replies.c.number == number, replies.c.blob.is_not(None), member_table.c.state == "approved")
        .where(refusals.is_sound())
    )
    return {row.name: row.blob for row in connection.execute(found)}


def commit_state(connection: Connection, now_ms: int, number: int, state: Blob) -> bool:
    """Commit the server's state after round `number` (0: the start); False where it was, and then nothing changed."""
    if connection.scalar(select(states.c.number).where(states.c.number == number)) is not None:
        return False
    if number > 0:
        closing = update(rounds).where(rounds.c.number == number, rounds.c.state == "aggregating")
        if connection.execute(closing.values(state="done")).rowcount != 1:
            return False
    connection.execute(insert(states).values(number=number, blob=state.name, sha256=state.sha256))
    audit.append(connection, now_ms, "state", str(number), {"sha256": state.sha256})
    return True


def open_round(connection: Connection, now_ms: int, number: int, phase: str, deadline_s: int) -> None:
    """Open a round; its broadcasts are added in the same transaction."""
    deadline_ms = now_ms + deadline_s * 1000
    row = {"number": number, "phase": phase, "state": "open", "opened_ms": now_ms, "deadline_ms": deadline_ms}
    connection.execute(insert(rounds).values(row))
    audit.append(connection, now_ms, "round_opened", str(number), {"phase": phase, "deadline_ms": deadline_ms})


def answered(connection: Connection, number: int) -> tuple[set[str], set[str]]:
    """Return the key ids whose reply of a round is stored, and those whose reply was refused, but not lost."""
    stored = connection.scalars(select(replies.c.skid).where(replies.c.number == number, refusals.is_sound()))
    here = (refused_replies.c.number == number) & (refused_replies.c.reason != refusals.LOST)
    return set(stored), set(connection.scalars(select(refused_replies.c.skid).where(here)))


def opened_ms(connection: Connection, number: int) -> int:
    """Return when a round opened, in Unix milliseconds; 0 where there is none."""
    return connection.scalar(select(rounds.c.opened_ms).where(rounds.c.number == number)) or 0


def latest_state(connection: Connection) -> tuple[int, str] | None:
    """Return the number and blob of the newest server state, or None before the start."""
    row = _STATE.first(connection)
    return (row[0], row[1]) if row else None


def forget_past(connection: Connection, current: int) -> list[str]:
    """Strike out the blobs that nothing needs once round `current` is open (or the final broadcast is out).

    Needed are the newest state and the broadcasts of `current`. First answers lie in rows of their own. Returns the
    blobs to delete after the commit; a crash before leaves orphans for the sweep.
    """
    struck: list[str] = []
    for table, bound in ((replies, current), (broadcasts, current), (states, current - 1)):
        past = (table.c.number < bound) & table.c.blob.is_not(None)
        struck.extend(connection.scalars(select(table.c.blob).where(past)))
        connection.execute(update(table).where(past).values(blob=None))
    connection.execute(delete(offers).where(offers.c.blob.in_(struck)))
    return struck


def overdue_ms(connection: Connection, number: int) -> int | None:
    """Return the first deadline of a round, since it opened last, that passed without enough replies; or None."""
    found = fact(connection, _OVERDUE.format(number))
    return found if isinstance(found, int) else None


def set_fact(connection: Connection, key: str, value: object) -> None:
    """Remember a plain value; an existing one is kept."""
    KEEP_FIRST_FACT.run(connection, key=key, value=json.dumps(value))


def fact(connection: Connection, key: str) -> object:
    """Return a remembered value, or None."""
    text = FACT.value(connection, key=key)
    return None if text is None else json.loads(text)


def phase_of(connection: Connection, number: int) -> str:
    """Return the phase of a round: "warm", "train" or "final"; "" if there is no such round."""
    return _PHASE.value(connection, number=number) or ""

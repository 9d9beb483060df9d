"""Broadcasts of a round in the database, and to whom they are released.

Guarantee: a broadcast is released only to a member for whom it holds the contributions of enough others. Source:
docs/security.md, exchange policy (check 51).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import findings
from edgefl_coordinator.rounds.states import NOTHING, cohort_allows
from edgefl_coordinator.rounds.stored_rounds import current_round
from edgefl_coordinator.settings import RoundSettings
from edgefl_coordinator.store.store import Blob
from edgefl_coordinator.store.tables import broadcasts, offers, replies, rounds
from edgefl_coordinator.store.tables import members as member_table


@dataclass(frozen=True)
class Broadcast:
    """A broadcast to be stored: its blob is already durable."""

    blob: Blob
    others: int | None  # sites but the receiver whose contributions lie in it one by one; None: it holds an average


def release_broadcast(connection: Connection, settings: RoundSettings, member: MemberRow, number: int) -> str:
    """Return the blob of a member's broadcast.

    Raises:
        RefusedError: `no_round`, `round_closed` where a later round is open, `small_cohort`, or `not_found` while it
            is being prepared.
    """
    found = current_round(connection)
    last = 0 if found is None else found.number + (found.state == "done")  # after the last round: the final broadcast
    if number > last:
        raise RefusedError("no_round", f"round {number} has not been opened; ask for the task again")
    if number < last:
        raise RefusedError(
            "round_closed", f"round {number} is over, and its broadcast is no longer given; ask for the task again"
        )
    row = connection.execute(
        select(broadcasts).where(broadcasts.c.number == number, broadcasts.c.skid == member.skid)
    ).first()
    if row is None:
        raise not_ready(number)
    if not cohort_allows(row.others, number, settings.min_cohort):
        raise RefusedError(
            "small_cohort",
            f"the broadcast holds contributions of {row.others} other {'site' if row.others == 1 else 'sites'}, and at "
            f"least {settings.min_cohort} are required",
        )
    return str(row.blob)


def not_ready(number: int) -> RefusedError:
    """Say that a member's broadcast is still to be made."""
    return RefusedError("not_found", f"the broadcast of round {number} for this site is not ready; try again soon")


def make_anew(connection: Connection, member: MemberRow, number: int, blob: str) -> bool:
    """Let a member's broadcast whose blob is lost be made anew; False where that is not its broadcast any more."""
    mine = (broadcasts.c.number == number) & (broadcasts.c.skid == member.skid) & (broadcasts.c.blob == blob)
    if connection.execute(delete(broadcasts).where(mine)).rowcount != 1:
        return False
    connection.execute(delete(offers).where(offers.c.blob == blob))
    membership.note_change(connection)
    return True


def contributors(connection: Connection, *, before: int) -> set[str]:
    """Return the names in the newest average before a round: who sent something in the last round that got anything.

    A round that the gate refused got nothing.
    """
    sent = (rounds.c.state == "done") & (replies.c.number < before) & (replies.c.arrays > 0) & (replies.c.beside == 0)
    sent &= replies.c.number.not_in(findings.refused_rounds(connection))
    both = replies.join(rounds, rounds.c.number == replies.c.number)
    newest = connection.scalar(select(func.max(replies.c.number)).select_from(both).where(sent))
    found = (
        select(member_table.c.name)
        .join(replies, replies.c.skid == member_table.c.skid)
        .where(replies.c.number == newest, replies.c.arrays > 0, replies.c.beside == 0)
    )
    return set(connection.scalars(found))


def add_broadcasts(connection: Connection, number: int, made: Mapping[str, Broadcast]) -> None:
    """Add broadcasts of an open round, key id → broadcast."""
    averaged, rows = contributors(connection, before=number), []
    untouched = findings.refused_rounds(connection).keys() >= set(range(1, number))  # the state is that of the start
    for skid, broadcast in sorted(made.items()):
        others = NOTHING if untouched else broadcast.others
        if others is None:
            member = membership.by_skid(connection, skid)
            others = len(averaged) - (member is not None and member.name in averaged)
        row = {"number": number, "skid": skid, "blob": broadcast.blob.name, "sha256": broadcast.blob.sha256}
        rows.append({**row, "others": others})
    if rows:
        connection.execute(insert(broadcasts), rows)


def others_in_broadcasts(connection: Connection, number: int) -> dict[str, int]:
    """Return key id → others whose contributions lie in that member's broadcast of a round."""
    found = select(broadcasts.c.skid, broadcasts.c.others).where(broadcasts.c.number == number)
    return {row.skid: row.others for row in connection.execute(found)}


def without_broadcast(connection: Connection, number: int) -> list[MemberRow]:
    """Return the approved members for whom round `number` has no broadcast yet."""
    served = set(connection.scalars(select(broadcasts.c.skid).where(broadcasts.c.number == number)))
    return [member for member in membership.approved(connection) if member.skid not in served]

"""What the members' newest replies hold, whichever round they are of.

Guarantees: who was shut out, a reply that was refused, and a round that the gate refused count for nothing. The number
of arrays is kept beside the rows and counted again only where other replies count or a member's state has changed
(`counts`, `membership.changes`).
"""

import json

from sqlalchemy import Connection, Text, bindparam, cast, exists, literal, select

from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import findings
from edgefl_coordinator.rounds import refused as refusals
from edgefl_coordinator.store import counts
from edgefl_coordinator.store.statements import KEEP_FACT, Statement, fact_of
from edgefl_coordinator.store.tables import facts, replies
from edgefl_coordinator.store.tables import members as member_table

_IN_STATE = refusals.is_sound() & ~exists().where(
    facts.c.key == literal(findings.REFUSED) + cast(replies.c.number, Text)
)
_ARRAYS = (
    select(replies.c.arrays)
    .where(replies.c.skid == bindparam("skid"), _IN_STATE)
    .order_by(replies.c.number.desc())
    .limit(1)
    .scalar_subquery()
)
_KEPT = Statement(select(fact_of(counts.ARRAYS), fact_of(membership.CHANGES), _ARRAYS))


def site_digests(connection: Connection) -> dict[str, str]:
    """Return key id → digest of the site's state, of each member's newest reply."""
    found = select(replies.c.skid, replies.c.site_sha256).where(refusals.is_sound()).order_by(replies.c.number)
    return {row.skid: row.site_sha256 for row in connection.execute(found)}


def held_arrays(connection: Connection) -> int:
    """Count the arrays of every member's newest reply: where maps travel, the state holds them all."""
    return _held(connection, "")[0]


def count_arrays(connection: Connection, member: MemberRow, arrays: int) -> None:
    """Count the arrays of a reply that is about to be stored, in the place of those of the member's newest one."""
    held, gone, changes = _held(connection, member.skid)
    _keep(connection, changes, held - gone + arrays)


def _held(connection: Connection, skid: str) -> tuple[int, int, int]:
    """Return how many arrays all hold, how many of them one member does, and how often members' states changed."""
    kept, changed, mine = _KEPT.first(connection, skid=skid) or (None, None, None)
    (then, arrays), changes = json.loads(kept) if kept else (None, 0), int(changed or 0)
    return arrays if then == changes else _keep(connection, changes, _counted(connection)), mine or 0, changes


def _counted(connection: Connection) -> int:
    found = (
        select(member_table.c.name, replies.c.arrays)
        .join(member_table, member_table.c.skid == replies.c.skid)
        .where(member_table.c.state == "approved", _IN_STATE)
        .order_by(replies.c.number)
    )
    return sum({row.name: row.arrays for row in connection.execute(found)}.values())


def _keep(connection: Connection, changes: int, arrays: int) -> int:
    KEEP_FACT.send(connection, key=counts.ARRAYS, value=json.dumps([changes, arrays]))
    return arrays

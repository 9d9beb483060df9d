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
from edgefl_coordinator.store.statements import FACT, KEEP_FACT, Statement
from edgefl_coordinator.store.tables import facts, replies
from edgefl_coordinator.store.tables import members as member_table

_IN_STATE = refusals.is_sound() & ~exists().where(
    facts.c.key == literal(findings.REFUSED) + cast(replies.c.number, Text)
)
_ARRAYS = Statement(
    select(replies.c.arrays)
    .where(replies.c.skid == bindparam("skid"), _IN_STATE)
    .order_by(replies.c.number.desc())
    .limit(1)
)


def site_digests(connection: Connection) -> dict[str, str]:
    """Return key id → digest of the site's state, of each member's newest reply."""
    found = select(replies.c.skid, replies.c.site_sha256).where(refusals.is_sound()).order_by(replies.c.number)
    return {row.skid: row.site_sha256 for row in connection.execute(found)}


def held_arrays(connection: Connection) -> int:
    """Count the arrays of every member's newest reply: where maps travel, the state holds them all."""
    kept, changes = FACT.value(connection, key=counts.ARRAYS), membership.changes(connection)
    then, arrays = json.loads(kept) if kept else (None, 0)
    return int(arrays) if then == changes else _keep(connection, changes, _counted(connection))


def count_arrays(connection: Connection, member: MemberRow, arrays: int) -> None:
    """Count the arrays of a reply that is about to be stored, in the place of those of the member's newest one."""
    gone = _ARRAYS.value(connection, skid=member.skid) or 0
    _keep(connection, membership.changes(connection), held_arrays(connection) - gone + arrays)


def _counted(connection: Connection) -> int:
    found = (
        select(member_table.c.name, replies.c.arrays)
        .join(member_table, member_table.c.skid == replies.c.skid)
        .where(member_table.c.state == "approved", _IN_STATE)
        .order_by(replies.c.number)
    )
    return sum({row.name: row.arrays for row in connection.execute(found)}.values())


def _keep(connection: Connection, changes: int, arrays: int) -> int:
    KEEP_FACT.run(connection, key=counts.ARRAYS, value=json.dumps([changes, arrays]))
    return arrays

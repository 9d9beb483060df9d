"""Whose replies have to leave the server's state, because their members were shut out.

Guarantees: a member is told apart by its first key id, so one that joins under the same name keeps what it sent itself;
what a state was made without is noted in the transaction that stores it. Source: docs/security.md 4.
"""

import json
from collections.abc import Collection, Mapping

from sqlalchemy import Connection, select

from edgefl_coordinator.rounds.stored_rounds import fact
from edgefl_coordinator.store.statements import KEEP_FACT
from edgefl_coordinator.store.tables import members

_LEFT = "left"  # the fact that holds the key ids


def ever_shut_out(connection: Connection) -> dict[str, str]:
    """Return first key id → name of every member that was shut out, whoever has its name now."""
    left = select(members.c.skid, members.c.name).where(members.c.state == "revoked").order_by(members.c.skid)
    return {row.skid: row.name for row in connection.execute(left)}


def still_in_state(connection: Connection, shut_out: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names under which the newest state may hold what such members sent."""
    left = fact(connection, _LEFT)
    known = set(left) if isinstance(left, list) else set()
    return tuple(sorted({name for skid, name in shut_out.items() if skid not in known}))


def note_left(connection: Connection, shut_out: Collection[str]) -> None:
    """Note that the state just stored holds nothing of these members, by first key id."""
    KEEP_FACT.run(connection, key=_LEFT, value=json.dumps(sorted(shut_out)))

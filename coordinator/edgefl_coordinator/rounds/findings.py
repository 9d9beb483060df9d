"""What the operator is told of a round's result: whose reply was bounded or is odd, and what the gate said.

Guarantees: it is noted in the transaction that stores the state it is about, with a row of the audit log each; a round
that the gate refused counts as if nobody had replied in it (`refused_rounds`). Source: docs/security.md 4.
"""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select

from edgefl_coordinator.rounds.jobs import JobFiles
from edgefl_coordinator.store import audit, counts
from edgefl_coordinator.store.statements import KEEP_FIRST_FACT
from edgefl_coordinator.store.tables import facts

_BOUNDED = "bounded_{}"  # the fact that holds whose reply of a round counted for less than it said
_NOTICED = "noticed_{}"  # the fact that holds whose maps or features of a round are odd
REFUSED = "refused_round_"  # begins the fact that holds why the gate refused a round


def note(connection: Connection, now_ms: int, number: int, result: JobFiles) -> None:
    """Note what a round's job found."""
    _note_each(connection, now_ms, "reply_bounded", _BOUNDED, number, result.bounded)
    _note_each(connection, now_ms, "reply_noticed", _NOTICED, number, result.noticed)
    if result.gate:
        audit.append(connection, now_ms, f"gate_{result.gate}", str(number), {"said": result.gate_said})
    if result.gate == "refused":
        counts.drop(connection)
        _remember(connection, f"{REFUSED}{number}", result.gate_said)


def bounded_in(connection: Connection, number: int) -> list[dict[str, object]]:
    """Return round, name and how of the replies that counted for less than they said in a round."""
    return _found(connection, _BOUNDED, number)


def noticed_in(connection: Connection, number: int) -> list[dict[str, object]]:
    """Return round, name and what is odd about the maps or features of a reply."""
    return _found(connection, _NOTICED, number)


def refused_rounds(connection: Connection) -> dict[int, str]:
    """Return the rounds that the gate refused, with what it said: their replies are in no state."""
    found = select(facts.c.key, facts.c.value).where(facts.c.key >= REFUSED, facts.c.key < REFUSED + "~")
    told = {int(row.key.removeprefix(REFUSED)): json.loads(row.value) for row in connection.execute(found)}
    return dict(sorted(told.items()))


def _note_each(connection: Connection, now_ms: int, event: str, key: str, number: int, told: Mapping[str, str]) -> None:
    for name, how in sorted(told.items()):
        audit.append(connection, now_ms, event, name, {"round": number, "how": how})
    if told:
        _remember(connection, key.format(number), dict(sorted(told.items())))


def _found(connection: Connection, key: str, number: int) -> list[dict[str, object]]:
    text = connection.scalar(select(facts.c.value).where(facts.c.key == key.format(number)))
    told: dict[str, Any] = {} if text is None else json.loads(text)
    return [{"round": number, "name": name, "how": how} for name, how in told.items()]


def _remember(connection: Connection, key: str, value: object) -> None:
    KEEP_FIRST_FACT.run(connection, key=key, value=json.dumps(value))

"""Counts of replies, kept beside the rows: a reply costs as much in a round of ten thousand as in one of ten.

Guarantees: a count is kept in the transaction of what it counts. A reply that is accepted adds to it; whatever else
changes which replies count drops it (`drop`), and who asks next counts the rows.
"""

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Text, cast, delete, literal, or_

from edgefl_coordinator.store.statements import KEEP_FACT, fact_of
from edgefl_coordinator.store.tables import facts

_ROUND = "counted_{}"  # the facts that hold how many replies of a round are averaged
ARRAYS = "counted_arrays"  # the fact of `newest_replies`


def kept(number: ColumnElement[int]) -> ScalarSelect[str]:
    """Return the question how many replies of a round are averaged; NULL where the rows have to be counted."""
    return fact_of(literal(_ROUND.format("")) + cast(number, Text))


def keep(connection: Connection, number: int, count: int) -> int:
    """Keep how many replies of a round are averaged, and return it."""
    KEEP_FACT.send(connection, key=_ROUND.format(number), value=str(count))
    return count


def drop(connection: Connection) -> None:
    """Drop all counts: other replies count now. Facts of other words after `counted_` stay, such as the settings."""
    of_a_round = (facts.c.key >= _ROUND.format("0")) & (facts.c.key < _ROUND.format(":"))  # ":" follows "9"
    connection.execute(delete(facts).where(or_(facts.c.key == ARRAYS, of_a_round)))

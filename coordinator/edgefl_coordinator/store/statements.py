"""Statements that every request runs: SQLAlchemy writes them once, and the driver runs them.

Guarantees: a statement takes its values as parameters; its text and their order come from the tables alone. A row is a
plain tuple of the columns that were selected. Everything else goes through SQLAlchemy's own `Connection.execute`, which
takes seven times as long for the same statement. What the driver raises, `shared_commit` maps. Source: docs/security.md
check 38; docs/decisions/0055.
"""

from typing import Any, Final

from sqlalchemy import Connection, bindparam, insert, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql.expression import Executable

from edgefl_coordinator.store.tables import facts

_DIALECT = sqlite.dialect(paramstyle="qmark")


class Statement:
    """A statement whose parameters have names."""

    def __init__(self, statement: Executable) -> None:
        """Compile it; an insert takes all columns of its table."""
        compiled: Any = statement.compile(dialect=_DIALECT)  # type: ignore[attr-defined]
        self._text: str = compiled.string
        self._names: tuple[str, ...] = tuple(compiled.positiontup or ())
        self._own: dict[str, Any] = {name: value for name, value in compiled.params.items() if value is not None}

    def run(self, connection: Connection, **values: Any) -> Any:
        """Run it in the caller's transaction; returns the driver's cursor."""
        driver: Any = connection.connection.driver_connection
        if self._own:
            values = {**self._own, **values}
        return driver.execute(self._text, [values[name] for name in self._names])

    def first(self, connection: Connection, **values: Any) -> tuple[Any, ...] | None:
        """Return the first row, or None."""
        found: tuple[Any, ...] | None = self.run(connection, **values).fetchone()
        return found

    def value(self, connection: Connection, **values: Any) -> Any:
        """Return the first column of the first row, or None."""
        found = self.run(connection, **values).fetchone()
        return None if found is None else found[0]


FACT: Final = Statement(select(facts.c.value).where(facts.c.key == bindparam("key")))
KEEP_FACT: Final = Statement(insert(facts).prefix_with("OR REPLACE"))

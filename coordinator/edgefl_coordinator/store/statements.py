"""Statements that every request runs: SQLAlchemy writes them once for each database, and the driver runs them.

Guarantees: a statement takes its values as parameters; its text and their order come from the tables alone. A row is a
plain tuple of the columns that were selected. Everything else goes through SQLAlchemy's own `Connection.execute`, which
takes seven times as long for the same statement. What the driver raises, the database maps (`shared_commit`). Source:
docs/security.md check 38; docs/decisions/0055.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, ScalarSelect, Table, bindparam, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.expression import Executable

from edgefl_coordinator.store.tables import facts

_DIALECTS: Final[dict[str, Any]] = {
    "sqlite": sqlite.dialect(paramstyle="qmark"),
    "postgresql": postgresql.dialect(paramstyle="format"),  # type: ignore[no-untyped-call]
}
_INSERTS: Final[dict[str, Callable[[Table], Any]]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class _Form:
    """A statement as one database reads it."""

    def __init__(self, statement: Executable, database: str) -> None:
        compiled: Any = statement.compile(dialect=_DIALECTS[database])  # type: ignore[attr-defined]
        self.text: str = compiled.string
        self.names: tuple[str, ...] = tuple(compiled.positiontup or ())
        self.own: dict[str, Any] = {name: value for name, value in compiled.params.items() if value is not None}


class Statement:
    """A statement whose parameters have names."""

    def __init__(self, statement: Executable | Callable[[str], Executable]) -> None:
        """Take it, or what makes it for the database of a name; an insert takes all columns of its table."""
        self._statement = statement
        self._forms: dict[str, _Form] = {}

    def run(self, connection: Connection, **values: Any) -> Any:
        """Run it in the caller's transaction; returns the driver's cursor."""
        driver, text, given = self._called(connection, values)
        return driver.execute(text, given) if connection.dialect.name == "sqlite" else driver.ask(text, given)

    def send(self, connection: Connection, **values: Any) -> None:
        """Run it in the caller's transaction, where nobody asks what came of it: in PostgreSQL it may wait a moment.

        It is done before whatever the transaction asks next; where it fails, that fails, or the transaction.
        """
        driver, text, given = self._called(connection, values)
        (driver.execute if connection.dialect.name == "sqlite" else driver.later)(text, given)

    def run_each(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> None:
        """Run it in the caller's transaction once for each row of values, in the order of its table's columns."""
        form = self._forms.get(connection.dialect.name) or self._written(connection.dialect.name)
        driver: Any = connection.connection.driver_connection
        with closing(driver.cursor()) as cursor:
            cursor.executemany(form.text, rows)

    def _called(self, connection: Connection, values: dict[str, Any]) -> tuple[Any, str, list[Any]]:
        form = self._forms.get(connection.dialect.name) or self._written(connection.dialect.name)
        if form.own:
            values = {**form.own, **values}
        return connection.connection.driver_connection, form.text, [values[name] for name in form.names]

    def first(self, connection: Connection, **values: Any) -> tuple[Any, ...] | None:
        """Return the first row, or None."""
        found: tuple[Any, ...] | None = self.run(connection, **values).fetchone()
        return found

    def value(self, connection: Connection, **values: Any) -> Any:
        """Return the first column of the first row, or None."""
        found = self.run(connection, **values).fetchone()
        return None if found is None else found[0]

    def _written(self, database: str) -> _Form:
        statement = self._statement if isinstance(self._statement, Executable) else self._statement(database)
        self._forms[database] = form = _Form(statement, database)
        return form


def keep_first(table: Table) -> Statement:
    """Insert a row, unless one of its key is there; `rowcount` tells whether it was new."""
    return Statement(lambda database: _INSERTS[database](table).on_conflict_do_nothing())


def keep_last(table: Table) -> Statement:
    """Insert a row, in the place of one of its key."""

    def written(database: str) -> Executable:
        made, key = _INSERTS[database](table), list(table.primary_key.columns)
        others = {column.name: made.excluded[column.name] for column in table.columns if not column.primary_key}
        found: Executable = made.on_conflict_do_update(index_elements=key, set_=others)
        return found

    return Statement(written)


def fact_of(key: str | ColumnElement[str]) -> ScalarSelect[str]:
    """Return the question for a fact, as a part of another one."""
    return select(facts.c.value).where(facts.c.key == key).scalar_subquery()


FACT: Final = Statement(select(facts.c.value).where(facts.c.key == bindparam("key")))
KEEP_FACT: Final = keep_last(facts)
KEEP_FIRST_FACT: Final = keep_first(facts)

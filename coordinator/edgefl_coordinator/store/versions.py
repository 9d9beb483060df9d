"""A database's tables, brought to the version that this program uses; one path for SQLite and PostgreSQL.

Guarantees: an empty database gets the tables, one with older tables those that came later. Other tables, or those of a
newer version, are refused and left as they are. Source: docs/decisions/0056, 0069.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, inspect, text

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store.tables import LATER, VERSION, metadata

NOTED = "store_version"  # the fact that holds the version where a database has no other place for it
_HISTORY = "migrations"  # the table in which stores without a version kept theirs

ColumnForm = tuple[str, str, str, bool, int]  # table, column, type, whether it may be NULL, place in the primary key


def bring(connection: Connection, version: int) -> bool:
    """Bring the tables from a version to `VERSION`, within the caller's transaction; return whether there were none.

    The caller writes down the version. An `OperatorError` where there are other tables than that version's, or a newer
    version's; nothing was changed.
    """
    if version > VERSION:
        raise OperatorError("a newer version of edgefl-derm made the store; update edgefl-derm here")
    if version == VERSION:
        return False
    found = set(_found(connection))
    if found and found != set(_older(connection)):
        raise OperatorError(
            "the store was made with other tables, by an earlier version of edgefl-derm or another program: keep this "
            "folder, or this database, which that one can open; make a new coordinator elsewhere with "
            "`edgefl-coordinator init`, and invite its members again"
        )
    metadata.create_all(connection)
    for table in metadata.tables.values():
        for index in table.indexes:
            index.create(connection, checkfirst=True)
    return not found


def bring_file(connection: Connection) -> bool:
    """Do what `bring` does to a SQLite file, which holds its version."""
    version: int = connection.scalar(text("PRAGMA user_version"))
    new = bring(connection, version)
    if version != VERSION:
        connection.execute(text(f"PRAGMA user_version = {VERSION:d}"))  # takes no parameter
    return new


def _found(connection: Connection) -> Iterator[ColumnForm]:
    inspector = inspect(connection)
    keys = inspector.get_multi_pk_constraint()
    for key, columns in inspector.get_multi_columns().items():
        primary = keys[key]["constrained_columns"]
        for one in columns if key[1] != _HISTORY else ():
            place = primary.index(one["name"]) + 1 if one["name"] in primary else 0
            yield key[1], one["name"], str(one["type"]), one["nullable"] and not place, place


def _older(connection: Connection) -> Iterator[ColumnForm]:
    """Give what `_found` finds where the tables are those of every version before this one."""
    dialect: Any = connection.dialect
    for table in metadata.tables.values():
        primary = list(table.primary_key.columns)
        for column in table.columns if table not in LATER else ():
            place = primary.index(column) + 1 if column.primary_key else 0
            yield table.name, column.name, column.type.compile(dialect), bool(column.nullable), place

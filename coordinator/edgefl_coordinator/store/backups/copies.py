"""All rows of the store in another database: a SQLite file of a PostgreSQL database, and the other way. All blobs of a
folder in an S3-compatible store.

Guarantees: both databases have the same tables, so a copy holds each row, and the version, as it was. Rows pass in
batches. A PostgreSQL database is filled in one transaction. A database or a prefix that something lies in is refused
and left as it is. Source: docs/security.md check 67; docs/decisions/0069.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Connection, NullPool, Row, Table, create_engine, insert, select, text, tuple_
from sqlalchemy.exc import DBAPIError

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.payloads.payloads import MAX_PAYLOAD_BYTES
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import versions
from edgefl_coordinator.store.statements import Statement
from edgefl_coordinator.store.store import claimed_payloads, postgresql, s3_payloads
from edgefl_coordinator.store.tables import facts, metadata, uploads
from edgefl_protocol.durable import read_pieces
from edgefl_protocol.errors import StorageError

if TYPE_CHECKING:
    from edgefl_coordinator.store.postgresql_database import PostgresqlDatabase

_AT_ONCE: Final = 128  # rows; one holds at most a small blob
_PIECE: Final = 2**20  # bytes of a half-sent blob


def to_file(source: Connection, path: Path) -> None:
    """Make a SQLite file of what a connection sees, not flushed: who writes a backup from it flushes that.

    A `StorageError` where the disk is full; what was written so far stays.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with rows_of(path) as target:
        target.execute(text("PRAGMA synchronous=OFF"))
        target.execute(text("PRAGMA journal_mode=OFF"))
        versions.bring_file(target)
        _copy(source, target)
        target.commit()


@contextlib.contextmanager
def filled(url: str, path: Path) -> Iterator[None]:
    """Fill an empty PostgreSQL database from a SQLite file; empty it again where the body fails.

    Raises:
        OperatorError: the database holds something, or is set up in a way that the store cannot use.
        StorageError: it does not answer, or is full; nothing was kept.
    """
    with _vacant(url) as (database, target):
        with rows_of(path) as source:
            _copy(source, target)
        target.commit()
        try:
            yield
        except BaseException:
            with contextlib.suppress(*database.errors), target.begin():
                metadata.drop_all(target)
            raise


@contextlib.contextmanager
def sent(url: str, home: CoordinatorHome) -> Iterator[None]:
    """Move a folder's blobs below an empty prefix of an S3-compatible store; remove them there where the body fails.

    A blob that is half sent goes there as pieces, so that its sender goes on from there.

    Raises:
        OperatorError: something lies there, it is no such URL, or the extra is missing.
        StorageError: the store does not answer, refuses the credentials, or is full.
    """
    s3_payloads(url, b"").try_out()  # also where it is the one that the backup was made of
    place = claimed_payloads(home, url)
    try:
        with rows_of(home.database) as rows:
            half_sent = set(rows.scalars(select(uploads.c.blob)))
        files = {path.name: path for path in home.blobs.iterdir()}
        place.put_files({name: path for name, path in files.items() if name not in half_sent})
        for name in half_sent:  # a piece is an object, which says where it lies
            for number, piece in enumerate(read_pieces(files[name], MAX_PAYLOAD_BYTES, _PIECE)):
                place.put_piece(name, number * _PIECE, piece)
        for path in files.values():
            path.unlink()
        yield
    except BaseException:
        with contextlib.suppress(StorageError):
            place.clear()
        raise


def check_vacant(database: str, payloads: str) -> None:
    """Look whether `filled` could fill a database, and `sent` a prefix, and change nothing; raises as they do."""
    if database:
        with _vacant(database):
            pass
    if payloads:
        s3_payloads(payloads, b"").try_out()


@contextlib.contextmanager
def _vacant(url: str) -> "Iterator[tuple[PostgresqlDatabase, Connection]]":
    """Give an empty database, and a connection whose transaction makes the tables: undone unless the caller commits."""
    database = postgresql(url)
    with database.alone() as connection:
        if database.version(connection):
            raise OperatorError("the database holds a coordinator's store already: name an empty one")
        database.prepare(connection)
        yield database, connection


def _copy(source: Connection, target: Connection) -> None:
    for table in metadata.sorted_tables:  # what others refer to comes first
        adding = Statement(insert(table))
        for rows in _batches(source, table):
            adding.run_each(target, rows)


def _batches(source: Connection, table: Table) -> Iterator[Sequence[Row[Any]]]:
    """Give the rows by their keys; but for the version, which each database notes in its own way."""
    keys = tuple(table.primary_key.columns)
    some = select(table).order_by(*keys).limit(_AT_ONCE)
    if table is facts:
        some = some.where(facts.c.key != versions.NOTED)
    following = some
    while rows := source.execute(following).all():
        yield rows
        following = some.where(tuple_(*keys) > tuple_(*(getattr(rows[-1], key.name) for key in keys)))


@contextlib.contextmanager
def rows_of(path: Path) -> Iterator[Connection]:
    """Open a SQLite file; a `StorageError` where it cannot be read or written."""
    engine = create_engine(URL.create("sqlite", database=str(path)), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    except (DBAPIError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, sqlite3.Error):
            raise
        raise not_copied(cause) from error


def not_copied(error: sqlite3.Error) -> StorageError:
    """Say in one sentence why a file of the store was not copied."""
    code: Any = getattr(error, "sqlite_errorname", "")
    told = "the disk is full" if code == "SQLITE_FULL" else f"it cannot be read or written ({code or error})"
    return StorageError(f"the store was not copied: {told}", "storage")

"""The store: one SQLite file with one writer connection, and a folder of blobs.

Guarantees:
    Only one process has the store open (lock file), through one connection; every transaction is `BEGIN IMMEDIATE`,
    and what was committed survives a power cut (`durable.keep_commits` says how).
    The journal is WAL except where the linked SQLite has the WAL-reset defect (3.7.0 to 3.51.2 but for 3.44.6 and
    3.50.7): there it is DELETE. `journal_mode` says which.
    A blob is written and flushed before the transaction that names it, and deleted after the one that strikes it out.
    A small one lies in the file of the database: it is written in the transaction that names it, and one commit makes
    those of many requests durable.
    What a crash leaves over (temporary files, blobs that no row names) is swept when the store opens.
    A full disk is a `StorageError` with code `disk_full`; nothing already accepted is touched.
Source: docs/security.md, decision 7 and reliability; SQLite's "Write-Ahead Logging" page.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, create_engine, delete, event, insert, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from edgefl_coordinator.errors import IN_USE, OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import tables
from edgefl_coordinator.store.shared_commit import SharedCommits, storage_error
from edgefl_coordinator.store.statements import Statement
from edgefl_protocol import durable
from edgefl_protocol.errors import StorageError

MAX_STORED_BYTES = 2**31
_WAITING_LARGE = 8
SMALL_BYTES = 64 * 2**10  # a blob up to here is a row: a file costs four flushes, a row none of its own
CACHE = "cache_size=-32768"  # KiB: the rows of ten thousand members
_SMALL = "small-"  # what the name of such a blob begins with; a file's begins with hex digits
_KEEP_SMALL = Statement(insert(tables.small_blobs))
_DROP_SMALL = delete(tables.small_blobs).where(tables.small_blobs.c.name == bindparam("gone"))
_SMALL_DATA = Statement(select(tables.small_blobs.c.data).where(tables.small_blobs.c.name == bindparam("name")))
BLOB_COLUMNS = (  # that name blobs
    tables.replies.c.blob,
    tables.broadcasts.c.blob,
    tables.states.c.blob,
    tables.bundles.c.blob,
    tables.uploads.c.blob,
)


@dataclass(frozen=True)
class Blob:
    """A blob that lies durably in the blob folder."""

    name: str
    sha256: str
    size: int


def has_wal_reset_defect(version: tuple[int, int, int]) -> bool:
    """Tell whether a SQLite version may lose a WAL reset when several connections are used."""
    fixed_branches = (version[:2] == (3, 44) and version >= (3, 44, 6)) or (
        version[:2] == (3, 50) and version >= (3, 50, 7)
    )
    return (3, 7, 0) <= version < (3, 51, 3) and not fixed_branches


class Store:
    """The open store; close it at the end.

    Every method that touches a file raises StorageError where the disk is full or fails, or the blob is missing.
    """

    def __init__(self, home: CoordinatorHome, engine: Engine, lock: int, journal_mode: str) -> None:
        """Take over an open engine and lock; use `open_store`."""
        self.home = home
        self.journal_mode = journal_mode  # of SQLite
        self._engine = engine
        self._lock_descriptor = lock
        self._commits = SharedCommits(engine.connect())
        self.waiting_large = threading.BoundedSemaphore(_WAITING_LARGE)  # held by who has `large`, or waits for it
        self.large = threading.Lock()  # held by whoever has the payload of a blob in memory, so that two never are

    def close(self) -> None:
        """Close the file and release the lock."""
        self._commits.close()
        self._engine.dispose()
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    def transaction(self) -> contextlib.AbstractContextManager[Connection]:
        """Give the only connection in a transaction: committed at the end, rolled back on any error."""
        return self._commits.transaction()

    def look(self) -> contextlib.AbstractContextManager[Connection]:
        """Give the connection to read what a transaction of the caller's asks again; this waits for no commit."""
        return self._commits.look()

    def put_blob(self, data: bytes) -> Blob:
        """Write a blob durably; its name is new each time, so equal content never shares a file."""
        sha256 = hashlib.sha256(data).hexdigest()
        name = _fresh_name(sha256)
        durable.write_atomic(self.home.blobs / name, data, mode=0o600)
        return Blob(name, sha256, len(data))

    def put_small(self, connection: Connection, data: bytes) -> Blob:
        """Write a blob of at most `SMALL_BYTES` within the caller's transaction."""
        sha256 = hashlib.sha256(data).hexdigest()
        blob = Blob(_SMALL + _fresh_name(sha256), sha256, len(data))
        _KEEP_SMALL.run(connection, name=blob.name, data=data)
        return blob

    def adopt(self, path: Path) -> Blob:
        """Take a file that was flushed into the folder of blobs, without its bytes in memory; the file may stay.

        Its name is durable after `flush_folder`.
        """
        hasher, size = hashlib.sha256(), 0
        for piece in durable.read_pieces(path, MAX_STORED_BYTES):
            hasher.update(piece)
            size += len(piece)
        blob = Blob(_fresh_name(hasher.hexdigest()), hasher.hexdigest(), size)
        target = self.home.blobs / blob.name
        try:
            target.hardlink_to(path)
        except OSError:  # on another disk, or one that knows no links
            durable.write_pieces(target, durable.read_pieces(path, MAX_STORED_BYTES), mode=0o600)
        return blob

    def flush_folder(self) -> None:
        """Make the names of the blobs that were adopted durable."""
        durable.sync_folder(self.home.blobs)

    def file_of(self, name: str, spare: Path) -> Path:
        """Return the file of a blob; of a small one `spare`, into which it is written."""
        if not name.startswith(_SMALL):
            return self.home.blobs / name
        spare.write_bytes(self.get_blob(name))
        return spare

    def new_file(self) -> str:
        """Make an empty file for a blob that comes in pieces, and return its name."""
        name = _fresh_name(secrets.token_hex(16))
        durable.create_empty(self.home.blobs / name)
        return name

    def write_at(self, name: str, offset: int, data: bytes) -> None:
        """Write a piece durably."""
        durable.write_at(self.home.blobs / name, offset, data)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Give a blob in pieces."""
        return durable.read_pieces(self.home.blobs / name, MAX_STORED_BYTES)

    def reading(self, name: str) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]:
        """Open a blob, to read it by offset and length."""
        return durable.read_anywhere(self.home.blobs / name, MAX_STORED_BYTES)

    def blob_bytes(self, name: str) -> int:
        """Return the length of a blob."""
        return durable.file_bytes(self.home.blobs / name)

    def free_bytes(self) -> int:
        """Return the bytes free on the disk of the blobs."""
        return shutil.disk_usage(self.home.blobs).free

    def get_blob(self, name: str, max_bytes: int = MAX_STORED_BYTES) -> bytes:
        """Read a blob of at most `max_bytes`; not within a transaction."""
        if name.startswith(_SMALL):
            with self.transaction() as connection:
                data: bytes | None = _SMALL_DATA.value(connection, name=name)
            if data is None or len(data) > max_bytes:
                raise StorageError(f"the blob {name} is missing, or longer than {max_bytes} bytes", "missing")
            return data
        return durable.read_bounded(self.home.blobs / name, max_bytes)

    def blob_names(self) -> set[str]:
        """Return the names of all blobs that are there, files and rows."""
        with self.transaction() as connection:
            small = connection.scalars(select(tables.small_blobs.c.name)).all()
        return {*small, *(path.name for path in self.home.blobs.iterdir())}

    def drop_blobs(self, names: Iterable[str]) -> None:
        """Remove blobs that no row names: their transaction was refused, or has struck them out and is committed.

        A file that cannot be removed now is an orphan for the next sweep.
        """
        small = []
        for name in names:
            if name.startswith(_SMALL):
                small.append({"gone": name})
                continue
            with contextlib.suppress(OSError):
                (self.home.blobs / name).unlink(missing_ok=True)
        if small:
            with contextlib.suppress(StorageError), self.transaction() as connection:
                connection.execute(_DROP_SMALL, small)

    def sweep(self) -> int:
        """Remove temporary files, blobs without a row and old job folders; return how many."""
        with self.transaction() as connection:
            named = {name for column in BLOB_COLUMNS for name in connection.scalars(select(column))}
        orphans = self.blob_names() - named  # a row without a blob names None
        self.drop_blobs(orphans)
        removed = len(orphans)
        for path in self.home.jobs.iterdir():
            shutil.rmtree(path)
            removed += 1
        for path in self.home.root.glob(".*.tmp"):
            path.unlink()
            removed += 1
        return removed


def open_store(home: CoordinatorHome, wait_s: float = 0.0) -> Store:
    """Open the store, make its tables where there are none, and sweep what a crash left.

    Args:
        wait_s: how long to wait for another process that has it open.

    Raises:
        OperatorError: another process has it open, or another version of this program made it with other tables.
        StorageError: it cannot be read or written.
    """
    lock = _take_lock(home, wait_s)
    try:
        for folder in (home.blobs, home.jobs):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not home.database.exists():
            durable.write_atomic(home.database, b"", mode=0o600)
        elif home.database.stat().st_size == 0 and any(home.blobs.iterdir()):
            raise StorageError(
                f"{home.database} is empty although there are blobs: restore it from the backup", "damaged"
            )
        mode = "delete" if has_wal_reset_defect(sqlite3.sqlite_version_info) else "wal"
        store = Store(home, _engine(home, mode), lock, mode)
    except DBAPIError as error:
        os.close(lock)
        raise storage_error(error) from error
    except BaseException:
        os.close(lock)
        raise
    try:
        with store.transaction() as connection:
            tables.prepare(connection)
        store.sweep()
    except BaseException:
        store.close()
        raise
    return store


def _fresh_name(prefix: str) -> str:
    return f"{prefix[:32]}-{secrets.token_hex(8)}"


def _take_lock(home: CoordinatorHome, wait_s: float) -> int:
    until = time.monotonic() + wait_s
    descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            told = f"another process uses {home.root}; stop it, or wait until it is done"
            raise OperatorError(told, IN_USE) from None
        return descriptor


def _engine(home: CoordinatorHome, mode: str) -> Engine:
    engine = create_engine(
        f"sqlite:///{home.database}", poolclass=StaticPool, connect_args={"check_same_thread": False, "timeout": 5.0}
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, the driver must not
        for pragma in (f"journal_mode={mode}", durable.SYNCHRONOUS, "foreign_keys=ON", "trusted_schema=OFF", CACHE):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine

"""The store's database as one SQLite file with one connection.

Guarantees:
    Only one process has it open (lock file); every transaction is `BEGIN IMMEDIATE`, and what was committed survives a
    power cut (`durable.keep_commits` says how).
    The journal is WAL except where the linked SQLite has the WAL-reset defect (3.7.0 to 3.51.2 but for 3.44.6 and
    3.50.7): there it is DELETE.
Source: docs/security.md, decision 7 and reliability; SQLite's "Write-Ahead Logging" page.
"""

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from edgefl_coordinator.errors import IN_USE, OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import versions
from edgefl_protocol import durable
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import LockFile

CACHE = "cache_size=-8192"  # KiB: what many uploads in one commit change; more would fill with replies, read once


def has_wal_reset_defect(version: tuple[int, int, int]) -> bool:
    """Tell whether a SQLite version may lose a WAL reset when several connections are used."""
    fixed_branches = (version[:2] == (3, 44) and version >= (3, 44, 6)) or (
        version[:2] == (3, 50) and version >= (3, 50, 7)
    )
    return (3, 7, 0) <= version < (3, 51, 3) and not fixed_branches


class SqliteFile:
    """A `shared_commit.Database`."""

    shared = False
    errors = (DBAPIError, sqlite3.Error)  # of SQLAlchemy, and of the driver where `statements` calls it

    def __init__(self, home: CoordinatorHome, wait_s: float = 0.0) -> None:
        """Open the file of a home, waiting `wait_s` for another process.

        Raises:
            OperatorError: another process has it open.
            StorageError: it is empty although there are blobs, or this user cannot write the folder.
        """
        busy = OperatorError(f"another process uses {home.root}; stop it, or wait until it is done", IN_USE)
        self._folder = home.root
        try:
            self._lock = LockFile(home.lock, busy, wait_s=wait_s)
        except PermissionError as error:
            raise _unwritable(home.root) from error
        try:
            if not home.database.exists():
                durable.write_atomic(home.database, b"", mode=0o600)
            elif home.database.stat().st_size == 0 and any(home.blobs.iterdir()):
                raise StorageError(
                    f"{home.database} is empty although there are blobs: restore it from the backup", "damaged"
                )
        except BaseException:
            self._lock.close()
            raise
        self.name = "delete" if has_wal_reset_defect(sqlite3.sqlite_version_info) else "wal"
        self.described = f"store in {self.name} journal mode, synchronous EXTRA"
        self.engine = create_engine(
            URL.create("sqlite", database=str(home.database)),  # a text would be parsed: a path may hold ? and %
            poolclass=StaticPool,
            connect_args={"check_same_thread": False, "timeout": 5.0},
        )
        event.listen(self.engine, "connect", self._connected)
        event.listen(self.engine, "begin", _begin)

    def _connected(self, connection: Any, _: object) -> None:
        connection.isolation_level = None  # we begin transactions ourselves, the driver must not
        modes = (f"journal_mode={self.name}", durable.SYNCHRONOUS, "foreign_keys=ON", "trusted_schema=OFF", CACHE)
        for pragma in modes:
            connection.execute(f"PRAGMA {pragma}").close()

    def writer(self, before: Connection | None = None) -> Connection:
        """Return the only connection, in no transaction."""
        if before is None:
            return self.engine.connect()
        driver: Any = before.connection.driver_connection
        if driver.in_transaction:  # left over from a group whose rollback failed
            driver.rollback()
        return before

    def in_transaction(self, driver: Any) -> bool:
        """Tell whether the transaction is open: SQLite may end it by itself at any statement, a reading one too."""
        return bool(driver.in_transaction)

    def mark(self, driver: Any) -> None:
        """Begin what stands or falls alone."""
        driver.execute("SAVEPOINT one")

    def keep(self, driver: Any) -> None:
        """End it."""
        driver.execute("RELEASE one")

    def undo(self, driver: Any) -> None:
        """End it as if it had not begun."""
        driver.execute("ROLLBACK TO one")
        driver.execute("RELEASE one")

    def looking(self) -> None:
        """Say that there is only the writer's connection."""

    def still(self) -> None:
        """Say that the file is copied instead."""

    def lead(self, wait_s: float = 0.0) -> bool:
        """Lead: nobody else has the file."""
        return True

    def prepare(self, connection: Connection) -> bool:
        """Make the tables, as `Database` says."""
        return versions.bring_file(connection)

    def storage_error(self, error: BaseException) -> StorageError:
        """Map the first failure: on a full disk SQLite ends the transaction itself, and then the savepoint is gone."""
        chain: list[BaseException] = [error]
        while chain[-1].__context__ is not None:
            chain.append(chain[-1].__context__)
        first = next(found for found in reversed(chain) if isinstance(found, sqlite3.Error))
        name = getattr(first, "sqlite_errorname", "")
        if name == "SQLITE_FULL":
            return StorageError("the store is full: free space on its disk, then send again", "disk_full")
        if isinstance(first, sqlite3.IntegrityError):
            return StorageError(f"the store refused a row ({name}): this is a defect, please report it", "integrity")
        if name.startswith("SQLITE_READONLY"):
            return _unwritable(self._folder)
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return StorageError("the store is damaged: restore store.sqlite from the backup", "damaged")
        return StorageError(f"the store cannot be read or written ({name or type(first).__name__})", "storage")

    def close(self) -> None:
        """Close the file and release the lock."""
        self.engine.dispose()
        self._lock.close()


def _unwritable(folder: Path) -> StorageError:
    told = "allow it to write the folder and the files in it, and see that their disk is not read-only"
    return StorageError(f"this user cannot write {folder}: {told}", "permissions")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")

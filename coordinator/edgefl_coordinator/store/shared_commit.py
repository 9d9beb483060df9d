"""Transactions of several threads over one connection, which share a commit where they come at once.

Guarantees:
    One thread at a time uses the connection; its work stands or falls alone (a savepoint). What it read may be
    another's work that is not committed yet, so nobody leaves before the commit that holds both: then all of the group
    go on, or all get the `StorageError` of the commit and nobody is told that it was kept. So is it where SQLite ends
    the transaction itself: on a full disk, without memory, at a read that fails.
    Whoever leaves while nobody waits for the connection commits for the group; so does the last one that a group may
    have. A group is as large as the crowd, and one that comes alone waits for nobody.
Source: docs/security.md, reliability; docs/decisions/0055; DeWitt et al., "Implementation Techniques for Main Memory
Database Systems" (group commit), SIGMOD 1984.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, RootTransaction
from sqlalchemy.exc import DBAPIError

from edgefl_protocol.errors import StorageError

DATABASE_ERRORS = (DBAPIError, sqlite3.Error)  # of SQLAlchemy, and of the driver where `statements` calls it
MOST = 128  # transactions in one commit: the first of them waits for the work of the others


class _Group:
    """Transactions that share a commit."""

    def __init__(self, root: RootTransaction) -> None:
        self.root = root
        self.size = 0
        self.ended = threading.Event()
        self.error: StorageError | None = None


class SharedCommits:
    """Hands out the one connection, in transactions."""

    def __init__(self, connection: Connection) -> None:
        """Take over a connection that begins no transaction by itself."""
        self._connection = connection
        self._turn = threading.Lock()  # held by whoever uses the connection
        self._counting = threading.Lock()
        self._waiting = 0
        self._group: _Group | None = None  # whose transaction is open

    def close(self) -> None:
        """Close the connection, after the transaction that uses it."""
        with self._turn:
            if self._group is not None:
                self._commit(self._group)
            self._connection.close()

    def transaction(self) -> AbstractContextManager[Connection]:
        """Give the connection; kept together with what others do at the same time, undone alone on any error.

        Returns, or passes the error on, once what was done and read here is durable.

        Raises:
            StorageError: nobody in the group may count on anything. Where a flush after the commit failed, it may have
                been kept all the same (`may_be_kept`).
        """
        return self._transaction(waits=True)

    def look(self) -> AbstractContextManager[Connection]:
        """Give the connection to read what a transaction of the caller's asks again: this one waits for no commit.

        What was read may never be kept, so no signed answer rests on it alone. A `StorageError` as of `transaction`.
        """
        return self._transaction(waits=False)

    @contextmanager
    def _transaction(self, *, waits: bool) -> Iterator[Connection]:
        group = self._begin(marks=waits)
        try:
            yield self._connection
            if waits:
                self._run("RELEASE one")
            self._check_open(group)
        except BaseException as error:
            self._undo(group, error, marked=waits)
            self._leave(group, waits=True)
            if isinstance(error, DATABASE_ERRORS):
                raise storage_error(error) from error
            raise
        self._leave(group, waits=waits)

    @property
    def _driver(self) -> sqlite3.Connection:
        driver: Any = self._connection.connection.driver_connection
        found: sqlite3.Connection = driver
        return found

    def _run(self, statement: str) -> None:
        self._driver.execute(statement)

    def _check_open(self, group: _Group) -> None:
        """Fail a group whose transaction SQLite has ended by itself, as it may at any statement, a reading one too."""
        if self._group is group and not self._driver.in_transaction:
            raise StorageError("the store ended a transaction by itself: look at its disk and memory", "storage")

    def _begin(self, *, marks: bool) -> _Group:
        """Wait for the connection and mark where the caller's work begins, unless it only reads."""
        with self._counting:
            self._waiting += 1
        try:
            self._turn.acquire()
        finally:
            with self._counting:
                self._waiting -= 1
        try:
            if self._group is None:
                if self._driver.in_transaction:  # left over from a group whose rollback failed
                    self._driver.rollback()
                self._group = _Group(self._connection.begin())
            self._group.size += 1
            if marks:
                self._run("SAVEPOINT one")
            return self._group
        except BaseException as error:
            if self._group is not None:
                self._fail(self._group, error)
            self._turn.release()
            if isinstance(error, DATABASE_ERRORS):
                raise storage_error(error) from error
            raise

    def _undo(self, group: _Group, error: BaseException, *, marked: bool) -> None:
        """Undo one's own work; where SQLite has ended the whole transaction, everybody's is gone."""
        try:
            if marked:
                self._run("ROLLBACK TO one")
                self._run("RELEASE one")
            self._check_open(group)
        except BaseException as second:  # noqa: BLE001 - no memory, too: the others wait for the end of this group
            self._fail(group, error if isinstance(error, DATABASE_ERRORS) else second)

    def _leave(self, group: _Group, *, waits: bool) -> None:
        """Commit for all, or leave it to one who waits for the connection; return once it is done, or at once."""
        try:
            if self._group is group and (self._waiting == 0 or group.size >= MOST):
                self._commit(group)
        finally:
            self._turn.release()
        if not waits:
            return
        group.ended.wait()
        if group.error is not None:
            raise StorageError(str(group.error), group.error.code) from group.error

    def _commit(self, group: _Group) -> None:
        try:
            self._check_open(group)
            group.root.commit()
        except BaseException as error:
            self._fail(group, error)
            if not isinstance(error, (*DATABASE_ERRORS, StorageError)):
                raise
        else:
            self._group = None
            group.ended.set()

    def _fail(self, group: _Group, error: BaseException) -> None:
        """Tell everybody in a group that it failed, and end its transaction."""
        if isinstance(error, DATABASE_ERRORS):
            group.error = storage_error(error)
        elif isinstance(error, StorageError):
            group.error = error
        else:
            group.error = StorageError("the store could not keep what came together with a failure", "storage")
        self._group = None
        group.ended.set()  # before what may fail as well; nobody gets the connection before this thread gives it up
        with suppress(Exception):
            group.root.close()
        with suppress(Exception):
            self._connection.connection.rollback()  # whatever SQLAlchemy thinks of the transaction that failed


def may_be_kept(error: StorageError) -> bool:
    """Tell whether the work of a failed transaction may lie on the disk: of a full one SQLite has undone it for sure.

    Whoever wrote files for that work leaves them where they are; the sweep at the next start removes what no row names.
    """
    return error.code != "disk_full"


def storage_error(error: DBAPIError | sqlite3.Error) -> StorageError:
    """Map the first failure: on a full disk SQLite ends the transaction itself, and then the savepoint is gone too."""
    chain: list[BaseException] = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    first = next(found for found in reversed(chain) if isinstance(found, sqlite3.Error))
    name = getattr(first, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return StorageError("the store is full: free space on its disk, then send again", "disk_full")
    if isinstance(first, sqlite3.IntegrityError):
        return StorageError(f"the store refused a row ({name}): this is a defect, please report it", "integrity")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StorageError("the store is damaged: restore store.sqlite from the backup", "damaged")
    return StorageError(f"the store cannot be read or written ({name or type(first).__name__})", "storage")

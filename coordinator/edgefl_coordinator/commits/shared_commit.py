"""Transactions of several threads over one connection, which share a commit where they come at once.

Guarantees:
    One thread at a time uses the connection; its work stands or falls alone (a savepoint). What it read may be
    another's work that is not committed yet, so nobody leaves before the commit that holds both: then all of the group
    go on, or all get the `StorageError` of the commit and nobody is told that it was kept. So is it where the database
    ends the transaction itself: SQLite on a full disk, without memory, at a read that fails; PostgreSQL when it stops.
    A connection that broke between two groups is replaced before anybody notices.
    Whoever leaves while nobody waits for the connection commits for the group; so does the last one that a group may
    have. Work of a `crowd` leaves that to the crowd. A group is as large as there are who come at once, and one that
    comes alone waits for nobody.
Source: docs/security.md, reliability; docs/decisions/0055; DeWitt et al., "Implementation Techniques for Main Memory
Database Systems" (group commit), SIGMOD 1984.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection, Engine, RootTransaction

from edgefl_coordinator.commits import crowd
from edgefl_protocol.errors import StorageError

MOST = 128  # transactions in one commit: the first of them waits for the work of the others
MET: Final = "met"  # code of the StorageError where a transaction met another one: undone for sure, to be tried again
_TRIES: Final = 25  # of a transaction that meets others
_UNDONE: Final = frozenset({"disk_full", MET})

Value = TypeVar("Value")


class Database(Protocol):
    """A database that holds the store's tables.

    One transaction after another changes it, whichever thread or process it is of; what is committed is durable.
    """

    name: str  # for `status`
    described: str  # for the log
    shared: bool  # whether several processes may have it open at once
    engine: Engine

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Errors that SQLAlchemy or the driver raise."""

    def writer(self, before: Connection | None = None) -> Connection:
        """Return the connection through which all is changed: `before`, or another in the place of one that broke."""

    def in_transaction(self, driver: Any) -> bool:
        """Tell whether the driver's connection is in a transaction that may go on or be undone."""

    def mark(self, driver: Any) -> None:
        """Begin, within a transaction, what stands or falls alone (a savepoint)."""

    def keep(self, driver: Any) -> None:
        """End it, with all of its statements done; an error where one of them failed."""

    def undo(self, driver: Any) -> None:
        """End it as if it had not begun."""

    def looking(self) -> AbstractContextManager[Connection] | None:
        """Give a connection that reads what is committed, beside the writer's; None where there is only that one."""

    def still(self) -> AbstractContextManager[Connection] | None:
        """Give a connection that sees what is committed now, and nothing later; None where a file is copied instead."""

    def lead(self, wait_s: float = 0.0) -> bool:
        """Tell whether this process does what one alone may do, from now until it ends or loses the database."""

    def prepare(self, connection: Connection) -> bool:
        """Make the tables where there are none, and bring older ones to this version; return whether there were none.

        An `OperatorError` where there are other tables, or those of a newer version; nothing was changed.
        """

    def storage_error(self, error: BaseException) -> StorageError:
        """Say in one sentence what one of `errors` means."""

    def close(self) -> None:
        """Let go of it."""


class _Group:
    """Transactions that share a commit."""

    def __init__(self, root: RootTransaction) -> None:
        self.root = root
        self.size = 0
        self.over = False
        self.error: StorageError | None = None
        self._waiting: list[threading.Lock] = []

    def joined(self) -> threading.Lock:
        """Return what can be acquired once the group is over; ask while nobody else has the connection.

        Each has a lock of its own: those who wait for one event wake up in turn, for each has to get its lock again.
        """
        mine = threading.Lock()
        if not self.over:
            mine.acquire()
            self._waiting.append(mine)
        return mine

    def end(self) -> None:
        """Let everybody go on."""
        self.over = True
        for one in self._waiting:
            one.release()
        self._waiting = []


class SharedCommits:
    """Hands out the one connection of this process, in transactions."""

    def __init__(self, database: Database) -> None:
        """Connect to a database."""
        self._database = database
        self._connection = database.writer()
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
            StorageError: nobody in the group may count on anything. Where a flush after the commit failed, or the
                connection broke in it, it may have been kept all the same (`may_be_kept`).
        """
        return self._transaction(waits=True)

    def commit(self) -> None:
        """Commit what is open; those whose work it is get to know where that fails."""
        if self._group is None:
            return
        with self._turn:
            if self._group is not None:
                self._commit(self._group)

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
                self._database.keep(self._driver)
            self._check_open(group)
        except BaseException as error:
            self._undo(group, error, marked=waits)
            self._leave(group, waits=True)
            if isinstance(error, self._database.errors):
                raise self._database.storage_error(error) from error
            raise
        self._leave(group, waits=waits)

    @property
    def _driver(self) -> Any:
        return self._connection.connection.driver_connection

    def _check_open(self, group: _Group) -> None:
        """Fail a group whose transaction the database has ended by itself."""
        if self._group is group and not self._database.in_transaction(self._driver):
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
                self._group = _Group(self._opened())
            self._group.size += 1
            if marks:
                self._database.mark(self._driver)
            return self._group
        except BaseException as error:
            if self._group is not None:
                self._fail(self._group, error)
            self._turn.release()
            if isinstance(error, self._database.errors):
                raise self._database.storage_error(error) from error
            raise

    def _opened(self) -> RootTransaction:
        """Begin a transaction, over another connection where the one before has broken."""
        self._connection = self._database.writer(self._connection)
        try:
            return self._connection.begin()
        except self._database.errors:
            renewed = self._database.writer(self._connection)
            if renewed is self._connection:
                raise
            self._connection = renewed
            return renewed.begin()

    def _undo(self, group: _Group, error: BaseException, *, marked: bool) -> None:
        """Undo one's own work; where SQLite has ended the whole transaction, everybody's is gone."""
        try:
            if marked:
                self._database.undo(self._driver)
            self._check_open(group)
        except BaseException as second:  # noqa: BLE001 - no memory, too: the others wait for the end of this group
            self._fail(group, error if isinstance(error, self._database.errors) else second)

    def _leave(self, group: _Group, *, waits: bool) -> None:
        """Commit for all, or leave it to one who waits for the connection; return once it is done, or at once."""
        alone = self._waiting == 0 and not crowd.in_crowd()
        try:
            if self._group is group and (alone or group.size >= MOST):
                self._commit(group)
            ended = group.joined()
        finally:
            self._turn.release()
        if not waits:
            return
        if not group.over:
            crowd.wait_for_commit()
        ended.acquire()
        if group.error is not None:
            raise StorageError(str(group.error), group.error.code) from group.error

    def _commit(self, group: _Group) -> None:
        try:
            self._check_open(group)
            group.root.commit()
        except BaseException as error:
            self._fail(group, error)
            if not isinstance(error, (*self._database.errors, StorageError)):
                raise
        else:
            self._group = None
            group.end()

    def _fail(self, group: _Group, error: BaseException) -> None:
        """Tell everybody in a group that it failed, and end its transaction."""
        if isinstance(error, self._database.errors):
            group.error = self._database.storage_error(error)
        elif isinstance(error, StorageError):
            group.error = error
        else:
            group.error = StorageError("the store could not keep what came together with a failure", "storage")
        self._group = None
        group.end()  # before what may fail as well; nobody gets the connection before this thread gives it up
        with suppress(Exception):
            group.root.close()
        with suppress(Exception):
            self._connection.connection.rollback()  # whatever SQLAlchemy thinks of the transaction that failed


def done_again(work: Callable[[], Value]) -> Value:
    """Do what is one transaction, again where the database undid it because it met another one."""
    for _ in range(_TRIES - 1):
        try:
            return work()
        except StorageError as error:
            if error.code != MET:
                raise
    return work()


def may_be_kept(error: StorageError) -> bool:
    """Tell whether the work of a failed transaction may lie on the disk: some the database has undone for sure.

    Whoever wrote files for that work leaves them where they are; a later sweep removes what no row names.
    """
    return error.code not in _UNDONE

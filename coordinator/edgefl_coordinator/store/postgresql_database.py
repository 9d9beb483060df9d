"""The store's database in PostgreSQL, which several processes of one coordinator share.

Guarantees:
    One transaction after another changes it: each begins with a lock of the whole store, so what a process read is
    true until it commits, as in the one connection of SQLite. The transactions of a process share a commit
    (`shared_commit`), and a commit is on the disk before anybody is answered (`synchronous_commit=on`).
    One process leads: it holds a lock that ends with its connection, however that ends.
    A connection that broke is replaced; what it was about to do fails as a whole with one sentence.
    A session that stands still in a transaction is ended by the server, so that the others go on.
    A statement whose outcome nobody asks waits for the next one, and travels with it: the answer to each takes as long
    as it takes to wake two processes, while everybody waits for the lock.
Source: PostgreSQL, "Advisory Locks", "Asynchronous Commit", "Transaction Isolation", "Pipeline Mode";
docs/decisions/0058.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import conninfo
from psycopg.pq import Conninfo, TransactionStatus
from sqlalchemy import Connection, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as NoneFree
from sqlalchemy.pool import QueuePool

from edgefl_coordinator.commits.shared_commit import MET
from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.store import versions
from edgefl_coordinator.store.statements import FACT, KEEP_FACT
from edgefl_coordinator.store.tables import VERSION
from edgefl_protocol.errors import StorageError

_WRITE: Final = "BEGIN; SELECT pg_advisory_xact_lock(1162233421, hashtext(current_schema())); SAVEPOINT one"
_LEAD: Final = "SELECT pg_try_advisory_lock(1162233422, hashtext(current_schema()))"
_GIVE_BACK: Final = "SELECT pg_advisory_unlock(1162233422, hashtext(current_schema()))"
_STILL: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT 1"  # the first question says of when
_LOOKING: Final = 8  # connections that look up senders
_PAUSE_S: Final = 0.1
_LOCAL: Final = ("", "localhost", "127.0.0.1", "::1")
_MET: Final = ("40001", "40P01")  # serialization_failure, deadlock_detected
_REFUSED: Final = ("42501", "3F000")  # insufficient_privilege, invalid_schema_name
_AWAY: Final = ("", "08", "28", "3D", "57")  # no answer, connection, authorization, no such database, shutdown
_SESSION: Final = {
    "application_name": "edgefl-coordinator",
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "client_encoding": "utf8",
}
_OPTIONS: Final = (
    "-c synchronous_commit=on -c default_transaction_isolation=read\\ committed -c lock_timeout=30s "
    "-c idle_in_transaction_session_timeout=60s"
)


class Session(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose statements may wait for one another."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._waiting: list[tuple[str, list[Any]]] = []
        self.begun = False  # whether a savepoint is there that nobody has used

    def later(self, statement: str, values: list[Any]) -> None:
        """Run a statement before the next one, or when its transaction is kept, and then fail where it fails."""
        self._waiting.append((statement, values))

    def ask(self, statement: str, values: list[Any]) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run a statement now, after those that wait, in one round trip."""
        if not self._waiting:
            return self.execute(statement, values)
        with self.pipeline():
            self._send()
            return self.execute(statement, values)

    def settle(self) -> None:
        """Run the statements that wait."""
        if self._waiting:
            with self.pipeline():
                self._send()

    def forget(self) -> None:
        """Run none of them: what they belong to is undone."""
        self._waiting.clear()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self.execute(*one)


class PostgresqlDatabase:
    """A `shared_commit.Database`."""

    shared = True
    errors = (DBAPIError, InvalidRequestError, NoneFree, psycopg.Error)
    name = "postgresql"

    def __init__(self, url: str) -> None:
        """Name a database; nothing connects yet.

        An `OperatorError` where the URL is none.
        """
        given = session(url)
        self.engine = create_engine(
            "postgresql+psycopg://",
            creator=lambda: Session.connect(**given),
            poolclass=QueuePool,
            pool_size=_LOOKING,
            max_overflow=2,  # the writer and the leader
        )
        self._looking = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._leader: Connection | None = None
        self._asking = threading.Lock()
        self.described = "store in PostgreSQL, synchronous_commit on"
        event.listen(self.engine, "begin", _begin)
        event.listen(self.engine, "before_cursor_execute", _settle)

    def writer(self, before: Connection | None = None) -> Connection:
        """Return a connection in no transaction: `before`, or a new one where that has broken."""
        if before is not None:
            with contextlib.suppress(*self.errors):
                if not before.invalidated:
                    driver: Any = before.connection.driver_connection
                    if driver.info.transaction_status != TransactionStatus.IDLE:
                        driver.rollback()
                    if not driver.closed:
                        return before
            _give_up(before)
        return self.engine.connect()

    def in_transaction(self, driver: Any) -> bool:
        """Tell whether the server keeps the transaction, also where a statement of it failed."""
        return driver.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def mark(self, driver: Session) -> None:
        """Begin what stands or falls alone; the first of a transaction has begun with it."""
        if not driver.begun:
            driver.execute("RELEASE one; SAVEPOINT one", prepare=False)
        driver.begun = False

    def keep(self, driver: Session) -> None:
        """Do what waits; the savepoint ends with the next one, or with the transaction."""
        driver.settle()
        if driver.info.transaction_status == TransactionStatus.INERROR:
            driver.execute("RELEASE one")  # raises; a commit would undo everything and say nothing

    def undo(self, driver: Session) -> None:
        """End it as if it had not begun."""
        driver.forget()
        driver.execute("ROLLBACK TO one")

    @contextlib.contextmanager
    def looking(self) -> Iterator[Connection]:
        """Give a connection of the pool; each statement sees what is committed."""
        try:
            with self._looking.connect() as connection:
                try:
                    yield connection
                except psycopg.Error:
                    with contextlib.suppress(*self.errors):  # tells the pool where all its connections have broken
                        connection.exec_driver_sql("SELECT 1")
                    raise
        except self.errors as error:
            raise self.storage_error(error) from error

    @contextlib.contextmanager
    def still(self) -> Iterator[Connection]:
        """Give a connection of the pool that sees what is committed now, and nothing that comes later."""
        with self.looking() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute(_STILL, prepare=False)
            try:
                yield connection
            finally:
                with contextlib.suppress(*self.errors):
                    driver.execute("ROLLBACK")

    @contextlib.contextmanager
    def alone(self) -> Iterator[Connection]:
        """Give the writer's connection, in a transaction that is undone unless the caller commits it; then close all.

        A `StorageError` where the database does not answer.
        """
        try:
            with self.engine.connect() as connection:
                connection.begin()
                yield connection
        except self.errors as error:
            raise self.storage_error(error) from error
        finally:
            self.close()

    def lead(self, wait_s: float = 0.0) -> bool:
        """Take the lock of who leads, or see whether it is still held; False where another process has it."""
        until = time.monotonic() + wait_s
        with self._asking:
            while not self._has_lead():
                if time.monotonic() > until:
                    return False
                time.sleep(_PAUSE_S)
        return True

    def _has_lead(self) -> bool:
        if self._leader is not None:
            try:
                self._leader.exec_driver_sql("SELECT 1")
            except self.errors:
                _give_up(self._leader)
                self._leader = None
            else:
                return True
        try:
            asking = self._looking.connect()
            if asking.exec_driver_sql(_LEAD).scalar():
                self._leader = asking
            else:
                asking.close()
        except self.errors as error:
            raise self.storage_error(error) from error
        return self._leader is not None

    def prepare(self, connection: Connection) -> bool:
        """Make the tables, as `Database` says.

        An `OperatorError` where the server is set up to lose what it acknowledged, or to change texts, and where older
        tables are another process's meanwhile.
        """
        self.check_server(connection)
        version = self.version(connection)
        if 0 < version < VERSION and not self.lead():
            raise OperatorError("an earlier version of edgefl-derm uses the store: stop every serve of it first")
        new = versions.bring(connection, version)
        if version != VERSION:
            KEEP_FACT.run(connection, key=versions.NOTED, value=str(VERSION))
        return new

    def version(self, connection: Connection) -> int:
        """Return the version of the tables, 0 where there are none; an `OperatorError` where there are others."""
        found = inspect(connection).get_table_names()
        noted = FACT.value(connection, key=versions.NOTED) if "facts" in found else None
        if found and (noted is None or not noted.isdigit()):
            raise OperatorError("the database holds tables of something else; give the coordinator an empty one")
        return int(noted or 0)

    def check_server(self, connection: Connection) -> None:
        """Refuse, by an `OperatorError`, a server that is set up to lose what it acknowledged, or to change texts."""
        number = connection.scalar(text("SHOW server_version"))
        self.described = f"store in PostgreSQL {number}, synchronous_commit on"
        if connection.scalar(text("SHOW server_encoding")) != "UTF8":
            raise OperatorError("the database has another encoding than UTF8: make one with ENCODING 'UTF8'")
        if connection.scalar(text("SHOW fsync")) != "on":
            raise OperatorError("the database runs with fsync = off and may lose what it acknowledged: turn it on")

    def storage_error(self, error: BaseException) -> StorageError:
        """Map what the driver raised, by its SQLSTATE."""
        cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        state = getattr(cause, "sqlstate", None) or ""
        name = f"{type(cause).__name__}{f', {state}' if state else ''}"
        if state == "53100":
            return StorageError("the store is full: free space on its disk, then send again", "disk_full")
        if state in _REFUSED:
            told = "the user may not make or change tables there: make the database with createdb --owner USER"
            return StorageError(f"{told} ({name})", "storage")
        if state in _MET:
            return StorageError(f"the store undid a transaction that met another one ({name})", MET)
        if state.startswith("23"):
            return StorageError(f"the store refused a row ({name}): this is a defect, please report it", "integrity")
        if state[:2] in _AWAY:
            told = (str(cause).splitlines() or [name])[0][:200]
            return StorageError(f"the store's database does not answer: {told}", "storage")
        return StorageError(f"the store cannot be read or written ({name})", "storage")

    def close(self) -> None:
        """Let go of all connections, and of the lead: whoever asks for it next has it."""
        with self._asking:
            if self._leader is not None:
                with contextlib.suppress(*self.errors):  # else it is free only once the server noticed the end
                    self._leader.exec_driver_sql(_GIVE_BACK)
                _give_up(self._leader)
                self._leader = None
        self.engine.dispose()


def session(url: str) -> dict[str, Any]:
    """Return what the driver is given for a URL: TLS with a checked name to other machines, deadlines, durability.

    An `OperatorError` where the URL is none, or holds a password.
    """
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise OperatorError(f"the setting database is no URL of PostgreSQL: {' '.join(str(error).split())}") from error
    # What libpq hides: also the password of a client's key, and one where another parser of URLs sees none.
    if secrets := [one.keyword.decode() for one in Conninfo.parse(url.encode()) if one.val and one.dispchar == b"*"]:
        told = f"the setting database holds a password ({secrets[0]}): put it into a password file (PGPASSFILE, or "
        raise OperatorError(f"{told}~/.pgpass), or do without it", USAGE)
    hosts = str(given.get("host") or "").split(",")
    if any(host not in _LOCAL and not host.startswith(("/", "@")) for host in hosts):
        given.setdefault("sslmode", "verify-full")
        given.setdefault("sslrootcert", "system")
    options = " ".join(filter(None, (str(given.get("options") or ""), _OPTIONS)))
    return {**_SESSION, **given, "options": options}


def _give_up(connection: Connection) -> None:
    """Close a connection for good, whatever state it is in."""
    with contextlib.suppress(Exception):
        connection.invalidate()
    with contextlib.suppress(Exception):
        connection.close()


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        return
    driver: Any = connection.connection.driver_connection
    driver.forget()
    if not driver.autocommit:  # the driver's own BEGIN would be a round trip more
        driver.autocommit = True
    try:
        driver.execute(_WRITE, prepare=False)
    except psycopg.Error:
        with contextlib.suppress(*PostgresqlDatabase.errors):  # tells the pool where all its connections have broken
            connection.exec_driver_sql("SELECT 1")
        raise
    driver.begun = True


def _settle(connection: Connection, *_: Any) -> None:
    driver: Any = connection.connection.driver_connection
    driver.settle()

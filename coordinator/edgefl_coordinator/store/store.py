"""The store: a database with its tables, and blobs: in a folder, or in an S3-compatible store.

Guarantees:
    One transaction after another changes the database (`shared_commit`), and what was committed survives a power cut.
    A blob is durable before the transaction that names it, and deleted after the one that strikes it out.
    A blob that is read as a whole is the one that was written: its name begins with its digest.
    A small one lies in the database: it is written in the transaction that names it, and one commit makes those of many
    requests durable.
    What a crash leaves over (temporary files, blobs that no row names) is swept when the store opens; where other
    processes may be writing, only what has lain there for an hour. Objects of a server, which a copy of the database
    reaches too, are removed by `serve` alone, and by none that led before another copy did.
    A full disk is a `StorageError` with code `disk_full`; nothing already accepted is touched.
Source: docs/security.md, decision 7 and reliability; docs/decisions/0058.
"""

import contextlib
import hashlib
import hmac
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, bindparam, delete, insert, select

from edgefl_coordinator.commits.shared_commit import Database, SharedCommits
from edgefl_coordinator.errors import IN_USE, USAGE, OperatorError
from edgefl_coordinator.payloads.disk import DiskPayloads
from edgefl_coordinator.payloads.payloads import MAX_PAYLOAD_BYTES, Payloads
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import tables
from edgefl_coordinator.store.sqlite_file import SqliteFile
from edgefl_coordinator.store.statements import FACT, KEEP_FACT, KEEP_FIRST_FACT, Statement
from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.durable import has_room, read_pieces, read_private
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import is_held
from edgefl_protocol.pae import pae

if TYPE_CHECKING:
    from edgefl_coordinator.payloads.s3 import S3Payloads
    from edgefl_coordinator.store.postgresql_database import PostgresqlDatabase

_WAITING_LARGE = 8
SMALL_BYTES = 64 * 2**10  # a blob up to here is a row: a file costs four flushes, a row none of its own
_ROOM_BYTES = 4 * SMALL_BYTES  # what such a row may take: its pages, their index, and the journal of both
_OLD_S = 3600.0  # a blob that another process writes gets its row within seconds
OWNER = "coordinator"  # the fact that says whose a database is
_LED = "payloads_led"  # the fact that lists what was noted in the place of the payloads, each time one led
_MOST_LED = 100  # of them: enough for as many that could not write to that place
SECRET_FILE_BYTES = 32
_NAMED = 32  # hex digits of its SHA-256 with which the name of another blob begins
_SMALL = "small-"  # what the name of such a blob begins with
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
    """A blob that lies durably."""

    name: str
    sha256: str
    size: int


class Store:
    """The open store; close it at the end.

    Every method that touches a blob raises StorageError where the disk is full or fails, a server does not answer, or
    the blob is missing or damaged.
    """

    def __init__(self, home: CoordinatorHome, database: Database, payloads: Payloads) -> None:
        """Take over an open database; use `open_store`."""
        self.home = home
        self.payloads = payloads
        self.database = database
        self._engine = database.engine
        self._commits = SharedCommits(database)
        self.leaves_objects = False  # for a sweep by `serve`: this folder may be a copy that nobody serves
        self._reading = threading.Lock()  # held while these two change
        self._readers = 0  # backups that read blobs
        self._struck_out: set[str] = set()  # what is removed once the last of them is done
        self.waiting_large = threading.BoundedSemaphore(_WAITING_LARGE)  # held by who has `large`, or waits for it
        self.large = threading.Lock()  # held by whoever has the payload of a blob in memory, so that two never are

    def close(self) -> None:
        """Close the database."""
        try:
            self._commits.close()
        finally:
            self.database.close()

    def claim(self, owner: str) -> None:
        """Make the database that of one coordinator for good; an `OperatorError` where it is another's."""
        if not self.database.shared:
            return
        with self.transaction() as connection:
            KEEP_FIRST_FACT.run(connection, key=OWNER, value=owner)
            found = FACT.value(connection, key=OWNER)
        check_owner(found, owner)

    def lead(self) -> None:
        """Make this database the one by which objects are removed, and sweep where others may reach them.

        An `OperatorError` where it is a copy, and another has led since it was made.
        """
        if self.payloads.shared:
            with self.transaction() as connection:
                known, fresh = (FACT.value(connection, key=_LED) or "").split(), secrets.token_hex(8)
                KEEP_FACT.run(connection, key=_LED, value=" ".join([*known, fresh][-_MOST_LED:]))
            self.payloads.lead(known, fresh)  # after the commit: what stands there, the database always knows
        if self.database.shared or self.payloads.shared:
            self.sweep()

    def transaction(self) -> contextlib.AbstractContextManager[Connection]:
        """Give the only connection in a transaction: committed at the end, rolled back on any error."""
        return self._commits.transaction()

    def commit(self) -> None:
        """Commit what transactions of a crowd have left open."""
        self._commits.commit()

    def look(self) -> contextlib.AbstractContextManager[Connection]:
        """Give a connection to read what a transaction of the caller's asks again; this waits for no commit."""
        return self.database.looking() or self._commits.look()

    def full_folder(self) -> Path | None:
        """Return the folder of the database where its disk is full, else None; of a server nothing is known."""
        return None if self.database.shared or has_room(self.home.root, _ROOM_BYTES) else self.home.root

    def put_blob(self, data: bytes) -> Blob:
        """Write a blob durably; its name is new each time, so equal content never shares a file."""
        sha256 = hashlib.sha256(data).hexdigest()
        name = _fresh_name(sha256)
        self.payloads.put(name, data)
        return Blob(name, sha256, len(data))

    def put_small(self, connection: Connection, data: bytes) -> Blob:
        """Write a blob of at most `SMALL_BYTES` within the caller's transaction."""
        sha256 = hashlib.sha256(data).hexdigest()
        blob = Blob(_SMALL + _fresh_name(sha256), sha256, len(data))
        _KEEP_SMALL.send(connection, name=blob.name, data=data)
        return blob

    def adopt(self, paths: Sequence[Path]) -> list[Blob]:
        """Take files of this machine that were flushed, durably and without their bytes in memory; they may stay."""
        files: dict[str, Path] = {}
        blobs: list[Blob] = []
        for path in paths:
            hasher, size = hashlib.sha256(), 0
            for piece in read_pieces(path, MAX_PAYLOAD_BYTES):
                hasher.update(piece)
                size += len(piece)
            blobs.append(Blob(_fresh_name(hasher.hexdigest()), hasher.hexdigest(), size))
            files[blobs[-1].name] = path
        try:
            self.payloads.put_files(files)
        except BaseException:
            self.payloads.delete(files)
            raise
        return blobs

    def file_of(self, name: str, spare: Path) -> Path:
        """Return a file with the content of a blob: its own, or `spare`, into which it is written."""
        if name.startswith(_SMALL):
            spare.write_bytes(self.get_blob(name))
            return spare
        file = self.payloads.file_of(name, spare)
        for _ in _checked(name, read_pieces(file, MAX_PAYLOAD_BYTES)):
            pass
        return file

    def new_upload(self) -> str:
        """Make room for a blob that comes in pieces, and return its name."""
        name = _fresh_name(secrets.token_hex(16))
        self.payloads.begin(name)
        return name

    def pieces(self, name: str) -> Iterator[bytes]:
        """Give a blob in pieces; it counts once all are read."""
        return _checked(name, self.payloads.pieces(name))

    def get_blob(self, name: str, max_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
        """Read a blob of at most `max_bytes`; not within a transaction."""
        if name.startswith(_SMALL):
            with self.transaction() as connection:
                data: bytes | None = _SMALL_DATA.value(connection, name=name)
            if data is None or len(data) > max_bytes:
                raise StorageError(f"the blob {name} is missing, or longer than {max_bytes} bytes", "missing")
            return data
        if self.payloads.size(name) > max_bytes:
            raise StorageError(f"the blob {name} is longer than {max_bytes} bytes", "too_large")
        return b"".join(self.pieces(name))

    def drop_blobs(self, names: Iterable[str]) -> None:
        """Remove blobs that no row names: their transaction was refused, or has struck them out and is committed.

        What cannot be removed now is an orphan for the next sweep.
        """
        names = set(names)
        small = [{"gone": name} for name in names if name.startswith(_SMALL)]
        if not (self.leaves_objects and self.payloads.shared):
            self.payloads.delete(self._unread({name for name in names if not name.startswith(_SMALL)}))
        if small:
            with contextlib.suppress(StorageError), self.transaction() as connection:
                connection.execute(_DROP_SMALL, small)

    def _unread(self, names: set[str]) -> set[str]:
        """Return names, or none of them while a backup reads: they are dropped after it."""
        with self._reading:
            if self._readers:
                self._struck_out |= names
                return set()
        return names

    @contextlib.contextmanager
    def blobs_stay(self) -> Iterator[None]:
        """Remove no file or object of a blob meanwhile: what is struck out by then goes afterwards."""
        with self._reading:
            self._readers += 1
        try:
            yield
        finally:
            with self._reading:
                self._readers -= 1
                gone: set[str] = set()
                if not self._readers:
                    gone, self._struck_out = self._struck_out, gone
            self.drop_blobs(gone)

    def sweep(self, *, opens: bool = False) -> int:
        """Remove temporary files, blobs without a row and old job folders; return how many.

        Files that lie there since a moment may be another process's, where there may be others. While the store
        `opens` it may be that of a copy: then objects of a server stay.
        """
        until = time.time() - _OLD_S if self.database.shared or self.payloads.shared else None
        files = set() if opens and self.payloads.shared else self.payloads.names(until)
        with self.transaction() as connection:
            named = {name for column in BLOB_COLUMNS for name in connection.scalars(select(column))}
            small = set(connection.scalars(select(tables.small_blobs.c.name)))
        orphans = (files | small) - named  # a row without a blob names None
        self.drop_blobs(orphans)
        removed = len(orphans)
        for path in self.home.jobs.iterdir():
            if not is_held(path, shared=True):  # a snapshot is, while a backup is written from it
                shutil.rmtree(path)
                removed += 1
        for path in self.home.root.glob(".*.tmp"):
            path.unlink()
            removed += 1
        return removed


def open_store(
    home: CoordinatorHome, wait_s: float = 0.0, url: str = "", payloads: str = "", *, joins: bool = False
) -> Store:
    """Open the store, make its tables where there are none, and sweep what a crash left beside the database of a file.

    Args:
        wait_s: how long to wait for another process that has it open, or leads.
        url: of a PostgreSQL database, which is swept once it is known whose it is; "" for the file in the folder.
        payloads: `s3://…`, where blobs lie; "" for the folder.
        joins: open it beside other processes where the database can be shared.

    Raises:
        OperatorError: another process has it open, or another version of this program made it with other tables.
        StorageError: it cannot be read or written.
    """
    database: Database = postgresql(url) if url else SqliteFile(home, wait_s)
    try:
        for folder in (home.blobs, home.jobs):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not joins and not database.lead(wait_s):
            told = f"another process leads the coordinator of {home.root}; stop it, or wait until it is done"
            raise OperatorError(told, IN_USE)
        store = Store(home, database, claimed_payloads(home, payloads) if payloads else DiskPayloads(home.blobs))
    except BaseException as error:
        database.close()
        if isinstance(error, database.errors):
            raise database.storage_error(error) from error
        raise
    try:
        with store.transaction() as connection:
            reached = database.shared or store.payloads.shared  # by others than who has this folder
            if database.prepare(connection) and reached and store.payloads.names():
                told = "the database is empty although there are blobs: restore it, or name the right one"
                raise StorageError(told, "damaged")
        if not database.shared:
            store.sweep(opens=True)
    except BaseException:
        store.close()
        raise
    return store


def postgresql(url: str) -> "PostgresqlDatabase":
    """Name the PostgreSQL database of a URL; an `OperatorError` where it is no such URL, or the driver is missing."""
    if find_spec("psycopg") is None:
        raise OperatorError(f"the setting database needs {needs_extra('postgresql')}", USAGE)
    from edgefl_coordinator.store.postgresql_database import PostgresqlDatabase

    return PostgresqlDatabase(url)


def check_owner(found: str | None, owner: str) -> None:
    """Refuse, by an `OperatorError`, a database that another coordinator than the owner has claimed."""
    if found not in (None, owner):
        raise OperatorError(
            "the database belongs to another coordinator: give each its own, or restore the folder that it was "
            "made with"
        )


def s3_payloads(url: str, secret: bytes) -> "S3Payloads":
    """Name a place in an S3-compatible store; an `OperatorError` where it is no such URL, or the extra is missing."""
    if find_spec("obstore") is None:
        raise OperatorError(f"payloads in an S3-compatible store need {needs_extra('s3')}", USAGE)
    from edgefl_coordinator.payloads.s3 import S3Payloads

    return S3Payloads(url, secret)


def claimed_payloads(home: CoordinatorHome, url: str) -> "S3Payloads":
    """Open the place in an S3-compatible store that is a coordinator's; an `OperatorError` where it is another's."""
    secret = read_private(home.keys / "secret.bin", SECRET_FILE_BYTES)
    payloads = s3_payloads(url, secret)
    payloads.claim(hmac.digest(secret, pae(b"payloads-owner"), "sha256").hex())
    return payloads


def _checked(name: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Pass pieces on; fail at their end where they are not what the name was made of."""
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece)
        yield piece
    if hasher.hexdigest()[:_NAMED] != name[:_NAMED]:
        raise StorageError(f"the blob {name} is damaged: it was cut or changed", "damaged")


def _fresh_name(prefix: str) -> str:
    return f"{prefix[:_NAMED]}-{secrets.token_hex(8)}"

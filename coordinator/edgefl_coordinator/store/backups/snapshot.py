"""The coordinator's folder at one moment, held still while it serves: what a backup is written from.

Guarantees:
    Database, blobs, keys, settings and signed heads are of one moment: they are taken while no transaction commits and
    no key changes. Everything that was acknowledged before is in it. Blobs are linked. What waits meanwhile waits for
    the copy of a file; of a PostgreSQL database not even for that, for its rows are read as they were at that moment.
    Blobs of an S3-compatible store are fetched afterwards, and this process removes none until they are; where another
    one did, the backup fails and is made again. A blob that is half sent is not in it, and its sender begins it again.
    What is lost of a refused reply is left out.
    The root key is not in it, nor another private key that the coordinator does not use, whatever the file's name.
    It lies in the folder of jobs, so what a crash leaves over goes when the store opens again. Nobody else removes one
    from which a backup is being written, however long that takes.
Source: docs/security.md check 67; SQLite, "Online Backup API"; PostgreSQL, "Repeatable Read Isolation Level";
docs/decisions/0056, 0069.
"""

import contextlib
import os
import re
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, delete, exists, func, literal_column, select

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorHome, CoordinatorSettings
from edgefl_coordinator.store.backups import copies
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.store.store import BLOB_COLUMNS, Store
from edgefl_coordinator.store.tables import audit, refused_replies, replies, uploads
from edgefl_protocol.durable import open_bounded, write_pieces
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import is_held, share

DATABASE: Final = "store.sqlite"  # as `settings.CoordinatorHome` has it
_BLOB_FILE: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}")  # the name of a blob that is a file
_SNAPSHOT: Final = re.compile(r"snapshot-[0-9a-f]{16}")
_OLD_S: Final = 24 * 3600.0  # a snapshot that nobody reads by then: its command was killed
_PRIVATE: Final = b"PRIVATE KEY-----"  # how a private key begins, encrypted or not
_LOOKED_AT: Final = 2**20  # bytes
_TRIES, _PAUSE_S = 100, 0.05
_AGAIN: Final = "make the backup again; where it says so again, bring the object back from a copy of the bucket"
_IS_REFUSED: Final = exists().where(
    refused_replies.c.number == replies.c.number, refused_replies.c.skid == replies.c.skid
)


def fresh_name() -> str:
    """Name a snapshot."""
    return f"snapshot-{secrets.token_hex(8)}"


def take(coordinator: Coordinator, name: str) -> None:
    """Take a snapshot of a fresh name, for `folder_of` and `drop`.

    Raises:
        OperatorError: the name is not a fresh one.
        StorageError: the disk is full, a blob is missing, or it was dropped meanwhile; nothing is left over.
    """
    home = coordinator.store.home
    # Where a network's file system cannot tell whether one is read, it stays until the store opens again.
    for old in home.jobs.glob("snapshot-*"):
        if time.time() - old.stat().st_mtime > _OLD_S and not is_held(old, shared=True, unknown=True):
            shutil.rmtree(old, ignore_errors=True)
    folder = home.jobs / name
    if not _SNAPSHOT.fullmatch(name) or folder.exists():
        raise OperatorError("a snapshot has another name: begin the backup anew")
    try:
        (folder / "blobs").mkdir(mode=0o700, parents=True)
        for _ in range(_TRIES):
            if _taken(coordinator, folder):
                return
            time.sleep(_PAUSE_S)
        raise StorageError("the store is busy with a large change; try the backup again", "storage")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise StorageError(f"cannot copy {home.root} for the backup: {error.strerror}", "storage") from error
        raise


def _taken(coordinator: Coordinator, folder: Path) -> bool:
    """Take all of one moment; False where a transaction is so large that SQLite lets nobody read meanwhile."""
    store = coordinator.store
    with store.blobs_stay():
        still = store.database.still()
        if still is not None:
            _take_of_database(coordinator, folder, still)
        elif not _taken_of_file(coordinator, folder):
            return False
        if store.payloads.shared:
            _leave_out_uploads(folder)
            _fetch_blobs(store, folder)
    return True


def _taken_of_file(coordinator: Coordinator, folder: Path) -> bool:
    with coordinator.keys.changing, coordinator.store.transaction():
        if not _copied(coordinator.store.home.database, folder / DATABASE):
            return False
        with copies.rows_of(folder / DATABASE) as rows:
            _take_files(coordinator, folder, rows)
    return True


def _take_of_database(
    coordinator: Coordinator, folder: Path, still: contextlib.AbstractContextManager[Connection]
) -> None:
    with contextlib.ExitStack() as until_copied:
        with coordinator.keys.changing, coordinator.store.transaction():
            rows = until_copied.enter_context(still)
            _take_files(coordinator, folder, rows)
        copies.to_file(rows, folder / DATABASE)


def _take_files(coordinator: Coordinator, folder: Path, rows: Connection) -> None:
    _copy_small(coordinator.store.home, coordinator.settings, folder)
    if not coordinator.store.payloads.shared:
        _link_blobs(coordinator.store.home, folder, _blobs(rows))


def folder_of(home: CoordinatorHome, name: str) -> Path:
    """Return a snapshot's folder; an `OperatorError` where there is none."""
    folder = home.jobs / name
    if not _SNAPSHOT.fullmatch(name) or not folder.is_dir():
        raise OperatorError("the snapshot is gone: the server was started again meanwhile; begin the backup anew")
    return folder


@contextlib.contextmanager
def held(home: CoordinatorHome, name: str) -> Iterator[Path]:
    """Give a snapshot's folder, which stays while it is read; an `OperatorError` where there is none."""
    folder = folder_of(home, name)
    with share(folder):
        yield folder


def drop(home: CoordinatorHome, name: str) -> None:
    """Remove a snapshot, if it is there; one that is being taken fails then."""
    if _SNAPSHOT.fullmatch(name):
        gone = home.jobs / f"gone-{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):
            (home.jobs / name).rename(gone)  # nothing more can be written into it
        shutil.rmtree(gone, ignore_errors=True)


def what_it_holds(folder: Path) -> tuple[int, int, dict[str, int]]:
    """Return version of the tables, rows of the audit log, and how much of each unfinished upload counts.

    What lies behind that may still be written.
    """
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        rows = connection.execute(str(select(func.coalesce(func.max(audit.c.number), literal_column("0"))))).fetchone()
        begun = connection.execute(str(select(uploads.c.blob, uploads.c.have))).fetchall()
    return version, rows[0], dict(begun)


def files_of(folder: Path) -> list[Path]:
    """Return the files of a snapshot, the small ones first, then the database, then the blobs."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(found, key=lambda path: (path.parent.name == "blobs", path.name == DATABASE, path))


def outside(home: CoordinatorHome, settings: CoordinatorSettings) -> list[Path]:
    """Return what is in no snapshot, for whoever has to keep it elsewhere.

    That is what the settings name and what lies outside of the folder; and private keys in it that are not its own,
    such as the root key where `init` made it: whoever never moved it would lose it with the disk.
    """
    elsewhere = [path for path in _named(home, settings) if not path.is_relative_to(home.root)]
    return [*elsewhere, *(path for path in _small_files(home, settings) if _is_foreign(home, settings, path))]


def _named(home: CoordinatorHome, settings: CoordinatorSettings) -> list[Path]:
    named = (settings.certificate, settings.certificate_key, settings.ca)
    return [Path(os.path.normpath(home.root / name)) for name in dict.fromkeys(named) if name]


def _copied(database: Path, target: Path) -> bool:
    """Copy what is committed; False where a transaction is so large that SQLite lets nobody read meanwhile."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o600))
    uri = f"{database.resolve().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(uri, uri=True, timeout=0.0)) as source,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        try:
            copy.execute("PRAGMA synchronous=OFF")  # the backup's file is flushed, not this one
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                return False
            raise copies.not_copied(error) from error
    return True


def _copy_small(home: CoordinatorHome, settings: CoordinatorSettings, folder: Path) -> None:
    for path in _small_files(home, settings):
        if _is_foreign(home, settings, path):
            continue
        target = folder / path.relative_to(home.root)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(path, target)


def _small_files(home: CoordinatorHome, settings: CoordinatorSettings) -> list[Path]:
    kept = [home.config, home.heads, *_files(home.keys), *_files(home.tls), *_named(home, settings)]
    return [path for path in dict.fromkeys(kept) if path.is_relative_to(home.root) and path.is_file()]


def _is_foreign(home: CoordinatorHome, settings: CoordinatorSettings, path: Path) -> bool:
    """Tell whether a file holds a private key that the coordinator does not use: the root key, most likely."""
    keys = (home.signing, home.next_signing, home.sealing_ring, home.keys / "sealing.key", home.keys / "secret.bin")
    named = Path(os.path.normpath(home.root / settings.certificate_key))
    if path in (*keys, named, home.tls / "server.key", home.config, home.heads):
        return False
    with open_bounded(path, 2**62) as file:
        return _PRIVATE in file.read(_LOOKED_AT)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))


def _blobs(rows: Connection) -> dict[str, bool]:
    """Return the blobs that are no rows, with whether each has to be there: that of a refused reply may be lost."""
    named = [name for column in BLOB_COLUMNS for name in rows.scalars(select(column))]
    refused = set(rows.scalars(select(replies.c.blob).where(_IS_REFUSED)))
    return {name: name not in refused for name in named if name is not None and _BLOB_FILE.fullmatch(name)}


def _link_blobs(home: CoordinatorHome, folder: Path, named: Mapping[str, bool]) -> None:
    for name, needed in named.items():
        path, target = home.blobs / name, folder / "blobs" / name
        if not path.exists():
            if not needed:
                continue
            raise StorageError(f"the blob {name} is missing in {home.blobs}: the folder is damaged", "damaged")
        try:
            target.hardlink_to(path)
        except OSError:  # a file system that knows no links
            shutil.copy(path, target)


def _leave_out_uploads(folder: Path) -> None:
    with copies.rows_of(folder / DATABASE) as rows:
        rows.execute(delete(uploads))
        rows.commit()


def _fetch_blobs(store: Store, folder: Path) -> None:
    with copies.rows_of(folder / DATABASE) as rows:
        named = _blobs(rows)
    for name, needed in named.items():
        try:
            write_pieces(folder / "blobs" / name, store.pieces(name), mode=0o600)
        except StorageError as error:
            if error.code not in ("missing", "damaged"):
                raise
            if needed:
                raise StorageError(f"{error}: {_AGAIN}", error.code) from error

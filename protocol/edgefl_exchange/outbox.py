"""The outbox: work items that wait to be sent, safe against crashes and thieves of the disk.

* An item is on the disk before `put` returns (`keep_commits`) and stays until `delete`, which is called only after a
  signed answer.
* Contents are encrypted with ChaCha20-Poly1305 under a key derived from this site's sealing key, so that key's
  passphrase guards them too; the item's key, kind and federation are bound in. A large content lies in an encrypted
  file beside the database (`item_files`), and the row holds the key to it.
* Items, bytes and age are bounded. Sealing happens at send time, so a retry is a new envelope around the same item.

Source: docs/security.md, replay window and idempotency; reliability table.
"""

import contextlib
import hashlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from edgefl_exchange.errors import OutboxError
from edgefl_exchange.item_files import ItemFiles
from edgefl_exchange.work_item import LEARNED as LEARNED
from edgefl_exchange.work_item import WorkItem as WorkItem
from edgefl_exchange.work_item import WorkItemKey
from edgefl_protocol.durable import keep_commits
from edgefl_protocol.envelopes.blob import BLOB_ABOVE_BYTES, MAX_BLOB_BYTES, BlobReference, sealed_size
from edgefl_protocol.errors import BlobError, PayloadError, StorageError
from edgefl_protocol.payload import Payload
from edgefl_protocol.sentences import counted

_DAY_MS = 86_400_000
_NONCE_BYTES = 12
_CLOCK_SET_MS = 1_577_836_800_000  # 2020-01-01: an earlier time comes from a clock that was not set yet
_SCHEMA = """
CREATE TABLE IF NOT EXISTS item (
    idem TEXT PRIMARY KEY,
    federation TEXT NOT NULL,
    kind TEXT NOT NULL,
    round INTEGER,
    created_ms INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL,
    sealed BLOB NOT NULL,
    file TEXT
) STRICT
"""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the outbox holds at most."""

    items: int = 64
    bytes: int = sealed_size(MAX_BLOB_BYTES) + 64 * 2**20  # the largest reply there is, and small ones beside it
    age_ms: int = 30 * _DAY_MS


class Outbox:
    """The outbox of one site.

    Args:
        path: the database file; made with mode 0600.
        key: 32 secret bytes, `Identity.outbox_key`.

    Raises:
        OutboxError: the file is damaged or held by another process.
    """

    def __init__(self, path: Path, key: bytes, bounds: Bounds | None = None) -> None:
        self._path = path
        self._cipher = ChaCha20Poly1305(key)
        self._bounds = bounds or Bounds()
        self._files = ItemFiles(path.with_name(f"{path.name}.files"))
        with self._mapped():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None)
            keep_commits(self._db)
            self._db.execute("PRAGMA secure_delete=ON")
            self._db.execute(_SCHEMA)
        with self._transaction():
            if not any(row[1] == "file" for row in self._db.execute("PRAGMA table_info(item)")):  # made by an older one
                self._db.execute("ALTER TABLE item ADD COLUMN file TEXT")
            self._files.sweep({row[0] for row in self._db.execute("SELECT file FROM item WHERE file IS NOT NULL")})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; items stay."""
        self._db.close()

    def put(self, federation: str, kind: str, payload: bytes, now_ms: int) -> str:
        """Keep a work item and give its key.

        An older item of the same federation and kind that was never sent is replaced: the newer one says all it said.

        Args:
            kind: name of the route that takes it.

        Raises:
            OutboxError: the outbox is full.
        """
        return self._put(WorkItemKey(secrets.token_hex(16), federation, kind, None), payload, now_ms)

    def put_learned(self, federation: str, round_number: int, payload: bytes, now_ms: int) -> str:
        """Keep the reply that was learned in a round and give its key; where it is kept already, it stays as it is.

        The key follows from federation and round, so that a crash between keeping it and noting so never makes two.

        Raises:
            OutboxError: the outbox is full, or the reply too large.
        """
        key = WorkItemKey(learned_key(federation, round_number), federation, LEARNED, round_number)
        with self._mapped():
            kept = self._db.execute("SELECT 1 FROM item WHERE idem = ?", (key.idem,)).fetchone()
        return key.idem if kept else self._put(key, payload, now_ms)

    def _put(self, key: WorkItemKey, payload: bytes, now_ms: int) -> str:
        """Keep an item; one of the same federation and kind that is promised to no round gives way to it."""
        if len(payload) > MAX_BLOB_BYTES:
            raise OutboxError(f"the item has {len(payload)} bytes; at most {MAX_BLOB_BYTES} can be sent", "too_large")
        blob = self._files.keep(payload) if len(payload) > BLOB_ABOVE_BYTES else None
        content, file = (payload, None) if blob is None else (blob.to_payload().to_bytes(), blob.blob)
        sealed = self._seal(content, *_names(key.idem, key.federation, key.kind, file))
        size = len(sealed) + (0 if blob is None else blob.size)
        try:
            with self._transaction():
                gone = self._db.execute(
                    "DELETE FROM item WHERE federation = ? AND kind = ? AND round IS NULL RETURNING file",
                    (key.federation, key.kind),
                ).fetchall()
                self._check_room(size)
                self._db.execute(
                    "INSERT INTO item (idem, federation, kind, round, created_ms, bytes, sealed, file) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (key.idem, key.federation, key.kind, key.round, now_ms, size, sealed, file),
                )
        except BaseException:
            self._drop([(file,)])
            raise
        self._drop(gone)
        return key.idem

    def items(self, federation: str) -> list[WorkItem]:
        """Work items for a federation, oldest first; contents in files are read when they are asked for.

        Raises:
            OutboxError: an item does not decrypt under this site's key.
        """
        with self._mapped():
            rows = self._db.execute(
                "SELECT idem, kind, round, created_ms, attempts, sealed, file FROM item WHERE federation = ? "
                "ORDER BY created_ms, rowid",
                (federation,),
            ).fetchall()
        return [
            self._item(WorkItem(
                idem=idem, federation=federation, kind=kind, round=round_number, created_ms=created_ms,
                attempts=attempts, size=0, content=bytes,
            ), sealed, file)
            for idem, kind, round_number, created_ms, attempts, sealed, file in rows
        ]  # fmt: skip

    def _item(self, row: WorkItem, sealed: bytes, file: str | None) -> WorkItem:
        """Return the item of a row, its content opened or ready to be read."""
        content = self._open(sealed, *_names(row.idem, row.federation, row.kind, file))
        if file is None:
            return replace(row, size=len(content), content=lambda: content)
        blob = self._reference(content, file)
        return replace(
            row,
            size=blob.plain_bytes,
            blob=blob,
            content=lambda: self._read(blob),
            chunks=lambda: self._chunks(blob),
        )

    def file_of(self, blob: BlobReference) -> Path:
        """Return the file that holds a large item, encrypted as it travels."""
        return self._files.path(blob.blob)

    def count(self) -> int:
        """Count the items that wait."""
        with self._mapped():
            return int(self._db.execute("SELECT COUNT(*) FROM item").fetchone()[0])

    def promise(self, idem: str, round_number: int) -> None:
        """Note durably, before the first send, the round an item belongs to, and count the attempt."""
        with self._transaction():
            self._db.execute("UPDATE item SET round = ?, attempts = attempts + 1 WHERE idem = ?", (round_number, idem))

    def release(self, item: WorkItem) -> str:
        """Free an item from a round that closed without it, under a new key, and give that key."""
        idem = secrets.token_hex(16)
        content, file = (
            (item.payload, None) if item.blob is None else (item.blob.to_payload().to_bytes(), item.blob.blob)
        )
        sealed = self._seal(content, *_names(idem, item.federation, item.kind, file))
        with self._transaction():
            self._db.execute(
                "UPDATE item SET idem = ?, round = NULL, attempts = 0, sealed = ? WHERE idem = ?",
                (idem, sealed, item.idem),
            )
        return idem

    def take_back(self, idem: str) -> None:
        """Note that nobody has an item: a signed answer refused it. It stays promised to its round."""
        with self._transaction():
            self._db.execute("UPDATE item SET attempts = 0 WHERE idem = ?", (idem,))

    def delete(self, idem: str) -> None:
        """Forget an item: only after a signed answer said that it arrived or can never be taken."""
        with self._transaction():
            gone = self._db.execute("DELETE FROM item WHERE idem = ? RETURNING file", (idem,)).fetchall()
        self._drop(gone)

    def expire(self, now_ms: int) -> int:
        """Drop items past the age bound and say how many.

        An item from before the clock was set, or from the future, got its date from a wrong clock; it ages from now.
        """
        with self._transaction():
            self._db.execute(
                "UPDATE item SET created_ms = ? WHERE created_ms < ? OR created_ms > ?", (now_ms, _CLOCK_SET_MS, now_ms)
            )
            oldest_ms = now_ms - self._bounds.age_ms
            gone = self._db.execute("DELETE FROM item WHERE created_ms < ? RETURNING file", (oldest_ms,)).fetchall()
        self._drop(gone)
        return len(gone)

    def _drop(self, rows: list[tuple[str | None]]) -> None:
        """Delete the files of rows that were deleted and committed."""
        self._files.drop(*(file for (file,) in rows if file is not None))

    def _reference(self, content: bytes, file: str) -> BlobReference:
        try:
            found = BlobReference.from_payload(Payload.from_bytes(content))
        except PayloadError:
            found = None
        if found is None or found.blob != file:
            raise self._damaged()
        return found

    def _read(self, blob: BlobReference) -> bytes:
        try:
            return self._files.read(blob)
        except (BlobError, StorageError) as error:
            raise self._damaged() from error

    def _chunks(self, blob: BlobReference) -> Iterator[bytes]:
        try:
            yield from self._files.chunks(blob)
        except (BlobError, StorageError) as error:
            raise self._damaged() from error

    def _damaged(self) -> OutboxError:
        return OutboxError(
            f"{self._path} holds an item that this member's keys cannot open (it was made with other keys, or is "
            "damaged); move the file away and contribute again",
            code="outbox_damaged",
        )

    def _check_room(self, more: int) -> None:
        items, size = self._db.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM item").fetchone()
        if items + 1 > self._bounds.items or size + more > self._bounds.bytes:
            raise OutboxError(
                f"the outbox is full: it holds {counted(items, 'item')} of {size} bytes together, and at most "
                f"{counted(self._bounds.items, 'item')} and {self._bounds.bytes} bytes are allowed; send them with "
                "edgefl sync",
                code="outbox_full",
            )

    def _seal(self, payload: bytes, *bound: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, payload, _bind(bound))

    def _open(self, sealed: bytes, *bound: str) -> bytes:
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _bind(bound))
        except (InvalidTag, ValueError) as error:
            raise self._damaged() from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._mapped():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise storage_error(self._path, error) from error
        except OSError as error:
            raise StorageError(
                f"cannot open {self._path}: {error.strerror}; check the home folder", "storage"
            ) from error


def forget_outbox(path: Path) -> int:
    """Delete an outbox whose member's keys are gone, and say how many items it held: nobody can open or send them.

    A `StorageError` where it cannot be deleted.
    """
    if not path.exists():
        return 0
    count = 0
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:  # a damaged one goes, too
        (count,) = db.execute("SELECT COUNT(*) FROM item").fetchone()
    try:
        for file in (*path.with_name(f"{path.name}.files").glob("*"), *path.parent.glob(f"{path.name}*")):
            if file.is_file():
                file.unlink()
    except OSError as error:
        raise StorageError(f"cannot delete {error.filename}: {error.strerror}; check the disk", "storage") from error
    return count


def learned_key(federation: str, round_number: int) -> str:
    """Make the key of the reply that was learned in a round."""
    return hashlib.sha256(f"{LEARNED}\0{federation}\0{round_number}".encode()).hexdigest()[:32]


def _names(idem: str, federation: str, kind: str, file: str | None) -> tuple[str, ...]:
    """What an item's encryption is bound to."""
    return (idem, federation, kind) if file is None else (idem, federation, kind, file)


def _bind(parts: tuple[str, ...]) -> bytes:
    return hashlib.sha256(b"\0".join(part.encode() for part in parts)).digest()


def storage_error(path: Path, error: sqlite3.Error) -> OutboxError | StorageError:
    """Turn an error of the database into one that tells the owner what to do."""
    name = getattr(error, "sqlite_errorname", "")
    if name == "SQLITE_FULL":
        return StorageError(f"cannot write {path}: the disk is full; free space and try again", "disk_full")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return OutboxError(f"{path} is in use by another edgefl process; try again when it is done", "outbox_busy")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return OutboxError(f"{path} is damaged; move it away and contribute again", "outbox_damaged")
    return StorageError(f"cannot use {path}: {error}; check the disk and the home folder", "storage")

"""Blobs that members send in pieces: what is stored of each, and what has to go.

Guarantees: a blob is its sender's alone, by the key that signed; `have` never says more than lies on the disk, because
a piece is written and flushed before the transaction that counts it, and it is counted only where it continues what is
there, so two that come at once, or one that comes again, change nothing. A member has at most `open_blobs` of them, of
which a new one pushes out the one that has rested longest; one that rests longer than its age is swept. What is pushed
out or swept is only work: the sender has the blob and begins again. Source: docs/security.md 2.2, reliability.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, delete, func, insert, select, update

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.tables import uploads
from edgefl_protocol.messages.blob_messages import BlobPut

_AHEAD = update(uploads).where(uploads.c.touched_ms > bindparam("now")).values(touched_ms=bindparam("now"))


@dataclass(frozen=True)
class Upload:
    """A blob as far as it has come."""

    id: str  # chosen by the sender
    size: int  # bytes of the whole blob
    sha256: str  # hex digest of the whole blob, as its sender states it
    have: int  # bytes that lie durably
    file: str  # name of the file they lie in


def find(connection: Connection, skid: str, blob: str) -> Upload | None:
    """Return a member's upload, or None."""
    row = connection.execute(select(uploads).where(_one(skid, blob))).first()
    return None if row is None else _upload(row)


def same(upload: Upload, put: BlobPut) -> Upload:
    """Return the upload if the piece is of the same blob; `idem_conflict` where the id was used for another one."""
    if (upload.size, upload.sha256) != (put.size, put.sha256):
        raise RefusedError("idem_conflict", "this blob id was used for another blob; use a new one")
    return upload


def begin(
    connection: Connection, now_ms: int, member: MemberRow, put: BlobPut, file: str, most: int
) -> tuple[Upload, list[str]]:
    """Begin an upload, one of at most `most` of a member, whose empty file exists.

    Returns it, and files that no row names any more, to be deleted after the commit.
    """
    order = (uploads.c.touched_ms.desc(), uploads.c.id)
    held = connection.execute(select(uploads).where(uploads.c.skid == member.skid).order_by(*order)).all()
    gone = held[max(0, most - 1) :]
    for row in gone:
        connection.execute(delete(uploads).where(_one(row.skid, row.id)))
        audit.append(connection, now_ms, "blob_pushed_out", member.name, {"blob": row.id, "bytes": row.have})
    plain = {"id": put.blob, "size": put.size, "sha256": put.sha256, "have": 0, "blob": file}
    connection.execute(insert(uploads).values(skid=member.skid, touched_ms=now_ms, **plain))
    audit.append(connection, now_ms, "blob_begun", member.name, {"blob": put.blob, "bytes": put.size})
    return Upload(put.blob, put.size, put.sha256, 0, file), [row.blob for row in gone]


def count(connection: Connection, now_ms: int, skid: str, put: BlobPut, end: int) -> Upload | None:
    """Count a piece that lies durably up to `end`, if it continues what is there; return what then is there.

    None where the upload is gone meanwhile.
    """
    here = update(uploads).where(_one(skid, put.blob), uploads.c.have == put.offset)
    connection.execute(here.values(have=end, touched_ms=now_ms))
    return find(connection, skid, put.blob)


def promised_bytes(connection: Connection, but_of: str) -> int:
    """Return the bytes that blobs which were begun still lack, without those of one member, which it may push out."""
    lacking = select(func.coalesce(func.sum(uploads.c.size - uploads.c.have), 0)).where(uploads.c.skid != but_of)
    return int(connection.scalar(lacking) or 0)


def remove(connection: Connection, skid: str, blob: str) -> list[str]:
    """Forget an upload; return its file, to be deleted after the commit."""
    return _remove(connection, _one(skid, blob))


def remove_of(connection: Connection, skid: str) -> list[str]:
    """Forget all uploads of a member; return their files, to be deleted after the commit."""
    return _remove(connection, uploads.c.skid == skid)


def expire(connection: Connection, now_ms: int, age_s: int) -> list[str]:
    """Forget uploads that have rested for `age_s` seconds; return their files, to be deleted after the commit.

    One from the future got its time from a clock that was set back; it rests from now on.
    """
    connection.execute(_AHEAD, {"now": now_ms})
    return _remove(connection, uploads.c.touched_ms < now_ms - age_s * 1000)


def _remove(connection: Connection, which: ColumnElement[bool]) -> list[str]:
    files = list(connection.scalars(select(uploads.c.blob).where(which)))
    if files:
        connection.execute(delete(uploads).where(which))
    return files


def _one(skid: str, blob: str) -> ColumnElement[bool]:
    return (uploads.c.skid == skid) & (uploads.c.id == blob)


def _upload(row: Row[Any]) -> Upload:
    return Upload(row.id, row.size, row.sha256, row.have, row.blob)

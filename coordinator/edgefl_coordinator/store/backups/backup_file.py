"""The file of a backup: a coordinator's folder, with a digest of every byte.

    "edgefl-derm backup 1\\n" | the bytes of each file, one after another | manifest | tail
    manifest = JSON: what it is a backup of, and path, length and SHA-256 of each file, in their order
    tail     = "\\n", the manifest's length in 20 digits, " ", its SHA-256 in hex, "\\n"

Guarantees: it is written once, in pieces, and replaced as a whole, so that a kill leaves none. What `read_manifest`
and `unpack` accept is what was written: a file that was cut, or changed in any byte, is refused. Paths stay below the
folder they are unpacked into. Digests find accidents; whoever can write the file can compute them anew, so it is kept
like a key. Source: docs/security.md check 67.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO, Final

import msgspec

from edgefl_coordinator.errors import OperatorError
from edgefl_protocol.durable import file_bytes, open_bounded, read_pieces, write_pieces
from edgefl_protocol.errors import StorageError

FORMAT: Final = 1
_MAGIC: Final = f"edgefl-derm backup {FORMAT}\n".encode()
_TAIL: Final = re.compile(rb"\n(\d{20}) ([0-9a-f]{64})\n")
_TAIL_BYTES: Final = 87
_MAX_BYTES: Final = 2**50
_MAX_MANIFEST_BYTES: Final = 2**30
_PIECE: Final = 2**20

Count = Annotated[int, msgspec.Meta(ge=0)]


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file in a backup."""

    path: str  # below the coordinator's folder
    bytes: Count
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    public: bool  # whether others than the owner may read it


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a backup is of."""

    federation: str
    made_ms: Count  # Unix ms
    program: str  # version of edgefl-derm
    store: Count  # version of the tables
    rows: Count  # of the audit log


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands at the end of a backup."""

    about: About
    files: tuple[Kept, ...]


class BackedUp(msgspec.Struct, frozen=True, kw_only=True):
    """A file that goes into a backup."""

    path: str  # in the backup
    file: Path
    most: int | None = None  # bytes that count; None for all


def write_backup(path: Path, about: About, sources: Iterable[BackedUp]) -> BackupManifest:
    """Write a backup to a new file, which its owner alone can read, without its bytes in memory.

    Raises:
        OperatorError: the file exists.
        StorageError: the disk is full, or a source is missing; nothing is left over.
    """
    if path.exists():
        raise OperatorError(f"{path} exists already; name a new file")
    files: list[Kept] = []
    write_pieces(path, _pieces(about, sources, files), mode=0o600)
    return BackupManifest(about=about, files=tuple(files))


def _pieces(about: About, sources: Iterable[BackedUp], files: list[Kept]) -> Iterator[bytes]:
    yield _MAGIC
    for source in sources:
        hasher, size = hashlib.sha256(), 0
        for piece in _part(source):
            hasher.update(piece)
            size += len(piece)
            yield piece
        public = bool(source.file.stat().st_mode & 0o004)
        files.append(Kept(path=source.path, bytes=size, sha256=hasher.hexdigest(), public=public))
    manifest = msgspec.json.encode(BackupManifest(about=about, files=tuple(files)))
    yield manifest
    yield f"\n{len(manifest):020d} {hashlib.sha256(manifest).hexdigest()}\n".encode()


def _part(source: BackedUp) -> Iterator[bytes]:
    left = file_bytes(source.file) if source.most is None else source.most
    for piece in read_pieces(source.file, _MAX_BYTES, _PIECE):
        if left <= 0:
            break
        yield piece[:left]
        left -= len(piece)
    if left > 0:
        raise StorageError(f"{source.file} ended early; make the backup again", "storage")


def read_manifest(path: Path) -> BackupManifest:
    """Read what a backup holds.

    Raises:
        OperatorError: it is no backup, a newer version made it, or it was cut or changed (`damaged`).
        StorageError: it cannot be read.
    """
    with open_bounded(path, _MAX_BYTES) as file:
        begins = file.read(len(_MAGIC))
        if begins != _MAGIC:
            if newer := re.match(rb"edgefl-derm backup (\d{1,9})\n", begins):
                raise OperatorError(f"{path} is a backup of form {newer[1].decode()}, which a newer version of "
                                    "edgefl-derm made: update edgefl-derm here")  # fmt: skip
            raise OperatorError(f"{path} is no backup; make one with: edgefl-coordinator backup FILE")
        manifest, length = _manifest(path, file)
    if len(_MAGIC) + sum(one.bytes for one in manifest.files) + length + _TAIL_BYTES != file_bytes(path):
        raise _damaged(path)
    if len({one.path for one in manifest.files}) != len(manifest.files) or not all(map(_is_below, manifest.files)):
        raise _damaged(path)
    return manifest


def _manifest(path: Path, file: BinaryIO) -> tuple[BackupManifest, int]:
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL_BYTES))
    tail = _TAIL.fullmatch(file.read(_TAIL_BYTES))
    length = int(tail[1]) if tail else 0
    if tail is None or length > min(_MAX_MANIFEST_BYTES, size - len(_MAGIC) - _TAIL_BYTES):
        raise _damaged(path)
    file.seek(size - _TAIL_BYTES - length)
    data = file.read(length)
    if hashlib.sha256(data).hexdigest().encode() != tail[2]:
        raise _damaged(path)
    try:
        return msgspec.json.decode(data, type=BackupManifest), length
    except (msgspec.DecodeError, UnicodeDecodeError):  # its digest is right
        raise OperatorError(f"another version of edgefl-derm made {path}; restore it with that one") from None


def unpack(path: Path, manifest: BackupManifest, folder: Path, *, blobs: bool, but: str) -> None:
    """Write the files of a backup below a folder: the small ones, or database and blobs; `but` is left out.

    Raises:
        OperatorError: a file is not the one that was backed up (`damaged`).
        StorageError: the disk is full.
    """
    place = len(_MAGIC)
    with open_bounded(path, _MAX_BYTES) as file:
        for one in manifest.files:
            if one.path != but and _is_large(one) is blobs:
                file.seek(place)
                target = folder / one.path
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_pieces(target, _checked(path, file, one), mode=0o644 if one.public else 0o600)
            place += one.bytes


def content(path: Path, manifest: BackupManifest, name: str, most: int) -> bytes:
    """Return one small file of a backup; an `OperatorError` where it holds none, or it was changed."""
    place = len(_MAGIC)
    with open_bounded(path, _MAX_BYTES) as file:
        for one in manifest.files:
            if one.path == name and one.bytes <= most:
                file.seek(place)
                return b"".join(_checked(path, file, one))
            place += one.bytes
    raise _damaged(path)


def _checked(path: Path, file: BinaryIO, one: Kept) -> Iterator[bytes]:
    """Give a file's pieces; fail at its end, before it counts, where its digest is another."""
    hasher, left = hashlib.sha256(), one.bytes
    while left and (piece := file.read(min(left, _PIECE))):
        hasher.update(piece)
        left -= len(piece)
        yield piece
    if left or hasher.hexdigest() != one.sha256:
        raise _damaged(path)


def _is_large(one: Kept) -> bool:
    return one.path == "store.sqlite" or one.path.startswith("blobs/")


def _is_below(one: Kept) -> bool:
    path = PurePosixPath(one.path)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in one.path


def _damaged(path: Path) -> OperatorError:
    return OperatorError(
        f"{path} is not whole: it was cut or changed after it was made; take another backup", "damaged"
    )

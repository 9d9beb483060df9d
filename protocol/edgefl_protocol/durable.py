"""Files that survive a crash: the one module of this package that touches the disk.

`write_atomic` writes a temporary file in the same folder, flushes it to the disk, renames it over the target and
flushes the folder: after a crash at any moment the target holds the old bytes or the new bytes, never a mixture.
A passphrase comes from a file that only its owner can read or from the environment, never from the command line and
never by asking; every command reads it with `read_passphrase`, so the same file opens the same key everywhere.
Readers are bounded. Every `OSError` becomes a `StorageError` of one sentence.
"""

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from edgefl_protocol.errors import KeyMaterialError, StorageError

if TYPE_CHECKING:
    import sqlite3  # most commands load it nowhere

FilePath = str | os.PathLike[str]
MAX_PASSPHRASE_BYTES: Final = 4096
_LOG = logging.getLogger("edgefl")
_LITTLE_BYTES: Final = 256 << 20  # free on a disk, from where on it is asked by writing
SYNCHRONOUS: Final = "synchronous=EXTRA"  # of every SQLite file; see `keep_commits`
PASSPHRASE_VARIABLE: Final = "EDGEFL_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable, not a secret


def write_atomic(path: FilePath, data: bytes, mode: int = 0o644) -> None:
    """Replace a file's content durably, or leave it as it was; its folder must exist.

    The permission bits `mode` are set before any byte is written. A `StorageError` where the disk is full or the folder
    cannot be written: the old content is still there.
    """
    write_pieces(path, (data,), mode)


def write_pieces(path: FilePath, pieces: Iterable[bytes], mode: int = 0o644) -> None:
    """Replace a file's content durably by pieces that never lie in memory together, or leave it as it was.

    Raises:
        StorageError: as `write_atomic`. What the pieces raise is passed on; the old content is still there.
    """
    target = Path(path)
    temporary = target.parent / f".{target.name}.{secrets.token_hex(8)}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        flush_to_disk(target.parent)
    except OSError as error:
        raise _storage_error("write", target, error) from error


def has_room(folder: FilePath, size: int) -> bool:
    """Tell whether so many bytes can be kept in a folder: where little is free, by writing them.

    So what is reserved counts, too, and an idle look costs no disk a write. The file has no name, or loses it at once.
    Whatever else fails is not for want of room.
    """
    import tempfile  # most commands need it nowhere

    try:
        if shutil.disk_usage(folder).free > max(_LITTLE_BYTES, size):
            return True
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(size))  # what a disk cannot make smaller
            file.flush()
            os.fdatasync(file.fileno())
    except OSError as error:
        return _storage_error("write", Path(folder), error).code != "disk_full"
    return True


def keep_commits(database: "sqlite3.Connection") -> None:
    """Let every commit to a SQLite file survive a power cut that follows it.

    With `synchronous=FULL` it may come undone: the journal's removal is not flushed, so the journal is there again and
    is rolled back. `EXTRA` flushes the folder, too. No version of SQLite has the WAL-reset defect with this journal.
    Source: docs/security.md check 58; SQLite, "PRAGMA synchronous".
    """
    database.execute("PRAGMA journal_mode=DELETE")
    database.execute(f"PRAGMA {SYNCHRONOUS}")


def create_empty(path: FilePath) -> None:
    """Make an empty file durably, for its owner alone; it must not exist.

    Raises:
        StorageError: it exists, or the folder cannot be written.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        flush_to_disk(Path(path).parent)
    except OSError as error:
        raise _storage_error("write", Path(path), error) from error


def write_at(path: FilePath, offset: int, data: bytes) -> None:
    """Write bytes into an existing file and flush them: when this returns they survive a power cut.

    Raises:
        StorageError: the disk is full, or the file is gone; bytes behind `offset` are then of no certain content.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _storage_error("write", Path(path), error) from error


def file_bytes(path: FilePath) -> int:
    """Return a file's length.

    Raises:
        StorageError: it is missing.
    """
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise _storage_error("read", Path(path), error) from error


def foreign_content(folder: Path, own: Collection[str]) -> str:
    """Name what lies in a folder that is neither free nor ours, such as `a.txt and 3 more`; empty where it is.

    It is ours where a file or folder fits one of the patterns `own`. Hidden files do not count.
    """
    if not folder.is_dir() or holds_any(folder, own):
        return ""
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def holds_any(folder: Path, own: Collection[str]) -> bool:
    """Tell whether a file or folder in a folder fits one of these patterns."""
    return any(next(folder.glob(pattern), None) for pattern in own)


def flush_to_disk(path: FilePath) -> None:
    """Let a folder's entries, such as a rename in it, or a file's content survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bounded(path: FilePath, max_bytes: int, too_long: str = "") -> bytes:
    """Read a whole file of at most `max_bytes`; `too_long` says what to do about a longer one.

    Raises:
        StorageError: it is missing, unreadable, not a regular file or longer.
    """
    try:
        return _read(Path(path), max_bytes, private=False)
    except StorageError as error:
        if error.code != "too_large" or not too_long:
            raise
        raise StorageError(f"{error}: {too_long}", error.code) from error


def read_private(path: FilePath, max_bytes: int) -> bytes:
    """Read a secret file; refuses one that group or world can read.

    Raises:
        StorageError: as `read_bounded`; code `permissions` where others have access.
    """
    return _read(Path(path), max_bytes, private=True)


@contextlib.contextmanager
def open_bounded(path: FilePath, max_bytes: int) -> Iterator[BinaryIO]:
    """Open a file of at most `max_bytes`, to read it in pieces.

    Raises:
        StorageError: as `read_bounded`; also where a piece cannot be read.
    """
    with _opened(Path(path), private=False) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise _too_large(Path(path), max_bytes)
        yield file


def read_pieces(path: FilePath, max_bytes: int, piece_bytes: int = 1 << 20) -> Iterator[bytes]:
    """Give a file of at most `max_bytes` in pieces.

    Raises:
        StorageError: as `open_bounded`.
    """
    with open_bounded(path, max_bytes) as file:
        while piece := file.read(piece_bytes):
            yield piece


@contextlib.contextmanager
def read_anywhere(path: FilePath, max_bytes: int) -> Iterator[Callable[[int, int], bytes]]:
    """Open a file of at most `max_bytes`; gives a function of offset and length that reads there, less at its end.

    Raises:
        StorageError: as `open_bounded`.
    """
    with open_bounded(path, max_bytes) as file:
        yield lambda offset, length: os.pread(file.fileno(), length, offset)


@contextlib.contextmanager
def _opened(path: Path, *, private: bool) -> Iterator[BinaryIO]:
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError(f"{path} is not a regular file; name a file instead", "not_a_file")
            if private and status.st_mode & 0o077:
                mode = stat.S_IMODE(status.st_mode)
                raise StorageError(
                    (f"{path} can be read or changed by others (mode {mode:04o}); run: chmod 600 {path}"), "permissions"
                )
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _storage_error("read", path, error) from error


def _read(path: Path, max_bytes: int, *, private: bool) -> bytes:
    with _opened(path, private=private) as file:
        expected = min(os.fstat(file.fileno()).st_size, max_bytes)
        data = file.read(expected + 1)  # a buffer for `max_bytes` may be gigabytes
        if len(data) > expected:  # it grew, or is one of those that tell no size
            data += file.read(max_bytes + 1 - len(data))
    if len(data) > max_bytes:
        raise _too_large(path, max_bytes)
    return data


def _too_large(path: Path, max_bytes: int) -> StorageError:
    return StorageError(f"{path} is longer than the {max_bytes:,} bytes allowed", "too_large")


def _storage_error(verb: str, path: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"cannot {verb} {path}: the disk is full; free space and try again", "disk_full")
    if isinstance(error, FileNotFoundError):
        absent = "it" if verb == "read" else "its folder"
        return StorageError(f"cannot {verb} {path}: {absent} does not exist; check the path", "missing")
    if isinstance(error, PermissionError):
        return StorageError(f"cannot {verb} {path}: permission denied; allow this user to {verb} it", "permissions")
    return StorageError(f"cannot {verb} {path}: {error.strerror or 'input/output error'}; check the disk", "storage")


def read_given(words: str, most: int, start: str) -> str:
    """Return the invite that a person gave a command: the words, a file that holds it, or "-" for standard input.

    `start` is what every invite starts with. A `StorageError` where there is no such file, or it is empty, cannot be
    read, or has more than `most` bytes.
    """
    if words == "-":
        return sys.stdin.read(most)
    if not _is_file(words):
        if words.strip().startswith(start):
            return words
        raise StorageError(f"there is no file {words[:200]}, and an invite starts with {start}", "not_found")
    text = read_bounded(Path(words), most).decode("utf-8", "replace")
    if not text.strip():
        raise StorageError(f"{words} is empty; ask the operator for the invite again", "empty")
    return text


def _is_file(words: str) -> bool:
    try:
        return Path(words).is_file()
    except (OSError, ValueError):  # a long text is no file name
        return False


def read_passphrase(file: Path | None, environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the passphrase that opens or seals keys.

    Args:
        file: holds it and nothing else but at most one line end; read in place of the environment.
        environment: may hold `EDGEFL_KEY_PASSPHRASE`, the passphrase itself; one that names a file is warned of.

    Returns:
        The passphrase, or None where neither names one.

    Raises:
        KeyMaterialError: the file holds none (`no_passphrase`).
        StorageError: the file cannot be read, or others can read it (`permissions`).
    """
    if file is None:
        given = environment.get(PASSPHRASE_VARIABLE, "")
        if _is_file(given):
            _LOG.warning(
                "%s holds the passphrase itself, but names a file; was --passphrase-file meant?", PASSPHRASE_VARIABLE
            )
        return given.encode() or None
    content = read_private(file, MAX_PASSPHRASE_BYTES)
    passphrase = content.removesuffix(b"\n")
    if passphrase != content:
        passphrase = passphrase.removesuffix(b"\r")
    if not passphrase:
        raise KeyMaterialError(f"{file} is empty; it must hold the passphrase", "no_passphrase")
    return passphrase

"""The work of `edgefl watch`: which files of a folder are new and whole, and which were scored before.

* A file is taken when its size and time are the same at two looks in a row, so a picture that is still being copied
  is left alone. Its identity is name, size and time: one that is written anew is scored anew.
* Each is scored once, also across restarts and crashes. Order: the file is noted as begun, with the length of the
  output and the SHA-256 of its line; its line is written and flushed to the disk; the file is noted as done. After a
  crash in between it counts as scored where that very line stands at that place of the output, else it is scored again.
  On standard output nothing can be read back: a crash at that moment scores one picture twice rather than never.
* Half a line of a crash is cut off when the output is opened (`open_output`). A whole line is never cut, nor is what
  does not begin like one of ours, which only gets a line end: the file may have been somebody else's before.
* Another model scores none of them again by itself: an update would write a line for each picture of an archive. It is
  said how many are left out and which model scored them (`left_out_words`); whoever wants them again drops the notes.
* A score whose heat map could not be written stands in its line and is noted as without one. The next process that
  draws scores it again, and writes a second line once the map is there; as long as it is not, no line more.
* Notes lie in the home folder, at most `MAX_NOTES` of a folder besides those of files that are still there. A file is
  noted by the bytes of its name below the folder, so a folder is the same however it is named, and so is a file whose
  name is no text.
"""

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgefl_client.home import Home
from edgefl_client.scoring.folder_files import pictures_below
from edgefl_protocol.durable import flush_to_disk, keep_commits
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import LockFile, hold
from edgefl_protocol.sentences import counted, listed

MAX_NOTES = 100_000

_TABLE = """
CREATE TABLE IF NOT EXISTS watched (
  number INTEGER PRIMARY KEY, folder BLOB NOT NULL, name BLOB NOT NULL, size INTEGER NOT NULL, time_ns INTEGER NOT NULL,
  begun_at INTEGER, UNIQUE (folder, name)
)"""
_LATER = {  # columns that an older version did not make
    "model": "ALTER TABLE watched ADD COLUMN model TEXT",
    "without_map": "ALTER TABLE watched ADD COLUMN without_map INTEGER NOT NULL DEFAULT 0",
    "line_sha256": "ALTER TABLE watched ADD COLUMN line_sha256 BLOB",
}
_BEGINNING = b'{"image": '  # of every line that `edgefl watch` writes
_READ_BYTES = 1 << 16  # of the end of an output at first, to find where its last line begins


@dataclass(frozen=True)
class Seen:
    """A file as it was at one look."""

    size_bytes: int  # its length
    time_ns: int  # its time of change


def look(folder: Path, suffixes: Sequence[str]) -> dict[str, Seen]:
    """List the pictures below a folder as they are now, in name order.

    Raises:
        StorageError: there is no such folder.
    """
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder, or cannot be reached", "missing")
    found = {}
    for name in pictures_below(folder, suffixes):
        try:
            status = os.stat(name)  # noqa: PTH116 - names by the thousand, at every look
        except OSError:  # gone since it was listed
            continue
        found[name] = Seen(status.st_size, status.st_mtime_ns)
    return found


class Notes:
    """Which files of one folder were scored; lasting.

    Raises:
        StorageError: the notes cannot be kept, or another process watches the folder.
    """

    def __init__(self, home: Home, folder: Path) -> None:
        self._folder = os.fsencode(folder.resolve())
        self._before = str(folder / "x")[:-1]  # how the names of its files begin
        root = home.prepare()
        digest = hashlib.sha256(self._folder).hexdigest()[:16]
        busy = StorageError(f"another edgefl watch is already watching {folder}; stop it first", "busy")
        self._lock = LockFile(root / f"watch-{digest}.lock", busy)
        os.close(os.open(root / "watched.sqlite3", os.O_RDWR | os.O_CREAT, 0o600))
        self._watched = sqlite3.connect(root / "watched.sqlite3", timeout=10, isolation_level=None)
        try:
            keep_commits(self._watched)
            self._watched.execute(_TABLE)
            self._add_columns()
        except sqlite3.Error as error:
            self.close()
            raise _storage_error(error) from error

    def close(self) -> None:
        """Let go of the files."""
        self._watched.close()
        self._lock.close()

    def recover(self, output: BinaryIO | None) -> None:
        """Settle the file that was begun when the process before died, by what stands in `output`, open for both.

        A note of an older version does not say which line it was, so that its picture is scored again.
        """
        begun = self._run(
            "SELECT name, begun_at, line_sha256 FROM watched WHERE folder = ? AND begun_at IS NOT NULL", self._folder
        )
        for key, position, sha256 in begun:
            if output is not None and _line_sha256(output, position) == sha256:
                self._finish(key)
            else:
                self._run("DELETE FROM watched WHERE folder = ? AND name = ?", self._folder, key)

    def scored(self) -> dict[str, Seen]:
        """List the files that were scored, as they were then."""
        rows = self._run("SELECT name, size, time_ns FROM watched WHERE folder = ? AND begun_at IS NULL", self._folder)
        return {self._name(key): Seen(size, time_ns) for key, size, time_ns in rows}

    def models(self) -> dict[str, str | None]:
        """Tell which model scored each file, in words; None where an older version wrote the note."""
        rows = self._run("SELECT name, model FROM watched WHERE folder = ? AND begun_at IS NULL", self._folder)
        return {self._name(key): model for key, model in rows}

    def without_map(self) -> set[str]:
        """List the files that were scored while their heat map could not be written."""
        rows = self._run(
            "SELECT name FROM watched WHERE folder = ? AND begun_at IS NULL AND without_map = 1", self._folder
        )
        return {self._name(key) for (key,) in rows}

    def begin(
        self, name: str, seen: Seen, line: str, position: int, model: str | None = None, *, without_map: bool = False
    ) -> None:
        """Note that a file's line is about to be written.

        Args:
            position: the output's length in bytes before it; 0 on standard output.
            model: what scored the file, in words.
            without_map: whether its heat map could not be written, and may be another time.
        """
        self._run(
            "INSERT OR REPLACE INTO watched (folder, name, size, time_ns, begun_at, model, without_map, line_sha256) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            self._folder, self._key(name), seen.size_bytes, seen.time_ns, position, model, without_map,
            hashlib.sha256(_bytes_of(line)).digest(),
        )  # fmt: skip

    def finish(self, name: str) -> None:
        """Note that the line of a file is written."""
        self._finish(self._key(name))

    def drop(self) -> None:
        """Drop all notes of the folder: each file is new again."""
        self._run("DELETE FROM watched WHERE folder = ?", self._folder)

    def forget(self, present: dict[str, Seen]) -> int:
        """Drop the oldest notes beyond `MAX_NOTES`, but never those of files that are present: they were scored."""
        rows = self._run("SELECT number, name FROM watched WHERE folder = ? ORDER BY number", self._folder)
        surplus = [number for number, key in rows if self._name(key) not in present][: max(len(rows) - MAX_NOTES, 0)]
        for number in surplus:
            self._run("DELETE FROM watched WHERE number = ?", number)
        return len(surplus)

    def _add_columns(self) -> None:
        """Bring notes of an older version to this one, which that one goes on reading."""

        def missing() -> list[str]:
            there = {row[1] for row in self._watched.execute("PRAGMA table_info(watched)")}
            return [statement for name, statement in _LATER.items() if name not in there]

        if not missing():
            return
        self._watched.execute("BEGIN IMMEDIATE")  # another process may do the same for its folder
        for statement in missing():
            self._watched.execute(statement)
        self._watched.execute("COMMIT")

    def _finish(self, key: bytes) -> None:
        self._run("UPDATE watched SET begun_at = NULL WHERE folder = ? AND name = ?", self._folder, key)

    def _key(self, name: str) -> bytes:
        return os.fsencode(name.removeprefix(self._before))

    def _name(self, key: bytes) -> str:
        return self._before + os.fsdecode(key)

    def _run(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._watched.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise _storage_error(error) from error


def left_out_words(models: Sequence[str | None]) -> str:
    """Say how many pictures are left out because they were scored before, by which models, and what scores them again.

    Args:
        models: of each of these pictures what scored it, in words; None where nobody noted it.
    """
    one = len(models) == 1
    by = Counter(name for name in models if name is not None).most_common()
    each = [f"by {name}" if count == len(models) else f"{count} by {name}" for name, count in by]
    which = f" ({listed(each)})" if each else ""
    rest = "is left out; --again scores it" if one else "are left out; --again scores them"
    return f"{counted(len(models), 'picture was', 'pictures were')} scored before{which} and {rest}"


@contextmanager
def open_output(path: Path | None) -> Iterator[BinaryIO | None]:
    """Open the file that takes the lines, for appending and for one process alone; None for standard output.

    What stands after its last line end is settled first: half a line of ours is cut off, anything else is ended.

    Raises:
        StorageError: another process holds it; after a crash nobody could tell whose its last line is.
    """
    if path is None:
        yield None
        return
    new = not path.exists()
    with path.open("a+b") as file:
        busy = StorageError(f"another edgefl watch writes to {path}; give each its own file", "busy")
        with suppress(OSError):  # a share that knows no locks
            hold(file.fileno(), busy)
        if new:
            flush_to_disk(path.parent)
        _end_last_line(file)
        yield file


def write_line(output: BinaryIO, line: str) -> None:
    """Append a line and flush it to the disk."""
    _append(output, _bytes_of(line))


def _bytes_of(line: str) -> bytes:
    return line.encode() + b"\n"


def _append(output: BinaryIO, data: bytes) -> None:
    output.write(data)
    output.flush()
    os.fsync(output.fileno())


def _line_sha256(output: BinaryIO, position: int) -> bytes:
    """Give the SHA-256 of the line that begins at a position; of nothing where the output ends before."""
    output.seek(position)
    return hashlib.sha256(output.readline()).digest()


def _end_last_line(output: BinaryIO) -> None:
    """Cut off half a line of ours at the end of an output; end any other that has no line end."""
    end = start = output.seek(0, os.SEEK_END)
    last, most = b"", _READ_BYTES
    while start and b"\n" not in last:
        start, most = max(0, end - most), 2 * most
        output.seek(start)
        last = output.read(end - start)
    last = last[last.rfind(b"\n") + 1 :]
    if not last:
        return
    if _is_half(last):
        output.truncate(end - len(last))
    else:
        _append(output, b"\n")


def _is_half(last: bytes) -> bool:
    """Tell whether the end of an output is half a line of ours; one that lacks its line end alone is whole."""
    if not last.startswith(_BEGINNING):
        return _BEGINNING.startswith(last)
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return True
    return False


def _storage_error(error: sqlite3.Error) -> StorageError:
    return StorageError(f"edgefl watch cannot keep its notes: {error}; free space, or remove watched.sqlite3")

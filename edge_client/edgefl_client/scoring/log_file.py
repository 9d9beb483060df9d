"""A log of results: an SQLite file that takes a row for each, durably, and is never changed otherwise.

* A row is on the disk before its line is printed (`keep_commits`): what cannot be logged is not told.
* A picture is known by the SHA-256 of its file's bytes; its name, its place and its pixels are never kept.
* A row names everything that the numbers depend on: bundle, values, preprocessing, runtime, threads. Pictures run one
  at a time, so the same bytes, bundle and machine give the same numbers again, bit for bit.
* Rows are appended and never changed here. A log of an earlier version gets the columns that it lacks, empty in the
  rows that it has; that version goes on writing it.
* The file is its owner's alone (mode 0600). A file that is no such log is looked at and left as it is, the mode of its
  journal too.

Source: docs/security.md, check 70.
"""

import contextlib
import hashlib
import json
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import onnxruntime
import PIL

from edgefl_client.home import Home
from edgefl_client.scoring.network import Network
from edgefl_exchange.errors import NotEnrolled
from edgefl_exchange.membership import load_membership
from edgefl_protocol.distribution import DISTRIBUTION, VERSION
from edgefl_protocol.durable import flush_to_disk, keep_commits
from edgefl_protocol.errors import StorageError
from edgefl_protocol.pictures.imaging import PREPROCESSING
from edgefl_protocol.pictures.score import ModelInfo

_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True, kw_only=True)
class LogForm:
    """What a log holds: its mark as a file, its table, and the columns that its results fill."""

    noun: str  # of a row, and its table: `score` or `answer`
    mark: tuple[int, int]  # application id, and number of the form of the table
    beginning: tuple[str, ...]  # statements that make an empty file a log
    insert: str  # the statement that appends a row, of `SharedColumns` and `columns`
    columns: tuple[str, ...]  # that its results fill
    # of these, those that `beginning` does not make: logs of earlier versions lack them. The statement that adds each
    later: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SharedColumns:
    """What every row of one run shares."""

    device: str  # this member's name, or the machine's where it is a member of nothing
    model: ModelInfo  # which model speaks, and with which values
    preprocessing: str  # version of the image path, and digest of the bundle's settings for it
    temperature: float | None  # by which the probabilities are calibrated; None where the model has none
    threads: int  # of one run of the network


def circumstances(home: Home, model: ModelInfo, network: Network) -> SharedColumns:
    """Collect what the rows of a run share."""
    try:
        device = load_membership(home.member).name
    except NotEnrolled:
        device = platform.node() or "unnamed"
    settings = json.dumps(network.bundle.preprocess.to_json(), sort_keys=True).encode()
    return SharedColumns(
        device=device, model=model, temperature=network.temperature, threads=network.threads,
        preprocessing=f"{PREPROCESSING} {hashlib.sha256(settings).hexdigest()}",
    )  # fmt: skip


class LogFile:
    """A log, open for appending.

    Args:
        path: the file; made where it is missing.

    Raises:
        StorageError: the file cannot be used, or is none of these.
    """

    def __init__(
        self, path: Path, form: LogForm, shared: SharedColumns, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._path, self._form, self._shared, self._clock_ns = path, form, shared, clock_ns
        self._software = f"{DISTRIBUTION} {VERSION}, onnxruntime {onnxruntime.__version__}, pillow {PIL.__version__}"
        with self._mapped():
            fresh = not path.exists()
            if not fresh:
                self._check_head()
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            if fresh:
                flush_to_disk(path.parent)
            self._db = sqlite3.connect(path, timeout=10.0, isolation_level=None)
        try:
            with self._mapped():
                self._begin()
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def append(self, image_sha256: str | None, values: Mapping[str, Any]) -> None:
        """Append a row, durably; where that fails, the result must not be told.

        Args:
            image_sha256: of the file's bytes; None where it could not be read at all.
            values: for the columns of the form; one that is not there stays empty.
        """
        shared, model = self._shared, self._shared.model
        seconds, rest = divmod(self._clock_ns(), 10**9)
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 10**6:03d}Z"
        row: dict[str, Any] = {
            **dict.fromkeys(self._form.columns),
            "at": at, "device": shared.device, "software": self._software, "threads": shared.threads,
            "image_sha256": image_sha256, "model_id": model.id, "model_sha256": model.sha256,
            "model_version": model.version, "weights": model.state_kind, "weights_sha256": model.state_sha256,
            "preprocessing": shared.preprocessing, "temperature": shared.temperature,
            **values,
        }  # fmt: skip
        with self._mapped():
            self._db.execute(self._form.insert, row)

    def _check_head(self) -> None:
        """Refuse, before SQLite opens it, a file that our journal mode could change: a log is never in WAL.

        The header names the write and the read version at bytes 18 and 19 (SQLite file format, 1.3): 2 is WAL.
        """
        with self._path.open("rb") as file:
            head = file.read(20)
        if 2 in head[18:20] or (head and not head.startswith(_MAGIC[: len(head)])):
            raise self._no_log()

    def _no_log(self) -> StorageError:
        return StorageError(
            f"{self._path} is not a log of {self._form.noun}s of this version of edgefl; name another file",
            "not_a_log",
        )

    def _found(self) -> tuple[tuple[int, int], bool]:
        """Read whose file it is, and whether nothing is in it yet."""
        marks = [self._db.execute(pragma).fetchone()[0] for pragma in ("PRAGMA application_id", "PRAGMA user_version")]
        empty = not self._db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
        return (marks[0], marks[1]), empty

    def _begin(self) -> None:
        found, empty = self._found()  # before anything that could change the file
        if found != self._form.mark and not (empty and found == (0, 0)):
            raise self._no_log()
        keep_commits(self._db)
        self._db.execute("BEGIN IMMEDIATE")
        found, empty = self._found()
        if empty and found == (0, 0):
            for statement in self._form.beginning:
                self._db.execute(statement)
        elif found != self._form.mark:
            raise self._no_log()
        there = {name for (name,) in self._db.execute("SELECT name FROM pragma_table_info(?)", (self._form.noun,))}
        for statement in (add for name, add in self._form.later.items() if name not in there):
            self._db.execute(statement)
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
            why = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
            raise StorageError(
                f"the log {self._path} cannot be written: {why}; scoring stops, because every {self._form.noun} must "
                "be logged",
                "disk_full" if full else "log",
            ) from error

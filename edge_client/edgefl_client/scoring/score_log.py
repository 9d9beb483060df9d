"""`--log FILE.sqlite`: a row for every picture that was scored, or that could not be; off unless it is asked for.

* A row is on the disk before its line is printed (SQLite, `synchronous=FULL`): what cannot be logged is not told.
* A picture is known by the SHA-256 of its file's bytes; its name, its place and its pixels are never kept.
* A row names everything that the numbers depend on: bundle, values, preprocessing, runtime, threads. Pictures run one
  at a time, so the same bytes, bundle and machine give the same numbers again, bit for bit.
* Rows are appended and never changed here. The file is its owner's alone (mode 0600). A file that is no such log is
  looked at and left as it is, the mode of its journal too.

Source: docs/security.md, check 70.
"""

import contextlib
import hashlib
import json
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import onnxruntime
import PIL

from edgefl_client.home import Home
from edgefl_client.scoring.score_files import Failure, Result
from edgefl_exchange.errors import NotEnrolled
from edgefl_exchange.membership import load_membership
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.distribution import DISTRIBUTION, VERSION
from edgefl_protocol.durable import sync_folder
from edgefl_protocol.errors import StorageError
from edgefl_protocol.pictures.imaging import PREPROCESSING
from edgefl_protocol.pictures.score import ModelInfo, Score

_WHOSE = (0x45464C31, 1)  # application id "EFL1", and the number of the form of the table
_MAGIC = b"SQLite format 3\0"
_MARKS = ("PRAGMA application_id=1162234929", "PRAGMA user_version=1")
_SCHEMA = """
CREATE TABLE score (
    number INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    device TEXT NOT NULL,
    software TEXT NOT NULL,
    threads INTEGER NOT NULL,
    image_sha256 TEXT,
    model_id TEXT NOT NULL,
    model_sha256 TEXT NOT NULL,
    model_version INTEGER NOT NULL,
    weights TEXT NOT NULL,
    weights_sha256 TEXT NOT NULL,
    preprocessing TEXT NOT NULL,
    temperature REAL,
    predicted TEXT,
    probabilities TEXT,
    evidence TEXT,
    vacuity REAL,
    dissonance REAL,
    entropy_nats REAL,
    out_of_scope INTEGER,
    refer INTEGER,
    refer_reasons TEXT,
    error_code TEXT
) STRICT
"""
_INSERT = """
INSERT INTO score (
    at, device, software, threads, image_sha256, model_id, model_sha256, model_version, weights, weights_sha256,
    preprocessing, temperature, predicted, probabilities, evidence, vacuity, dissonance, entropy_nats, out_of_scope,
    refer, refer_reasons, error_code
) VALUES (
    :at, :device, :software, :threads, :image_sha256, :model_id, :model_sha256, :model_version, :weights,
    :weights_sha256, :preprocessing, :temperature, :predicted, :probabilities, :evidence, :vacuity, :dissonance,
    :entropy_nats, :out_of_scope, :refer, :refer_reasons, :error_code
)
"""
_NUMBERS = (
    "predicted", "probabilities", "evidence", "vacuity", "dissonance", "entropy_nats", "out_of_scope", "refer",
    "refer_reasons", "error_code",
)  # fmt: skip
_OUT_OF_SCOPE = frozenset({"not_skin", "unseen_class"})


@dataclass(frozen=True, kw_only=True)
class SharedColumns:
    """What every row of one run shares."""

    device: str  # this member's name, or the machine's where it is a member of nothing
    model: ModelInfo  # which model speaks, and with which values
    preprocessing: str  # version of the image path, and digest of the bundle's settings for it
    temperature: float | None  # by which the probabilities are calibrated; None where the model has none
    threads: int  # of one run of the network


def circumstances(
    home: Home, bundle: Bundle, model: ModelInfo, temperature: float | None, threads: int
) -> SharedColumns:
    """Collect what the rows of a run share."""
    try:
        device = load_membership(home.member).name
    except NotEnrolled:
        device = platform.node() or "unnamed"
    settings = json.dumps(bundle.preprocess.to_json(), sort_keys=True).encode()
    return SharedColumns(
        device=device, model=model, temperature=temperature, threads=threads,
        preprocessing=f"{PREPROCESSING} {hashlib.sha256(settings).hexdigest()}",
    )  # fmt: skip


class ScoreLog:
    """The log, open for appending.

    Args:
        path: the file; made where it is missing.

    Raises:
        StorageError: the file cannot be used, or is none of these.
    """

    def __init__(self, path: Path, shared: SharedColumns, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._path, self._shared, self._clock_ns = path, shared, clock_ns
        self._software = f"{DISTRIBUTION} {VERSION}, onnxruntime {onnxruntime.__version__}, pillow {PIL.__version__}"
        with self._mapped():
            fresh = not path.exists()
            if not fresh:
                self._check_head()
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            if fresh:
                sync_folder(path.parent)
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

    def note(self, result: Result, image_sha256: str | None) -> None:
        """Append a row, durably; where that fails, the result must not be told.

        Args:
            result: what was found; its name is not kept.
            image_sha256: of the file's bytes; None where it could not be read at all.
        """
        shared, model = self._shared, self._shared.model
        seconds, rest = divmod(self._clock_ns(), 10**9)
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 10**6:03d}Z"
        row: dict[str, Any] = {
            **dict.fromkeys(_NUMBERS),
            "at": at, "device": shared.device, "software": self._software, "threads": shared.threads,
            "image_sha256": image_sha256, "model_id": model.id, "model_sha256": model.sha256,
            "model_version": model.version, "weights": model.state_kind, "weights_sha256": model.state_sha256,
            "preprocessing": shared.preprocessing, "temperature": shared.temperature,
            **({"error_code": result.code} if isinstance(result, Failure) else _numbers(result)),
        }  # fmt: skip
        with self._mapped():
            self._db.execute(_INSERT, row)

    def _check_head(self) -> None:
        """Refuse, before SQLite opens it, a file that our journal mode could change: a log is never in WAL.

        The header names the write and the read version at bytes 18 and 19 (SQLite file format, 1.3): 2 is WAL.
        """
        with self._path.open("rb") as file:
            head = file.read(20)
        if 2 in head[18:20] or (head and not head.startswith(_MAGIC[: len(head)])):
            raise self._no_log()

    def _no_log(self) -> StorageError:
        return StorageError(f"{self._path} is not a log of this version of edgefl; name another file", "not_a_log")

    def _found(self) -> tuple[tuple[int, int], bool]:
        """Read whose file it is, and whether nothing is in it yet."""
        marks = [self._db.execute(pragma).fetchone()[0] for pragma in ("PRAGMA application_id", "PRAGMA user_version")]
        empty = not self._db.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0]
        return (marks[0], marks[1]), empty

    def _begin(self) -> None:
        found, empty = self._found()  # before anything that could change the file
        if found != _WHOSE and not (empty and found == (0, 0)):
            raise self._no_log()
        self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("BEGIN IMMEDIATE")
        found, empty = self._found()
        if empty and found == (0, 0):
            for statement in (_SCHEMA, *_MARKS):
                self._db.execute(statement)
        elif found != _WHOSE:
            raise self._no_log()
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
            why = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
            raise StorageError(
                f"the log {self._path} cannot be written: {why}; scoring stops, because every score must be logged",
                "disk_full" if full else "log",
            ) from error


def _numbers(score: Score) -> dict[str, Any]:
    """Fill the columns of one score. Numbers are written so that reading them gives the same bits."""
    return {
        "predicted": score.predicted,
        "probabilities": json.dumps(dict(score.probabilities)),
        "evidence": None if score.evidence is None else json.dumps(dict(score.evidence)),
        "vacuity": score.vacuity,
        "dissonance": score.dissonance,
        "entropy_nats": score.entropy_nats,
        "out_of_scope": int(score.predicted is None or bool(_OUT_OF_SCOPE & set(score.refer_reasons))),
        "refer": int(score.refer),
        "refer_reasons": " ".join(score.refer_reasons),
    }

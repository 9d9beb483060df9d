"""What passes between the server and its aggregation worker: a folder with `job.json`, and the result's files.

    state.payload, broadcast-0.payload, …   what the store takes over as it lies; the server reads none of it
    result.json                             which file is whose, written last: without it there is no result
    errors                                  what the job said on standard error

Guarantees: the worker reads files that the store wrote and leaves a result that is there whole, or not at all; the
server reads its table bounded and checked, so a network of any size costs it no memory. Both sides of the border are in
this module, so they cannot drift apart. Large replies are mapped from their files, and whoever goes from one to the
next has the pages of one in memory, however many there are. Nothing here imports the trainer. Source:
docs/security.md, decision 7 and reliability.
"""

import mmap
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from numpy.typing import NDArray

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorSettings, ProtectionSettings
from edgefl_protocol import Payload, digest
from edgefl_protocol.durable import open_bounded, read_bounded, write_atomic
from edgefl_protocol.fields import Plain

JobKind = Literal["start", "aggregate", "broadcast"]
GateWord = Literal["", "accepted", "refused"]  # "" where no gate was asked

MAX_RESULT_BYTES = 2**31
MAPPED_BYTES = 2**20  # a reply from here on is mapped: the file of a blob never changes
_OTHER_FILES = 128  # that the worker may have open beside them
ERRORS = "errors"
_MAX_JOB_BYTES = 16 * 2**20
_JOB = "job.json"
_RESULT = "result.json"
_STATE = "state.payload"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work: "start" makes the first state, "aggregate" the next one; each makes the broadcasts after it,
    and "broadcast" does nothing else."""

    kind: JobKind
    number: int  # the round to aggregate, or to make broadcasts for; 0 with "start"
    method: str  # a name of the method table or module:Class
    settings: Mapping[str, Plain]  # its hyper-parameters
    task: Mapping[str, Any]  # fields of the trainer's `Task`, the backbone's description under "backbone"
    sites: tuple[str, ...] = ()  # names of the members that get a broadcast, in name order
    state: str | None = None  # file of the server's state (before `lay_out`: blob); None with "start"
    replies: Mapping[str, str] = {}  # site name → file (or blob) of its reply
    quorum: int  # replies below which nothing is aggregated
    protection: ProtectionSettings = ProtectionSettings()
    gone: tuple[str, ...] = ()  # names of members that were shut out: what came from them alone leaves the state
    granted: Mapping[str, int] = {}  # site name → most images that the operator approved it for
    gate: tuple[str, ...] = ()  # command that judges the new state (`gate`); () for none
    gate_s: float = 0.0  # longest run of it
    order_key: str = ""  # 64 hex digits from which the order of peers is drawn; known to the server only


class EncodedPayloads(Mapping[str, bytes]):
    """Payloads by name that become bytes one at a time, each when it is asked for: a network may go to many sites."""

    def __init__(self, payloads: Mapping[str, Payload]) -> None:
        self._payloads = payloads

    def __getitem__(self, name: str) -> bytes:
        return self._payloads[name].to_bytes()

    def __iter__(self) -> Iterator[str]:
        return iter(self._payloads)

    def __len__(self) -> int:
        return len(self._payloads)


@dataclass(frozen=True)
class JobResult:
    """What the worker made, before it leaves it."""

    state: bytes  # of the server; empty with "broadcast", and where nothing could be aggregated
    phases: tuple[str, ...]  # of every exchange in order: "warm", "train" or "final"
    broadcasts: Mapping[str, bytes]  # site name → its broadcast of the next round ("broadcast": of round `number`)
    refused: Mapping[str, str] = field(default_factory=dict)  # site name → why its reply does not count
    problem: str = ""  # why nothing could be aggregated
    bounded: Mapping[str, str] = field(default_factory=dict)  # site name → why its reply counts for less than it says
    noticed: Mapping[str, str] = field(default_factory=dict)  # site name → what is odd about its maps or features
    gate: GateWord = ""  # "refused": `state` is the one before the round
    gate_said: str = ""


class JobFiles(msgspec.Struct, frozen=True):
    """What the worker left: as `JobResult`, with files in the place of bytes."""

    state: Path | None
    state_sha256: str  # of the arrays in it; "" where there is none
    phases: tuple[str, ...]
    broadcasts: Mapping[str, Path]
    refused: Mapping[str, str]
    problem: str
    bounded: Mapping[str, str]
    noticed: Mapping[str, str] = {}
    gate: GateWord = ""
    gate_said: str = ""


def make_job(settings: CoordinatorSettings, kind: JobKind, number: int, **more: Any) -> Job:
    """Return a job of the federation that `settings` describe; `more` are further fields of `Job`."""
    task = settings.task
    return Job(
        kind=kind,
        number=number,
        method=task.method,
        settings=dict(task.settings),
        task={
            "name": task.name,
            "classes": list(task.classes),
            "backbone": dict(task.backbone),
            "rounds": settings.rounds.count,
            "epochs": task.epochs,
            "seed": task.seed,
        },
        quorum=settings.rounds.quorum_min,
        protection=settings.protection,
        **more,
    )


def write_job(folder: Path, job: Job) -> None:
    """Write `job.json` durably."""
    write_atomic(folder / _JOB, msgspec.json.encode(job), mode=0o600)


def read_job(folder: Path) -> Job:
    """Read `job.json`, which this program wrote."""
    return msgspec.json.decode(read_bounded(folder / _JOB, _MAX_JOB_BYTES), type=Job)


def write_result(folder: Path, result: JobResult) -> None:
    """Write the result: it is there whole, or not at all."""
    files = {name: folder / f"broadcast-{number}.payload" for number, name in enumerate(sorted(result.broadcasts))}
    for name, file in files.items():
        write_atomic(file, result.broadcasts[name], mode=0o600)
    state, sha256 = None, ""
    if result.state:
        state, sha256 = folder / _STATE, digest(Payload.from_bytes(result.state, MAX_RESULT_BYTES).arrays)
        write_atomic(state, result.state, mode=0o600)
    told = (result.refused, result.problem, result.bounded, result.noticed, result.gate, result.gate_said)
    table = JobFiles(state, sha256, result.phases, files, *told)
    write_atomic(folder / _RESULT, msgspec.json.encode(table, enc_hook=lambda path: path.name), mode=0o600)


def read_result(folder: Path) -> JobFiles:
    """Read which files the worker left; whatever their names, they lie in `folder`.

    A `StorageError` where there is no result; an `OperatorError` where it lacks a part, or is no JSON.
    """
    data = read_bounded(folder / _RESULT, _MAX_JOB_BYTES)
    try:
        return msgspec.json.decode(data, type=JobFiles, dec_hook=lambda _, name: folder / Path(name).name)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"the aggregation worker left a damaged result: {error}") from error


def read_replies(job: Job) -> dict[str, Payload]:
    """Read the replies of a job, by site in name order; what is made from one, such as a shortened update, is a copy.

    Raises:
        StorageError: a file is missing.
        PayloadError: one breaks its form.
    """
    window = _Window(_raise_descriptors(len(job.replies)))
    return {name: _read_reply(Path(file), window) for name, file in sorted(job.replies.items())}


class _Window:
    """Lets go of the pages of one mapped file when another is looked at; they come again from the file."""

    def __init__(self, most: int) -> None:
        self._last: mmap.mmap | None = None
        self._left = most  # files that may still be mapped

    def map(self, path: Path) -> mmap.mmap | None:
        """Map a large file; None where it is small, or cannot be mapped."""
        with open_bounded(path, MAX_RESULT_BYTES) as file:
            if self._left <= 0 or path.stat().st_size < MAPPED_BYTES:
                return None
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError:  # of a file system that maps nothing
                return None
        self._left -= 1
        self.look_at(mapped)
        return mapped

    def look_at(self, mapped: mmap.mmap) -> None:
        if self._last is not None and self._last is not mapped:
            self._last.madvise(mmap.MADV_DONTNEED)
        self._last = mapped


class _MappedArrays(Mapping[str, NDArray[Any]]):
    """The arrays of a mapped reply."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], mapped: mmap.mmap, window: _Window) -> None:
        self._arrays, self._mapped, self._window = arrays, mapped, window

    def __getitem__(self, name: str) -> NDArray[Any]:
        found = self._arrays[name]
        self._window.look_at(self._mapped)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _read_reply(path: Path, window: _Window) -> Payload:
    mapped = window.map(path)
    if mapped is None:
        return Payload.from_bytes(read_bounded(path, MAX_RESULT_BYTES), MAX_RESULT_BYTES)
    payload = Payload.from_bytes(mapped, MAX_RESULT_BYTES)
    in_turn = _MappedArrays(payload.arrays, mapped, window)
    object.__setattr__(payload, "arrays", in_turn)  # the same arrays
    return payload


def _raise_descriptors(replies: int) -> int:
    """Allow this process an open file for each reply, for a mapping keeps one; return how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = replies + _OTHER_FILES
    if soft < wanted and (hard == resource.RLIM_INFINITY or soft < hard):
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft - _OTHER_FILES

"""What passes between the server and its aggregation worker: a folder with `job.json`, and the result's files.

    state.payload, broadcast-0.payload, …   what the store takes over as it lies; the server reads none of it
    result.json                             which file is whose, written last: without it there is no result
    errors                                  what the job said on standard error

Guarantees: the worker reads files that the store wrote and leaves a result that is there whole, or not at all; the
server reads its table bounded and checked, so a network of any size costs it no memory. Both sides of the border are in
this module, so they cannot drift apart. Nothing here imports the trainer. Source: docs/security.md, decision 7 and
reliability.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from edgefl_coordinator.settings import Plain, Settings
from edgefl_protocol import Payload, digest
from edgefl_protocol.durable import read_bounded, write_atomic

JobKind = Literal["start", "aggregate", "broadcast"]

MAX_RESULT_BYTES = 2**31
ERRORS = "errors"
_MAX_JOB_BYTES = 16 * 2**20
_JOB = "job.json"
_RESULT = "result.json"
_STATE = "state.payload"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One piece of work.

    Attributes:
        kind: "start" makes the first state; "aggregate" the state after round `number`; "broadcast" only broadcasts.
        number: the round to aggregate, or to make broadcasts for; 0 with "start".
        method: a name of the method table or module:Class.
        settings: its hyper-parameters.
        task: fields of the trainer's `Task`, the backbone's description under "backbone".
        sites: names of the members that get a broadcast, in name order.
        state: file of the server's state; None with "start".
        replies: site name → file of its reply.
        quorum: replies below which nothing is aggregated.
        order_key: 64 hex digits from which the order of peers is drawn; known to the server only.
    """

    kind: JobKind
    number: int
    method: str
    settings: Mapping[str, Plain]
    task: Mapping[str, Any]
    sites: tuple[str, ...]
    state: str | None
    replies: Mapping[str, str]
    quorum: int
    order_key: str


class Encoded(Mapping[str, bytes]):
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
    """What the worker made, before it leaves it.

    Attributes:
        state: bytes of the server's state; empty with "broadcast", and where nothing could be aggregated.
        phases: kind of every exchange in order: "warm", "train" or "final".
        broadcasts: site name → bytes of its broadcast of the next round (with "broadcast": of round `number`).
        refused: site name → why its reply does not count.
        problem: why nothing could be aggregated; "" where something was.
    """

    state: bytes
    phases: tuple[str, ...]
    broadcasts: Mapping[str, bytes]
    refused: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class JobFiles:
    """What the worker left; as `JobResult`, with files in the place of bytes.

    Attributes:
        state: file of the server's state; None where there is none.
        state_sha256: digest of the arrays in it; "" likewise.
        phases: see `JobResult`.
        broadcasts: site name → file of its broadcast.
        refused: see `JobResult`.
        problem: see `JobResult`.
    """

    state: Path | None
    state_sha256: str
    phases: tuple[str, ...]
    broadcasts: Mapping[str, Path]
    refused: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def make_job(
    settings: Settings,
    kind: JobKind,
    number: int,
    *,
    sites: tuple[str, ...] = (),
    state: str | None = None,
    replies: Mapping[str, str] | None = None,
    order_key: str = "",
) -> Job:
    """Return a job of the federation that `settings` describe; see `Job` for the arguments."""
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
        sites=sites,
        state=state,
        replies=replies or {},
        quorum=settings.rounds.quorum_min,
        order_key=order_key,
    )


def write_job(folder: Path, job: Job) -> None:
    """Write `job.json` durably."""
    write_atomic(folder / _JOB, json.dumps(asdict(job), sort_keys=True).encode(), mode=0o600)


def read_job(folder: Path) -> Job:
    """Read `job.json`, which this program wrote."""
    table = json.loads(read_bounded(folder / _JOB, _MAX_JOB_BYTES))
    return Job(**{**table, "sites": tuple(table["sites"])})


def write_result(folder: Path, result: JobResult) -> None:
    """Write the result: it is there whole, or not at all."""
    files = {name: f"broadcast-{number}.payload" for number, name in enumerate(sorted(result.broadcasts))}
    for name, file in files.items():
        write_atomic(folder / file, result.broadcasts[name], mode=0o600)
    state_sha256 = ""
    if result.state:
        write_atomic(folder / _STATE, result.state, mode=0o600)
        state_sha256 = digest(Payload.from_bytes(result.state, MAX_RESULT_BYTES).arrays)
    table = {
        "state_sha256": state_sha256,
        "phases": list(result.phases),
        "broadcasts": files,
        "refused": dict(result.refused),
        "problem": result.problem,
    }
    write_atomic(folder / _RESULT, json.dumps(table, sort_keys=True).encode(), mode=0o600)


def read_result(folder: Path) -> JobFiles:
    """Read which files the worker left.

    Raises:
        StorageError: there is no result.
        KeyError, ValueError: it lacks a part, or is no JSON.
    """
    table = json.loads(read_bounded(folder / _RESULT, _MAX_JOB_BYTES))
    state_sha256 = str(table["state_sha256"])
    return JobFiles(
        state=folder / _STATE if state_sha256 else None,
        state_sha256=state_sha256,
        phases=tuple(str(kind) for kind in table["phases"]),
        broadcasts={str(name): folder / Path(str(file)).name for name, file in table["broadcasts"].items()},
        refused={str(name): str(why) for name, why in table["refused"].items()},
        problem=str(table["problem"]),
    )

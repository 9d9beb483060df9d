"""Where learning stands, in one file: after a kill at any moment the next start goes on from the last one written.

The file is replaced atomically and carries a checksum (`files`). It names the bundle it belongs to and a digest of what
is being learned from, so weights are never continued on another network, nor a round on other pictures.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.files import read_checked, write_checked
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.payload import Payload
from edgefl_protocol.training import COUNTS, MEANS, fresh_state

_FILE = "checkpoint.payload"
_SUMS = ("loss", "kd", "dead")

Stage = Literal["learning", "learned", "judged"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A point between two steps.

    Attributes:
        bundle_sha256: of the bundle's file.
        work: digest of pictures and settings of this round.
        stage: `learning`; `learned` where all epochs are done and the gate is not; `judged` after it.
        round: from 1.
        epoch: of the next step, from 0.
        step: of the epoch, from 0.
        sums: sums over this epoch's pictures so far of what a step reports.
        limits: class name to the highest group held back (`rows.hold_back`).
        state: what steps change.
        peers: the others' maps of this round (`peers.peer_targets`).
    """

    bundle_sha256: str
    work: str
    stage: Stage
    round: int
    epoch: int
    step: int
    limits: Mapping[str, str]
    state: Mapping[str, NDArray[Any]]
    peers: Mapping[str, NDArray[np.float32]]
    sums: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))


def save_checkpoint(home: Home, point: Checkpoint) -> None:
    """Write a checkpoint durably.

    Raises:
        StorageError: the disk is full; the checkpoint before is still there.
    """
    scalars: dict[str, int | float | str] = {
        "bundle_sha256": point.bundle_sha256,
        "work": point.work,
        "stage": point.stage,
        "round": point.round,
        "epoch": point.epoch,
        "step": point.step,
        "limits": json.dumps(dict(point.limits), sort_keys=True),
        **{f"sum.{name}": float(point.sums[name]) for name in _SUMS},
    }
    folder = home.prepare(home.learning)
    write_checked(folder / _FILE, Payload({**point.state, **point.peers}, scalars))


def load_checkpoint(home: Home, bundle: Bundle) -> Checkpoint | None:
    """The checkpoint that belongs to a bundle, None where there is none or it belongs to another.

    Raises:
        StorageError: the file is damaged.
    """
    file = home.learning / _FILE
    if not file.exists() or bundle.training is None:
        return None
    try:
        payload = read_checked(file)
        if payload.scalars["bundle_sha256"] != bundle.sha256:
            return None
        point = _read(payload)
    except (PayloadError, KeyError, TypeError, ValueError) as error:
        raise _damaged(file) from error
    wanted = fresh_state(bundle.training, bundle.weights)
    if {name: value.shape for name, value in point.state.items()} != {n: v.shape for n, v in wanted.items()}:
        raise _damaged(file)
    return point


def _read(payload: Payload) -> Checkpoint:
    facts, arrays = payload.scalars, dict(payload.arrays)
    stages: dict[object, Stage] = {"learning": "learning", "learned": "learned", "judged": "judged"}
    limits = json.loads(str(facts["limits"]))
    if not isinstance(limits, dict):
        raise ValueError("limits are no object")
    return Checkpoint(
        bundle_sha256=str(facts["bundle_sha256"]),
        work=str(facts["work"]),
        stage=stages[facts["stage"]],
        round=int(facts["round"]),
        epoch=int(facts["epoch"]),
        step=int(facts["step"]),
        limits={str(name): str(limit) for name, limit in limits.items()},
        peers={name: arrays.pop(name) for name in (MEANS, COUNTS)},
        state=arrays,
        sums={name: float(facts[f"sum.{name}"]) for name in _SUMS},
    )


@contextlib.contextmanager
def only_one(home: Home) -> Iterator[None]:
    """Hold this home's learning; a second process is refused.

    Raises:
        LearningError: another process learns here (`busy`).
    """
    descriptor = os.open(home.prepare(home.learning) / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LearningError("another edgefl train is at work in this home; wait for it to end", "busy") from error
        yield
    finally:
        os.close(descriptor)


def _damaged(file: Path) -> StorageError:
    return StorageError(
        f"{file} is damaged: it does not say where learning stands; begin again with edgefl train --restart", "damaged"
    )

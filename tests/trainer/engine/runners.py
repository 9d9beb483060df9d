"""Sites of the engine's tests that learn nothing; here alone, because each worker imports what they are made of."""

import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgefl_protocol import Payload
from edgefl_protocol.errors import ImageError
from edgefl_trainer.contract import State
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.workers import pool
from edgefl_trainer.errors import TrainingError

PATIENCE_S = 300  # on a machine that may be busy
PARTITION = "digest of the rows"
ERRORS = {
    "known": lambda: ImageError("picture 7 cannot be read", "too_large"),
    "training": lambda: TrainingError("site north diverged"),
    "defect": lambda: Strange("this", "that"),
}


@dataclass(frozen=True)
class Runner:
    """A site of that method; counts how often it works."""

    name: str
    worked: list = field(default_factory=list)

    def local_round(self, state, broadcast, report):
        number = hashlib.sha256(
            f"{self.name}{broadcast.scalars['phase']}{broadcast.scalars['round']}".encode()
        ).digest()[0]
        own = 0.5 * state.arrays.get("own", np.zeros(2)) + broadcast.arrays["sum"] + number
        self.worked.append((broadcast.scalars["phase"], broadcast.scalars["round"]))
        assert broadcast.scalars["to"] == self.name
        return SiteResult(State({"own": own}, {"n": number}), Payload({"own": own}, {}), {"loss": float(number)})


@dataclass(frozen=True)
class Faulty:
    """A site that fails in the first round, until `mended` is there: its process dies, or it raises."""

    inner: Runner
    mended: Path
    after: Path | None = None  # what it waits for before it fails
    error: str = ""  # of `ERRORS`; none: kill −9

    def local_round(self, state, broadcast, report):
        if broadcast.scalars["round"] == 1 and not self.mended.exists():
            wait_for(self.after)
            if not self.error:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ERRORS[self.error]()
        return self.inner.local_round(state, broadcast, report)


@dataclass(frozen=True)
class Reading:
    """A site that reads every weight of a network, and waits until `others` did so at the same time."""

    name: str
    network: Any
    folder: Path
    others: tuple[str, ...]

    def local_round(self, state, broadcast, report):
        total = float(sum(value.double().sum() for value in self.network.state_dict().values()))
        (self.folder / f"{broadcast.scalars['phase']}{broadcast.scalars['round']}{self.name}").touch()
        for other in self.others:
            wait_for(self.folder / f"{broadcast.scalars['phase']}{broadcast.scalars['round']}{other}")
        return SiteResult(State({"own": np.full(2, total)}, {}), Payload({"own": np.full(2, total)}, {}), {})


def wait_for(path: Path | None) -> None:
    end = time.monotonic() + PATIENCE_S
    while path is not None and not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


class Strange(Exception):
    """An error that no message can make again: what it is made of is not what it was given."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def judged(name, state, broadcast):
    return {"tune_accuracy": float(state.arrays["own"][0]) + broadcast.scalars["round"]}


@dataclass(frozen=True)
class Runners:
    """What a worker of these tests makes of a run's settings."""

    sites: dict[str, Any]
    digests: dict[str, str]

    def learn(self, name, state, broadcast, report):
        return self.sites[name].local_round(state, broadcast, report)

    def judge(self, name, state, broadcast):
        return judged(name, state, broadcast)


def settings_of(names, faults: dict[str, dict[str, str]] | None = None, reading: Path | None = None) -> str:
    """The settings of a run of these sites, in words: `faults` by site, or the folder in which all read a network."""
    return json.dumps({"names": names, "faults": faults or {}, "reading": str(reading or "")})


def read(settings: str, threads: int, network) -> Runners:
    told = json.loads(settings)
    sites: dict[str, Any] = {name: Runner(name) for name in told["names"]}
    for name, fault in told["faults"].items():
        after = Path(fault["after"]) if "after" in fault else None
        sites[name] = Faulty(Runner(name), Path(fault["mended"]), after, fault.get("error", ""))
    if told["reading"]:
        sites = {name: Reading(name, network.network, Path(told["reading"]), told["names"]) for name in sites}
    return Runners(sites, {"partition_sha256": PARTITION})


def work(*given) -> None:
    """Be a worker, of these sites."""
    pool.read_run = read
    pool._work(*given)

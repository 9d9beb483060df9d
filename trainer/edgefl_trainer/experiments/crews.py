"""Who makes the runs of a study: this process, one after the other, or several processes side by side.

Guarantees: a run that fails, in whatever way, or whose process ends, is an outcome with its cause; leaving `Processes`
stops what still runs, resumable. Threads of a process are those of `edgefl-train run`: the same bits however many.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine.folder import make_folder
from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.errors import BusyRunError
from edgefl_trainer.experiments.one_run import BUSY_STATUS, make_run

HERE = "edgefl_trainer.experiments.one_run"  # the program of a run whose sites work on this machine
LOOK_SECONDS = 0.5  # between two looks at the processes
STOP_SECONDS = 30.0  # that a process may take to stop
TAIL_BYTES = 1 << 14  # of a log, where the cause of a failure stands
CARDS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class RunJob:
    """One run to be made, and the run that has to be finished before."""

    name: str
    head: str  # how a person is told of it
    settings: RunSettings
    folder: Path
    after: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended; no cause: its run is finished."""

    job: RunJob
    cause: str = ""
    busy: bool = False  # another process works on its run: nothing was done, and nothing is wrong


class Crew(Protocol):
    """Who makes runs."""

    @property
    def free(self) -> int | None:
        """The lowest number of a worker that has nothing to do; None where all have."""

    def begin(self, job: RunJob) -> int:
        """Give a job to the free worker, and return the process that makes it."""

    def ended(self) -> Outcome:
        """Wait for the next job that ends."""

    def pause(self) -> None:
        """Wait a moment for what others make."""

    def stop(self) -> None:
        """End what is under way so that it can go on later."""


class ThisProcess:
    """Makes one run at a time, here."""

    def __init__(self, track: Sequence[str] = ()) -> None:
        self._job: RunJob | None = None
        self._track = track

    @property
    def free(self) -> int | None:
        """The one worker, unless it has a job."""
        return 1 if self._job is None else None

    def begin(self, job: RunJob) -> int:
        """Take a job; `ended` makes it."""
        self._job = job
        return os.getpid()

    def ended(self) -> Outcome:
        """Make the run."""
        job, self._job = self._job, None
        assert job is not None
        try:
            make_run(job.settings, job.folder, job.name, self._track)
        except EdgeflError as error:
            return Outcome(job, str(error), busy=isinstance(error, BusyRunError))
        except Exception as error:  # noqa: BLE001 - whatever it is, as where a card is full: the others are tried
            traceback.print_exc()
            return Outcome(job, f"{type(error).__name__}: {error}")
        return Outcome(job)

    def pause(self) -> None:
        """Wait a moment."""
        time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """Do nothing: a run here has stopped by itself."""


@dataclass
class _Worker:
    job: RunJob
    process: "subprocess.Popen[bytes]"
    log: Path


class Processes:
    """Makes several runs at once, each in a process of its own with a log of its own."""

    def __init__(
        self,
        workers: int,
        logs: Path,
        look: Callable[[], None] = lambda: None,
        track: Sequence[str] = (),
        program: str = HERE,
    ) -> None:
        """Begin nothing yet; `look` is called while processes are waited for, `program` is the module of each."""
        self._logs, self._look, self._track, self._program = logs, look, track, program
        self._seats: dict[int, _Worker | None] = dict.fromkeys(range(1, workers + 1))
        self._cards = visible_cards(os.environ) if workers > 1 else []  # one alone has them all

    @property
    def free(self) -> int | None:
        """The lowest number of a worker without a process."""
        return next((number for number, worker in self._seats.items() if worker is None), None)

    def begin(self, job: RunJob) -> int:
        """Start a process, in a session of its own: Ctrl-C is for the command, which stops each process once."""
        number = self.free
        assert number is not None
        log = self._logs / f"{job.name.replace('/', '.')}.log"
        make_folder(log.parent)
        with log.open("ab") as stream:
            process = subprocess.Popen(  # noqa: S603 - Python itself, and a module of ours
                [sys.executable, "-m", self._program],
                stdin=subprocess.PIPE, stdout=stream, stderr=stream, start_new_session=True,
                env=environment_of(number, self._cards, os.environ),
            )  # fmt: skip
        self._seats[number] = _Worker(job, process, log)
        asked = {
            "settings": job.settings.to_toml(),
            "folder": str(job.folder),
            "name": job.name,
            "track": list(self._track),
        }
        with suppress(BrokenPipeError):  # it has ended already, and `ended` says how
            _input(process).write(json.dumps(asked).encode() + b"\n")
            _input(process).flush()
        return process.pid

    def ended(self) -> Outcome:
        """Look at the processes until one has ended."""
        while True:
            for number, worker in self._seats.items():
                if worker is not None and worker.process.poll() is not None:
                    self._seats[number] = None
                    _close(worker.process)
                    status = worker.process.returncode
                    return Outcome(worker.job, _cause(status, worker.log), busy=status == BUSY_STATUS)
            self.pause()

    def pause(self) -> None:
        """Show how it stands, and wait a moment."""
        self._look()
        time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End the input of each process, by which it stops as by Ctrl-C; kill what does not in time."""
        processes = [worker.process for worker in self._seats.values() if worker is not None]
        for process in processes:
            _close(process)
        until = time.monotonic() + STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _input(process: "subprocess.Popen[bytes]") -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _close(process: "subprocess.Popen[bytes]") -> None:
    with suppress(BrokenPipeError):  # it has ended already
        _input(process).close()


def _cause(status: int, log: Path) -> str:
    """Why a process ended: nothing where all is well, else its signal or the last line of its log."""
    if status == 0:
        return ""
    if status < 0:
        name = signal.Signals(-status).name
        memory = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{memory}; what it had finished is kept"
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = stream.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {status}"


def visible_cards(environment: Mapping[str, str]) -> Sequence[str]:
    """List the GPUs that processes may use, as CUDA is told them."""
    if CARDS in environment:
        return [card.strip() for card in environment[CARDS].split(",") if card.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def environment_of(worker: int, cards: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker's process is given: where there are several GPUs one of them, in turn."""
    given = {CARDS: cards[(worker - 1) % len(cards)]} if len(cards) > 1 else {}
    return {**environment, **given}

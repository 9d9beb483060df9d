"""The process of the aggregation worker, which stays between jobs because it takes seconds to import the trainer.

Both halves: the server holds a `WorkerProcess` and writes it folders, a line each; the worker calls `do_jobs`, which
forks for each of them and answers with a line, the exit status.

Guarantees: a job begins as if it were the first, whatever the one before did to its process, takes no longer than it
may, and its crash is its own; what it prints lies in its folder and is no answer. Where the worker crashed, was killed
or went to rest, the next job begins another. It ends with its input, so it does not outlive the server. A job that is
stopped leaves nothing of its session, the operator's gate included. Nothing here imports the trainer.
Source: docs/security.md, decision 7; docs/decisions/0034.
"""

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from edgefl_coordinator.errors import STOPPED, OperatorError
from edgefl_coordinator.rounds.jobs import ERRORS
from edgefl_protocol.durable import PASSPHRASE_VARIABLE

_REST_AFTER_S = 300.0  # between rounds a coordinator need not hold the memory of a trainer
WORKER = (sys.executable, "-m", "edgefl_coordinator.rounds.worker", str(_REST_AFTER_S))
_MAX_ERROR_BYTES = 4096


class WorkerProcess:
    """Runs one job at a time; `stop` ends worker and job from another thread."""

    def __init__(self, program: Sequence[str] = WORKER) -> None:
        self._program = program  # calls `do_jobs`
        self._asking, self._mutex = threading.Lock(), threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None  # a file, for a pipe that nobody reads would stop a worker that says much
        self._stopped = False

    def __call__(self, folder: Path, timeout_s: float) -> None:
        """Run the job in `folder` and wait for it.

        An `OperatorError` with its last line where it failed or took too long; of code `STOPPED` where it was stopped.
        """
        try:
            with self._asking:
                status = self._ask(folder, timeout_s)
                if status is None:  # the worker had just gone to rest
                    status = self._ask(folder, timeout_s)
            if status != 0:
                raise _failed(status, _last_bytes(folder / ERRORS))
        except OperatorError as error:
            if self._stopped:
                raise OperatorError("the coordinator stops; it does the job at the next start", STOPPED) from error
            raise

    def stop(self) -> None:
        """End the running job and start no other."""
        with self._mutex:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)
        with self._asking:  # who waits for an answer sees the end of it
            self._forget()

    def _ask(self, folder: Path, timeout_s: float) -> int | None:
        """Hand a job to the worker and return its exit status; None where the worker ended by itself before it."""
        running = self._begun()
        assert running.stdin is not None and running.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # told by the end of its output
            running.stdin.write(os.fsencode(folder) + b"\n")
        with selectors.DefaultSelector() as waiting:  # takes descriptors of a thousand connections, `select` does not
            waiting.register(running.stdout, selectors.EVENT_READ)
            answered = bool(waiting.select(timeout_s))
        if not answered:
            self._end(running)
            raise OperatorError(f"the aggregation worker took more than {timeout_s:g} s and was stopped")
        answer = running.stdout.readline()
        if not answer:
            said = self._forget()
            if running.returncode != 0:
                raise _failed(running.returncode, said)
            return None
        try:
            return int(answer)
        except ValueError:  # after another line each answer would be the job before's
            self._end(running)
            told = answer.decode(errors="replace").strip()[:100]
            raise OperatorError(f"the aggregation worker gave the unexpected answer {told!r} and was stopped") from None

    def _begun(self) -> "subprocess.Popen[bytes]":
        """Return the worker; a new one where there is none that lives."""
        if self._running is not None and self._running.poll() is not None:
            self._forget()
        with self._mutex:
            if self._stopped:
                raise OperatorError("no job begins any more", STOPPED)
            if self._running is None:
                pipe, self._said = subprocess.PIPE, tempfile.TemporaryFile()  # noqa: SIM115 - as long as the worker
                secrets = {PASSPHRASE_VARIABLE, "PGPASSWORD"}  # it opens no key, and no database
                self._running = subprocess.Popen(  # noqa: S603 - our own module
                    self._program,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=self._said,
                    bufsize=0,
                    start_new_session=True,
                    env={name: value for name, value in os.environ.items() if name not in secrets},
                )
            return self._running

    def _end(self, running: "subprocess.Popen[bytes]") -> None:
        _kill(running)
        self._forget()

    def _forget(self) -> bytes:
        """Wait for the end of the worker, close its pipes, end the job it may have left, and return what it said."""
        with self._mutex:
            running, self._running = self._running, None
            told, self._said = self._said, None
        if running is None or told is None:
            return b""
        running.communicate()
        _kill(running)
        with told:
            return _end_of(told)


def do_jobs(job: Callable[[Path], int], rest_after_s: float) -> int:
    """Do the jobs whose folders come on standard input, each in a fork; end after so long without one.

    Returns the exit status of this process, which may be a job's.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    while select.select([0], [], [], rest_after_s)[0]:
        line = os.read(0, 65536)  # whoever asks waits for the answer, so there is one line at a time
        if not line:
            break
        folder = Path(os.fsdecode(line.removesuffix(b"\n")))
        child = os.fork()
        if child == 0:
            os.close(answers)
            _say_into(folder)
            return job(folder)
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return 0


def _say_into(folder: Path) -> None:
    """Part from the streams of the worker: what the job says goes into its folder."""
    sys.stdout.flush()
    with Path(os.devnull).open("rb") as nothing, (folder / ERRORS).open("wb") as errors:
        for own, target in ((0, nothing), (1, errors), (2, errors)):
            os.dup2(target.fileno(), own)


def _kill(running: "subprocess.Popen[bytes]") -> None:
    """End the worker, the job it forked, and the gate that this one asks: the session is theirs alone."""
    found, killed = {running.pid}, set[int]()
    while left := found - killed:
        for group in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, or on its way
                os.killpg(group, signal.SIGKILL)
        killed |= left
        found = _groups(running.pid)  # again: one may have begun meanwhile


def _groups(session: int) -> set[int]:
    """Return the process groups that live in a session; Linux tells them, elsewhere there is nothing to read."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, group, of = stat.read_bytes().rpartition(b")")[2].split()[:4]
            if int(of) == session and state != b"Z":
                found.add(int(group))
    return found


def _failed(status: int | None, said: bytes) -> OperatorError:
    lines = said.decode(errors="replace").strip().splitlines() or ["no message"]
    return OperatorError(f"the aggregation worker failed ({status}): {lines[-1][:300]}")


def _last_bytes(path: Path) -> bytes:
    """Return what a job said last; nothing where it said nothing."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return _end_of(file)


def _end_of(file: IO[bytes]) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
    return file.read()

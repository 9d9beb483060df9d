"""The operator's gate: a program of theirs that judges what a round made, before any member gets it.

    PROGRAM … FOLDER    FOLDER holds before.payload and after.payload, the server's states, and round.json
    status 0            the new state counts
    status 3            the round is refused: the state before it stays; the last line printed is the reason
    another, or late    no verdict: nothing is published, and the round's job fails and is tried again

Guarantees: the program is started without a shell and is given no reply beside the states. Of the environment of
`serve` it has `ENVIRONMENT` and no more. It runs in a process group of its own, which ends with its verdict: what it
started itself does not live on. Of what it prints the end alone is kept, in memory, however much it is. Where maps
travel, a state is the members' maps under their names. It runs as the user of `serve`, in the aggregation worker, so
the verdict is stored with the state that it is about, in one transaction: whoever is killed before asks again.
Source: docs/security.md 4; docs/decisions/0053.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.jobs import Job
from edgefl_protocol.durable import write_atomic

_REFUSED: Final = 3  # as of every program of ours: docs/design.md 5
_MOST_SAID: Final = 300  # characters
_MOST_KEPT: Final = 4096  # bytes of the end
_READ_ON_S: Final = 1.0  # where a process left the gate's group and holds its output open
# What a program needs to find its files and to write a time or a letter; `env NAME=VALUE PROGRAM` gives it more.
ENVIRONMENT: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")


@dataclass(frozen=True)
class StateVerdict:
    """What the gate said of a state."""

    accepted: bool
    said: str  # the last line that it printed


def command_of(setting: str, home: Path) -> tuple[str, ...]:
    """Return the words of `protection.gate`, its program relative to the coordinator's folder; () for no gate."""
    words = shlex.split(setting)
    return (str(home / words[0]), *words[1:]) if words else ()


def judged(job: Job, phase: str, phases: int, before: bytes, after: bytes, scratch: Path | None) -> StateVerdict:
    """Ask the gate of a job whether `after` may take the place of `before`.

    An `OperatorError` where it gives no verdict.
    """
    about = {
        "round": job.number, "rounds": phases, "phase": phase, "method": job.method,
        "settings": dict(job.settings), "task": dict(job.task),
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=scratch, prefix="gate-") as name:
        folder = Path(name)
        for file, data in (("before.payload", before), ("after.payload", after)):
            write_atomic(folder / file, data, mode=0o600)
        write_atomic(folder / "round.json", json.dumps(about).encode(), mode=0o600)
        return ask(job.gate, folder, job.gate_s)


def ask(command: Sequence[str], folder: Path, most_s: float) -> StateVerdict:
    """Run the gate's command with a folder; an `OperatorError` where it gives no verdict."""
    try:
        status, out, errors = _ran([*command, str(folder)], folder, most_s)
    except subprocess.TimeoutExpired:
        raise OperatorError(f"the gate gave no verdict in {most_s:g} s and was stopped") from None
    except OSError as error:
        raise OperatorError(f"the gate {command[0]} cannot be started: {error.strerror}") from error
    if status not in (0, _REFUSED):
        why = _last_line(errors) or _last_line(out) or "no message"
        raise OperatorError(f"the gate gave no verdict, but ended with status {status}: {why}")
    return StateVerdict(status == 0, _last_line(out))


def _ran(command: Sequence[str], folder: Path, most_s: float) -> tuple[int, bytes, bytes]:
    """Run a program to its end; return its status and the ends of what it printed."""
    kept = {name: value for name in ENVIRONMENT if (value := os.environ.get(name)) is not None}
    with subprocess.Popen(  # noqa: S603 - the operator's own program, as words
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=kept,
        process_group=0,
    ) as gate:  # fmt: skip
        assert gate.stdout is not None and gate.stderr is not None
        out, errors = _End(gate.stdout), _End(gate.stderr)
        try:
            status = gate.wait(most_s)
        finally:
            with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
                os.killpg(gate.pid, signal.SIGKILL)
        return status, out.bytes(), errors.bytes()


class _End:
    """Reads a pipe to its end, so that nobody who writes has to wait, and keeps the last bytes."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._kept = pipe, b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            while part := os.read(self._pipe.fileno(), 2**16):
                self._kept = (self._kept + part)[-_MOST_KEPT:]

    def bytes(self) -> bytes:
        """Return them, once all was read."""
        self._reader.join(_READ_ON_S)
        return self._kept


def _last_line(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines() or [""]
    return "".join(one if one.isprintable() else " " for one in lines[-1])[:_MOST_SAID]

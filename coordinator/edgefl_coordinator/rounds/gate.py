"""The operator's gate: a program of theirs that judges what a round made, before any member gets it.

    PROGRAM … FOLDER    FOLDER holds before.payload and after.payload, the server's states, and round.json
    status 0            the new state counts
    status 3            the round is refused: the state before it stays; the last line printed is the reason
    another, or late    no verdict: nothing is published, and the round's job fails and is tried again

Guarantees: the program is started without a shell, is given no reply beside the states and no passphrase, and ends with
the job that asks it; what it started itself ends with the worker, minutes later. Where maps travel, a state is the
members' maps under their names. The program runs as the user of `serve`, in its environment otherwise. It runs in the
aggregation worker, so the verdict is stored with the state that it is about, in one transaction: whoever is killed
before asks again.
Source: docs/security.md 4; docs/decisions/0053.
"""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.jobs import Job
from edgefl_protocol.durable import write_atomic

_REFUSED: Final = 3  # as of every program of ours: docs/design.md 5
_MOST_SAID: Final = 300  # characters
_MOST_READ: Final = 4096  # bytes of the end


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
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            ran = subprocess.run(  # noqa: S603 - the operator's own program, as words
                [*command, str(folder)], stdin=subprocess.DEVNULL, stdout=out, stderr=errors, timeout=most_s,
                cwd=folder, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise OperatorError(f"the gate gave no verdict in {most_s:g} s and was stopped") from None
        except OSError as error:
            raise OperatorError(f"the gate {command[0]} cannot be started: {error.strerror}") from error
        if ran.returncode not in (0, _REFUSED):
            why = _last_line(errors) or _last_line(out) or "no message"
            raise OperatorError(f"the gate gave no verdict, but ended with status {ran.returncode}: {why}")
        return StateVerdict(ran.returncode == 0, _last_line(out))


def _last_line(said: IO[bytes]) -> str:
    said.seek(max(0, said.seek(0, 2) - _MOST_READ))
    lines = said.read().decode(errors="replace").strip().splitlines() or [""]
    return "".join(one if one.isprintable() else " " for one in lines[-1])[:_MOST_SAID]

"""The worker's half of `worker_process`: a process that has imported what jobs need, and forks for each of them.

Guarantees: a job begins as if it were the first, whatever the one before did to its process, and its crash is its own;
what it prints lies in its folder and is no answer. The loop ends with its input, so it does not outlive the server.
Source: docs/decisions/0034.
"""

import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

from edgefl_coordinator.rounds.jobs import ERRORS


def do_jobs(job: Callable[[Path], int], rest_after_s: float) -> int:
    """Do the jobs whose folders come on standard input, a line each, and answer with the exit status of each.

    Args:
        job: does what lies in a folder, and returns an exit status.
        rest_after_s: seconds without a job after which the loop ends.

    Returns:
        The exit status of this process, which may be a job's.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    while folder := _next_folder(rest_after_s):
        child = os.fork()
        if child == 0:
            os.close(answers)
            _detach(folder)
            return job(folder)
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return 0


def _next_folder(rest_after_s: float) -> Path | None:
    ready, _, _ = select.select([0], [], [], rest_after_s)
    line = os.read(0, 65536) if ready else b""  # whoever asks waits for the answer, so there is one line at a time
    return Path(os.fsdecode(line.removesuffix(b"\n"))) if line else None


def _detach(folder: Path) -> None:
    """Part from the streams of the loop: what the job says goes into its folder."""
    sys.stdout.flush()
    with Path(os.devnull).open("rb") as nothing, (folder / ERRORS).open("wb") as errors:
        for own, target in ((0, nothing), (1, errors), (2, errors)):
            os.dup2(target.fileno(), own)

"""How `live_federation.py` runs commands: each in a process of its own, as when a person types it.

The coordinator's server and the devices are started from their console scripts. All other commands are forked from one
process that has imported what they need, so that a machine imports PyTorch once and not a dozen times: what they run is
the same entry point with the same words.
"""

import importlib
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import click

from demo import run as run_script
from demo import shown

PATIENCE_S = 900  # longest wait for one step of somebody else, on a busy machine
ENTRIES = {
    "edgefl-train": "edgefl_trainer.cli",
    "edgefl-export": "edgefl_export.cli",
    "edgefl-coordinator": "edgefl_coordinator.cli",
}
IMPORTED = [
    "edgefl_trainer.engine.run",
    "edgefl_trainer.live",
    "edgefl_export.bundles.training",
    "edgefl_coordinator.founding.folder",
    "edgefl_coordinator.web.admin",
    "torch._dynamo",
]
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(IMPORTED)


class Background:
    """A command that goes on while others run."""

    def __init__(self, words: Sequence[str], log: Path, given: Path | None) -> None:
        self._process: subprocess.Popen[bytes] | ForkServerProcess
        if _entry(words) is not None:
            self._process = _fork(words, output=log, errors=log, given=given)
            return
        program = [str(Path(sys.executable).parent / words[0]), *words[1:]]
        with log.open("w") as sink:
            self._process = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)

    def status(self) -> int | None:
        """Its exit status, or None while it runs."""
        process = self._process
        return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()


def run(*command: object, quiet: bool = False) -> str:
    """Show a command, run it, show what it prints, and give its standard output."""
    words = [str(word) for word in command]
    if _entry(words) is None:
        return run_script(*(word if isinstance(word, Path) else str(word) for word in command), quiet=quiet)
    if not quiet:
        click.secho(f"$ {line_of(command)}", bold=True)
    with tempfile.NamedTemporaryFile("r") as output:
        process = _fork(words, output=Path(output.name))
        process.join()
        said = output.read()
    if said and not quiet:
        click.echo(said.rstrip())
    if process.exitcode:
        raise click.ClickException(f"{words[0]} {words[1]} ended with status {process.exitcode}")
    return said


@contextmanager
def in_background(*command: object, log: Path, given: Path | None = None) -> Iterator[Background]:
    """Start a command that goes on while others run, and end it at the end."""
    click.secho(f"$ {line_of(command)}{f' < {shown(given)}' if given else ''} &", bold=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()  # it is read before the command has opened it
    words = [str(word) for word in command]
    process = Background(words, log, given)
    try:
        yield process
    finally:
        process.stop()


def line_of(command: Sequence[object]) -> str:
    """A command as a person types it."""
    return shlex.join(shown(word) if isinstance(word, Path) else str(word) for word in command)


def check(process: Background, log: Path) -> None:
    """Give up with a sentence where a command in the background failed."""
    status = process.status()
    if status:
        said = log.read_text().strip().splitlines() or ["no message"]
        raise click.ClickException(f"a command ended with status {status}: {said[-1]} (see {shown(log)})")


def wait_for(done: Callable[[], bool], what: str) -> None:
    """Look again and again; give up with a sentence."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > end:
            raise click.ClickException(f"gave up waiting for {what}; see the .log files")
        time.sleep(0.3)


def _entry(words: Sequence[str]) -> str | None:
    """The module of a command that is forked; None for the others."""
    return None if words[1] == "serve" else ENTRIES.get(words[0])


def _fork(
    words: Sequence[str], output: Path, errors: Path | None = None, given: Path | None = None
) -> ForkServerProcess:
    files = [str(file or "") for file in (given or Path(os.devnull), output, errors)]
    process = FORKING.Process(target=_command, args=(_entry(words), list(words), files), daemon=True)
    process.start()
    return process


def _command(module: str, words: list[str], files: list[str]) -> None:
    """Be the command: its words, and files in the place of standard input, output and errors."""
    for number, file in enumerate(files):
        if file:
            opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a forked process begins without one
    sys.argv = words
    importlib.import_module(module).main()

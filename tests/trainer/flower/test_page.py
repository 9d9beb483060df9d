"""docs/guides/flower.md, typed as it stands: Ray, and a SuperLink with three SuperNodes on the loopback interface.

TLS, node authentication, nothing but Flower's own programs; then the same with kills. The oracle of every digest is the
local engine.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: make test-flower")
pytestmark = [pytest.mark.slow, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[3]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.M | re.S)
PORT = "9093"
DATA = ["--data", "lesions:sites=3,images=40,px=36", "--image-px", "36", "--preset", "tiny", "--rounds", "2"]
PATIENCE_S = 900  # on a machine that may be busy


class Shell:
    """A bash that reads the page's lines; whatever it began ends with it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder, self.port, self._ports = folder, str(port), (str(port), str(port + 1))
        (folder / "bin").mkdir()
        (folder / "bin/pip").write_text("#!/bin/sh\n")  # the extra is installed
        command = "import sys\nfrom edgefl_trainer.cli import main\nsys.argv[0] = 'edgefl-train'\nmain()\n"
        (folder / "bin/edgefl-train").write_text(f"#!{sys.executable}\n{command}")
        for program in (folder / "bin").iterdir():
            program.chmod(0o755)
        path = f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        packages = os.pathsep.join(str(ROOT / name) for name in ("protocol", "trainer"))
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": packages, "HOME": str(folder)}
        self._bash = subprocess.Popen(
            ["bash"], cwd=folder, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def type(self, text: str) -> str:
        """Type some lines; what they print. An assertion fails where one of them does."""
        for told, real in zip((PORT, "9094"), self._ports, strict=True):
            text = text.replace(told, real)
        assert self._bash.stdin and self._bash.stdout
        self._bash.stdin.write(f"set -e\n{text}\nset +e\necho done-with-it\n")
        self._bash.stdin.flush()
        printed = ""
        for line in self._bash.stdout:
            if line == "done-with-it\n":
                return printed
            printed += line
        raise AssertionError(printed)

    def close(self) -> None:
        """End what was begun; a program that Flower began apart ends when it misses its parent."""
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        assert self._bash.stdin and self._bash.stdout
        self._bash.stdin.close()
        self._bash.stdout.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def page(start: str = "", until: str = "## When a site fails") -> list[str]:
    text = (ROOT / "docs/guides/flower.md").read_text(encoding="utf-8")
    return BLOCK.findall(text[text.index(start) : text.index(until)])


def digest(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["state_sha256"])


def test_the_page(shell: Shell, tmp_path: Path) -> None:
    """All of it: the local engine, Ray and the SuperLink end with one digest."""
    blocks = page()
    assert len(blocks) == 6
    for block in blocks:
        shell.type(block)
    assert digest(tmp_path / "runs/here") == digest(tmp_path / "runs/ray") == digest(tmp_path / "server")
    for site in ("site-1", "site-2", "site-3"):
        [folder] = (tmp_path / site).glob("server-*")
        assert digest(folder) == digest(tmp_path / "server")


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


def phases(server: Path) -> int:
    path = server / "checkpoints/latest.json"
    return int(json.loads(path.read_text())["phases"]) if path.exists() else 0


def started(name: str, *needles: str) -> list[int]:
    """Processes of this machine whose command is a program of Flower's and has words with all of these.

    A port among them tells the programs of this test from those of another.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if any(Path(word).name == name for word in words[:2]) and all(one in "\0".join(words) for one in needles):
                found.append(int(path.parent.name))
    return found


def kill(name: str, *needles: str) -> None:
    """kill −9, once it is there."""
    wait_for(lambda: bool(started(name, *needles)))
    for process in started(name, *needles):
        os.kill(process, signal.SIGKILL)


def at_work(site: Path) -> list[int]:
    """The process that works in a site's folder: it holds the lock of one federation's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if path.readlink().name == ".lock" and path.readlink().parent.parent == site:
                found.append(int(path.parts[2]))
    return found


@pytest.fixture
def start(shell: Shell) -> str:
    """What starts the run of the page, for fedavg; SuperLink and SuperNodes are there."""
    [setting, *_, certificates, superlink, supernodes, run] = page()
    for block in (setting, certificates, superlink, supernodes):
        shell.type(block)
    shell.type(run[: run.index("app=")].replace("fedevprompt", "fedavg"))
    return run[run.index("app=") :]


def local(shell: Shell) -> str:
    """The digest without Flower."""
    shell.type(" ".join(["edgefl-train", "run", "fedavg", *DATA, "--out", "local"]) + " 2> local.log")
    return digest(shell.folder / "local")


def test_a_killed_server_and_killed_sites(shell: Shell, start: str, tmp_path: Path) -> None:
    """kill −9 of the server after a round: the same digest. Of a SuperNode, and of a site's process: the round goes on.

    The log says which site, and why.
    """
    server, second = tmp_path / "server", tmp_path / "second"
    shell.type(start.replace(" --stream", ""))
    wait_for(lambda: phases(server) == 2)
    kill("flwr-serverapp", f":{shell.port}")
    assert not (server / "summary.json").exists()
    shell.type(start)
    assert digest(server) == local(shell)

    shell.type('echo "epochs = 100" >> federation.toml')  # so that a site is at work long enough to be hit
    again = start.replace("/server", "/second").replace("deadline-seconds=3600", "wait-seconds=5")
    shell.type(again.replace(" --stream", "").replace("quorum=2", "quorum=1"))
    wait_for(lambda: any((tmp_path / "site-2").glob("second-*")))  # it learns
    kill("flower-supernode", f":{shell.port}", "keys/site-2")
    wait_for(lambda: phases(second) == 1)
    wait_for(lambda: bool(at_work(tmp_path / "site-3")))
    os.kill(at_work(tmp_path / "site-3")[0], signal.SIGKILL)
    wait_for((second / "summary.json").exists)
    assert json.loads((second / "summary.json").read_text())["without_hand_out"] == ["site-2"]
    log = shell.type(
        'flwr log --show $(flwr list ours --format json | python -c "import json, sys; '
        "print(json.load(sys.stdin)['runs'][0]['run-id'])\") ours"
    )
    assert "no reply of site site-2 counts: its SuperNode does not answer any more" in log
    assert "no reply of site site-3 counts: its process ended in the middle of the work" in log


def test_a_killed_superlink(shell: Shell, start: str, tmp_path: Path) -> None:
    """kill −9 of the SuperLink in mid-run: started again, it knows the SuperNodes, and the same command goes on."""
    server = tmp_path / "server"
    shell.type(start.replace(" --stream", ""))
    wait_for(lambda: phases(server) == 1)
    nodes = started("flower-supernode", f":{shell.port}")
    kill("flower-superlink", shell.port)
    assert len(nodes) == 3 and not (server / "summary.json").exists()
    [superlink, *_] = page("**2. The server.**")[0].split("\n")
    shell.type(superlink.replace("superlink.log", "again.log"))
    shell.type('until grep -q "Uvicorn running" again.log; do sleep 1; done')
    shell.type(start)
    assert digest(server) == local(shell) and started("flower-supernode", f":{shell.port}") == nodes

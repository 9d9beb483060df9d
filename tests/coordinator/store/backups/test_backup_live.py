"""A backup in the middle of a round with members sending, restored elsewhere: the round ends, and nothing is lost.

The server and its worker are processes of their own; members are the devices' own exchange, over TLS. Source:
docs/security.md check 67, docs/decisions/0056.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.coordinator.test_whole_path import BACKBONE, SITES, check_maps_of_others, join, wait_for_round

from edgefl_coordinator.cli import main
from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.web.admin import run_operation

pytest.importorskip("torch")


@contextmanager
def serving(home: CoordinatorHome, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `serve` until the end."""
    command = [sys.executable, "-m", "edgefl_coordinator.cli", "serve", "--home", str(home.root)]
    with log.open("wb") as sink, subprocess.Popen(command, stderr=sink) as process:
        try:
            until = time.monotonic() + 60
            while "listening" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def typed(*words: str) -> dict[str, Any]:
    """Type a command of the operator with --json."""
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.nightly)], indirect=True)
def test_a_round_goes_on_elsewhere(folder: Path, tools: Any, database: Any) -> None:
    """Two reply before the backup, one after it, one after the restoration; tasks are asked for all the time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    table = tools.settings_table(
        suite=2, port=port, database=database(), public_url=f"https://localhost:{port}", task={"backbone": BACKBONE},
        rounds={"start": "automatic", "quorum_target": 4, "deadline_s": 3600},
    )  # fmt: skip
    home, elsewhere = CoordinatorHome(folder / "home"), CoordinatorHome(folder / "elsewhere")
    make_home(home, table)
    sent = {name: tools.maps_payload(index) for index, name in enumerate(SITES)}
    answers: dict[str, Any] = {}

    def reply(name: str) -> Any:
        return devices[name].reply(f"work-item-{SITES.index(name):016}", sent[name], 1)

    with serving(home, folder / "log") as process:
        devices = {name: join(home, name, folder / f"device-{index}") for index, name in enumerate(SITES)}
        first, second, third, fourth = SITES
        wait_for_round(devices[fourth], 1)
        asked, stop = [0], threading.Event()

        def ask() -> None:
            while not stop.is_set():
                asked[0] += devices[fourth].task().round == 1

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            answers |= {name: reply(name) for name in (first, second)}
            backup = typed("backup", str(folder / "backup"), "--home", str(home.root))
            answers[third] = reply(third)
        finally:
            stop.set()
            asking.join(30)
        assert asked[0] > 0 and backup["bytes"] == (folder / "backup").stat().st_size
        process.kill()
    restored = typed("restore", str(folder / "backup"), "--home", str(elsewhere.root), "--database", database())
    assert restored["backup_ms"] == backup["made_ms"]
    with serving(elsewhere, folder / "log-2"):
        told = {one["name"]: one["replied"] for one in run_operation(elsewhere, "status", {})["members"]}
        assert told == {first: True, second: True, third: False, fourth: False}
        assert reply(first) == answers[first]  # as after a cut answer
        assert not devices[third].task().replied and devices[second].task().replied
        assert reply(third).first_answer_ms > answers[third].first_answer_ms
        assert reply(fourth).accepted
        wait_for_round(devices[fourth], 2)
        for name, member in devices.items():
            check_maps_of_others(member, name, sent)
            member.identity.close()
        assert run_operation(elsewhere, "audit", {})["rows"] > backup["rows"]
    assert "ERROR" not in (folder / "log-2").read_text()

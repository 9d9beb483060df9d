"""The device's own exchange over real TLS against the server with its real worker: a round of FedEvPrompt."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.web.admin import run_operation
from edgefl_exchange.enrolment import enrol, trust_certificate
from edgefl_exchange.https import HttpsTransport
from edgefl_exchange.member import Member
from edgefl_exchange.membership import ca_file, read_ca
from edgefl_protocol.records.invite import decode_invite

pytest.importorskip("torch")

SITES = ("clinic-a", "clinic.b", "clinic_c", "dermatoscope-4")
BACKBONE = {
    "name": "tiny", "image_px": 24, "patch": 12, "depth": 4, "heads": 1, "width": 8,
    "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


def join(home: CoordinatorHome, name: str, folder: Path) -> Member:
    """Invite, enrol, compare the fingerprint, approve."""
    text = run_operation(home, "invite", {"name": name, "role": "device", "hours": 1})["invite"]
    invite = decode_invite(text, time.time_ns() // 1_000_000)
    folder.mkdir(mode=0o700)
    own_ca = trust_certificate(folder, invite, read_ca(home.tls / "ca.pem"))
    membership = enrol(folder, invite, HttpsTransport(invite.url, folder / "ca.pem"), own_ca=own_ca)
    assert membership.state == "pending"
    run_operation(home, "approve", {"name": name, "fingerprint": membership.fingerprint})
    return Member(folder, lambda found: HttpsTransport(found.url, ca_file(folder, found)))


def wait_for_round(member: Member, number: int) -> None:
    """Wait until a round is open."""
    until = time.monotonic() + 240  # the worker imports torch, on a busy machine
    while time.monotonic() < until:
        task = member.task()
        if (task.round, task.state) == (number, "open"):
            return
        time.sleep(0.5)
    raise AssertionError(f"round {number} did not open")


def check_maps_of_others(member: Member, name: str, sent: dict[str, Any]) -> None:
    """The second broadcast holds exactly the maps that the three others sent."""
    arrays = member.broadcast(2).arrays
    others = [payload for other, payload in sent.items() if other != name]
    for label in (0, 1):
        got = sorted(np.array(arrays[f"maps.{peer}.{label}"]).tobytes() for peer in range(3))
        assert got == sorted(other.arrays[f"maps.{label}"].tobytes() for other in others)


@pytest.mark.slow
def test_four_devices_and_a_round(folder: Path, tools: Any) -> None:
    """Enrol over TLS, reply, and receive exactly the other three's maps in the next round."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rounds = {"start": "automatic", "quorum_target": 4, "deadline_s": 3600}
    table = tools.settings_table(
        suite=2, port=port, public_url=f"https://localhost:{port}", rounds=rounds, task={"backbone": BACKBONE}
    )
    home = CoordinatorHome(folder / "home")
    make_home(home, table)
    command = [sys.executable, "-m", "edgefl_coordinator.cli", "serve", "--home", str(home.root)]
    log = folder / "log"
    with log.open("wb") as sink, subprocess.Popen(command, stderr=sink) as process:
        try:
            until = time.monotonic() + 60
            while "listening" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.05)
            devices = {name: join(home, name, folder / f"device-{index}") for index, name in enumerate(SITES)}
            sent = {name: tools.maps_payload(index) for index, name in enumerate(SITES)}
            wait_for_round(devices["clinic-a"], 1)
            for name, member in devices.items():
                assert not member.broadcast(1).arrays
                assert member.reply(f"work-item-{'0' * 16}", sent[name], 1).accepted
            wait_for_round(devices["clinic-a"], 2)
            for name, member in devices.items():
                check_maps_of_others(member, name, sent)
                member.identity.close()
            assert run_operation(home, "status", {})["round"] == 2
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()
    assert "ERROR" not in log.read_text()

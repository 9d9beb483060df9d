"""A member that is killed again and again, over real TLS against the served coordinator in this process."""

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl_client.exchange import Outbox, ca_file, enrol, read_ca, trust_certificate
from edgefl_client.exchange.https import HttpsTransport
from edgefl_coordinator import routes
from edgefl_coordinator.coordinator import open_coordinator, wall_clock_ms
from edgefl_coordinator.operations import OPERATIONS
from edgefl_coordinator.schema import replies, uploads
from edgefl_coordinator.service import serve
from edgefl_coordinator.settings import Home
from edgefl_coordinator.setup import make_home
from edgefl_protocol.invite import decode_invite

KILLS = 8
MEMBER = """
import sys
from pathlib import Path
from edgefl_client.exchange import Member, Outbox, blobs, ca_file, delivering
from edgefl_client.exchange.https import HttpsTransport

blobs.MAX_PIECE_BYTES, delivering.MAX_INLINE_BYTES = 2**15, 2**20
folder = Path(sys.argv[1])
with Member(folder, lambda found: HttpsTransport(found.url, ca_file(folder, found))) as member:
    print("ready", flush=True)
    if sys.argv[2] == "fetch":
        print(member.broadcast(1).arrays["backbone.conv"].tobytes().hex(), flush=True)
    else:
        with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
            print(*[one.outcome for one in member.deliver(outbox, member.task())], flush=True)
"""


@pytest.fixture
def served(folder, lab, tools, monkeypatch) -> Iterator[Any]:
    """A coordinator on a port of 127.0.0.1, on the real clock, in the first round."""
    monkeypatch.setattr(routes, "MAX_INLINE_BYTES", 2**20)
    home, ready = Home(folder / "served"), threading.Event()
    table = tools.settings_table(
        task={"method": "fedclf", "shares_maps": False, "backbone": lab.CNN}, limits={"reply_bytes": 8 * 2**20}, port=0,
        rounds={"deadline_s": 3600},
    )  # fmt: skip
    make_home(home, table)
    coordinator = open_coordinator(home, clock=wall_clock_ms)
    port: list[int] = []
    stop: list[Any] = []

    def opened(number: int) -> None:
        port.append(number)
        ready.set()

    monkeypatch.setattr("edgefl_coordinator.service._Server", remembering(stop))
    thread = threading.Thread(target=serve, args=(coordinator, opened, lab.averaging_worker), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield coordinator, port[0]
    stop[0].should_exit = True
    thread.join(30)
    coordinator.store.close()


def remembering(made: list[Any]) -> Any:
    from edgefl_coordinator.service import _Server

    def make(*arguments: Any) -> Any:
        made.append(_Server(*arguments))
        return made[0]

    return make


def join(coordinator: Any, port: int, folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    told = OPERATIONS["invite"](coordinator, {"name": "clinic-a", "role": "site", "hours": 1})
    invite = decode_invite(told["invite"], wall_clock_ms())
    url = f"https://127.0.0.1:{port}"
    own_ca = trust_certificate(folder, invite, read_ca(coordinator.store.home.tls / "ca.pem"))
    at_port = type(invite)(**{**vars(invite), "url": url})
    found = enrol(folder, at_port, HttpsTransport(url, folder / "ca.pem"), own_ca=own_ca)
    OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": found.fingerprint})
    assert ca_file(folder, found) is not None
    return folder


def run(folder: Path, doing: str, kill_after_s: float | None) -> str:
    """Run a member; gives what it said last, "" where it was killed before."""
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(folder), doing], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    if kill_after_s is None:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.strip()
    try:
        return process.communicate(timeout=kill_after_s)[0].strip()
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0].strip()


@pytest.mark.slow
def test_a_member_that_is_killed_again_and_again(served, lab, tmp_path) -> None:
    """Check 56 for large items: kill −9 while sending and fetching: nothing lost, nothing twice, no leftovers."""
    coordinator, port = served
    folder = join(coordinator, port, tmp_path / "member")
    OPERATIONS["start"](coordinator, {})
    with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
        outbox.put("skin", "reply", lab.reply_of(1).to_bytes(), wall_clock_ms())
    draw = random.Random(0)
    expected = lab.weights(0)["backbone.conv"].tobytes().hex()
    fetched = [run(folder, "fetch", draw.uniform(0.0, 0.6)) for _ in range(KILLS)]
    assert set(fetched) <= {"", expected}
    assert run(folder, "fetch", None) == expected
    sent = [run(folder, "deliver", draw.uniform(0.0, 0.6)) for _ in range(KILLS)]
    assert sent.count("accepted") <= 1
    last = run(folder, "deliver", None)
    assert "accepted" in [*sent, last] or lab.rows(coordinator, replies)
    (row,) = lab.rows(coordinator, replies)
    assert coordinator.store.get_blob(row.blob) == lab.reply_of(1).to_bytes()
    assert lab.rows(coordinator, uploads) == []
    assert not list((folder / "parts").iterdir())
    assert not list((folder / "outbox.sqlite3.files").iterdir())
    with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
        assert outbox.count() == 0

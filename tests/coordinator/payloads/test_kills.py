"""A member that is killed again and again, over real TLS against the served coordinator in this process."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from edgefl_coordinator.store.coordinator import wall_clock_ms
from edgefl_coordinator.store.tables import replies, uploads
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_exchange.outbox import Outbox

KILLS = 8
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
MEMBER = """
import sys
from pathlib import Path
from edgefl_exchange.member import Member
from edgefl_exchange.membership import ca_file
from edgefl_exchange.outbox import Outbox
from edgefl_exchange import blobs
from edgefl_exchange.https import HttpsTransport

blobs.MAX_PIECE_BYTES = 2**15
folder = Path(sys.argv[1])
with Member(folder, lambda found: HttpsTransport(found.url, ca_file(folder, found))) as member:
    print("ready", flush=True)
    if sys.argv[2] == "fetch":
        print(member.broadcast(1).arrays["backbone.conv"].tobytes().hex(), flush=True)
    else:
        with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
            print(*[one.outcome for one in member.deliver(outbox, member.task())], flush=True)
"""


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
    folder = lab.join(coordinator, port, tmp_path / "member")
    OPERATIONS["start"](coordinator, {})
    with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
        outbox.put("skin", "reply", lab.reply_of(1).to_bytes(), wall_clock_ms())
    draw = random.Random(0)
    expected = lab.weights(0)["backbone.conv"].tobytes().hex()
    fetched = [run(folder, "fetch", draw.uniform(0.0, 0.6)) for _ in range(KILLS)]
    assert all(expected.startswith(one) for one in fetched)  # what it prints is cut where it is killed
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

"""A member that is killed again and again, over real TLS against the served coordinator in this process."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgefl_coordinator.store.coordinator import wall_clock_ms
from edgefl_coordinator.store.tables import replies, uploads
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_exchange.outbox import Outbox

KILLS = 8
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# Imports once, then each member is a fork: it is asked in lines of JSON, and tells what the member's process ended with
# and what that said.
MEMBER = """
import json, os, signal, sys, threading, traceback
from pathlib import Path
from edgefl_exchange.member import Member
from edgefl_exchange.membership import ca_file
from edgefl_exchange.outbox import Outbox
from edgefl_exchange import blobs
from edgefl_exchange.https import HttpsTransport

blobs.MAX_PIECE_BYTES = 2**15
folder = Path(sys.argv[1])


def act(doing):
    with Member(folder, lambda found: HttpsTransport(found.url, ca_file(folder, found))) as member:
        print("ready", flush=True)
        if doing == "fetch":
            print(member.broadcast(1).arrays["backbone.conv"].tobytes().hex(), flush=True)
        else:
            with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
                print(*[one.outcome for one in member.deliver(outbox, member.task())], flush=True)


for line in sys.stdin:
    doing, kill_after_s = json.loads(line)
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(told, 1)
            act(doing)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(told)
    with os.fdopen(heard) as said:
        ready = said.readline()
        timer = threading.Timer(kill_after_s, os.kill, (child, signal.SIGKILL))
        timer.start()
        rest = said.read()
    timer.cancel()
    timer.join()
    print(json.dumps([os.waitpid(child, 0)[1], ready, rest.strip()]), flush=True)
"""


@contextlib.contextmanager
def members(folder: Path) -> Iterator[Callable[..., str]]:
    """Gives a function that runs a member; that gives what it said last, "" where it was killed before."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMBER, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        asked, told = process.stdin, process.stdout
        assert asked is not None and told is not None

        def run(doing: str, kill_after_s: float | None = None) -> str:
            asked.write(json.dumps([doing, 120.0 if kill_after_s is None else kill_after_s]) + "\n")
            asked.flush()
            status, ready, said = json.loads(told.readline())
            assert ready == "ready\n" and (status == 0 or (kill_after_s is not None and os.WIFSIGNALED(status))), status
            return str(said)

        yield run


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
    with members(folder) as run:
        fetched = [run("fetch", draw.uniform(0.0, 0.6)) for _ in range(KILLS)]
        assert all(expected.startswith(one) for one in fetched)  # what it prints is cut where it is killed
        assert run("fetch") == expected
        sent = [run("deliver", draw.uniform(0.0, 0.6)) for _ in range(KILLS)]
        assert sent.count("accepted") <= 1
        last = run("deliver")
    assert "accepted" in [*sent, last] or lab.rows(coordinator, replies)
    (row,) = lab.rows(coordinator, replies)
    assert coordinator.store.get_blob(row.blob) == lab.reply_of(1).to_bytes()
    assert lab.rows(coordinator, uploads) == []
    assert not list((folder / "parts").iterdir())
    assert not list((folder / "outbox.sqlite3.files").iterdir())
    with Outbox(folder / "outbox.sqlite3", bytes(32)) as outbox:
        assert outbox.count() == 0

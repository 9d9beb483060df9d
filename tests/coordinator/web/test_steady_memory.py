"""What requests and replies leave in the memory of a coordinator: nothing. docs/security.md check 68."""

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from edgefl_coordinator.web import service
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import ROUTES, ReplyRequest

LOT = 20  # times four messages
STORE = """
import sys
from pathlib import Path
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.store import open_store

def memory_mib():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024

def keep(megabytes):
    for _ in range(megabytes):
        with store.transaction() as connection:
            for _ in range(256):
                store.put_small(connection, bytes(4096))

store = open_store(CoordinatorHome(Path(sys.argv[1])))
keep(12)
before = memory_mib()
keep(24)
print(memory_mib() - before)
"""

HOLES = """
from pathlib import Path
from edgefl_coordinator.process_memory import return_free_memory

def memory_mib():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024

kept = [b"x" * 100_000 for _ in range(600)][::20]
before = memory_mib()
return_free_memory()
print(before - memory_mib())
"""


def test_holes_of_the_heap_go_back_to_the_system() -> None:
    """57 MiB in 600 pieces, of which every twentieth stays: what lies between them is free, and no end of the heap."""
    done = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True)
    assert float(done.stdout) > 40


GARBAGE = """
import collections
import gc
from edgefl_coordinator.process_memory import look_past_what_stands

kept = [[] for _ in range(300_000)]
if STANDS:
    look_past_what_stands()
gc.collect()
rings = collections.deque(maxlen=5_000)
for _ in range(100_000):
    ring = [bytes(100)]
    ring.append(ring)
    rings.append(ring)
print(len(gc.get_objects(2)))
"""


def test_what_stands_keeps_nobody_from_looking_at_garbage() -> None:
    """Of 100,000 rings that live for a while 5,000 are there at the end, beside 300,000 objects that stand. Python
    looks at old rings only where they are a quarter of all that it has seen."""
    found = []
    for stands in ("True", "False"):
        words = [sys.executable, "-c", GARBAGE.replace("STANDS", stands)]
        found.append(int(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    assert found[0] < 30_000 and found[1] - 300_000 > 60_000, found


def test_a_server_gives_its_free_memory_back_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it leads or not; nothing of it is left when the server ends."""
    given: list[float] = []
    monkeypatch.setattr(service, "RETURN_S", 0.01)
    monkeypatch.setattr(service, "return_free_memory", lambda: given.append(0.0))

    async def served() -> set[asyncio.Task[None]]:
        coordinator = SimpleNamespace(store=SimpleNamespace(database=SimpleNamespace(shared=False)))
        server = SimpleNamespace(serve=lambda sockets: asyncio.sleep(0.5))
        leader = SimpleNamespace(start=AsyncMock(), end=AsyncMock(return_value=None), worker=Mock())
        await service._run(coordinator, server, Mock(), leader)  # type: ignore[arg-type]
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(served()) == set() and len(given) > 2


def test_small_replies_do_not_stay_in_memory(tmp_path) -> None:
    """24 MiB of replies of 4 KiB, once the store is warm: a cache that grows with them would take 20 MiB."""
    done = subprocess.run([sys.executable, "-c", STORE, str(tmp_path)], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 4


def test_requests_leave_no_objects(coordinator, asgi, tools, caplog) -> None:
    """Sealed questions, replies sent again, replayed and unreadable messages, again and again: caches fill first, and
    then comes a lot of which less than an object and 64 bytes for each message is left. A leak is in every lot."""
    caplog.set_level("CRITICAL", logger="edgefl_coordinator")  # pytest keeps every line that is logged
    client, member = asgi(coordinator), tools.approved_member(coordinator, "clinic-a")
    tools.approved_member(coordinator, "clinic-b")
    tools.start_rounds(coordinator)
    reply = ReplyRequest(idem="work-item-00000001", reply=tools.maps_payload()).to_payload()

    def ask() -> tuple[int, int]:
        for _ in range(LOT):
            asked = member.envelope("task", Payload({}, {}))
            found = [client.request("POST", ROUTES["task"].path, asked).status for _ in range(2)]
            found.append(client.request("POST", ROUTES["reply"].path, member.envelope("reply", reply, rnd=1)).status)
            found.append(client.request("POST", ROUTES["task"].path, asked[:-1]).status)
            assert found == [200, 409, 200, 401]
        gc.collect()
        return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        found = [ask() for _ in range(4)]
    finally:
        tracemalloc.stop()
    more = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(found)]
    assert any(objects < LOT and memory < 4 * LOT * 64 for objects, memory in more), more

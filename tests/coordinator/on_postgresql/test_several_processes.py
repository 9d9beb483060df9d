"""Several `edgefl-coordinator serve` on one PostgreSQL database: real processes over TLS.

Source: docs/decisions/0058; docs/security.md, reliability (kill -9) and checks 17, 18 and 55.
"""

import contextlib
import http.client
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select
from tests.coordinator.web.served import COMMAND, Served

from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web.admin import run_operation
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal, ReplyRequest

pytestmark = pytest.mark.slow

SOON_S = 15.0


@pytest.fixture
def prepared(make_coordinator: Any, postgres: Any, clock: Any, tools: Any) -> Iterator[Callable[[int], Any]]:
    """Makes a home on PostgreSQL with so many members and an open round, closed so that servers can have it."""
    url = postgres.database()

    def prepare(members: int) -> Any:
        clock.now_ms = time.time_ns() // 1_000_000
        rounds = {"quorum_target": 1000, "deadline_s": 3600}
        coordinator = make_coordinator(database=url, port=0, rounds=rounds)
        crowd = [tools.quick_member(coordinator, f"clinic-{number:03}") for number in range(members)]
        tools.start_rounds(coordinator)
        coordinator.store.close()
        return coordinator, crowd

    yield prepare
    postgres.drop(url)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    running: list[Served] = []

    def begin(home: Any) -> Served:
        running.append(Served(home))
        return running[-1]

    yield begin
    for served in running:
        if served.process.returncode is None:
            served.close()


def reply(member: Any, tools: Any, idem: str) -> bytes:
    message = ReplyRequest(idem=idem, reply=tools.maps_payload()).to_payload()
    return member.envelope("reply", message, rnd=1)


def answered(served: Served, member: Any, body: bytes, route: str = "reply") -> str:
    status, answer = served.post(f"/v1/{route}", body)
    if status in (401, 503):
        return str(status)
    _, payload = member.open(body, answer)
    refusal = Refusal.from_payload(payload)
    return refusal.code if refusal else "accepted"


def leads(served: Served) -> bool:
    text = "".join(served.lines)
    return "this process leads from now on" in text or "another process leads" not in text


def test_two_servers_answer_and_the_second_leads_where_the_first_is_killed(prepared, serve, tools) -> None:
    """An envelope that reaches both at once counts once; after kill -9 of who leads, the operator is heard again."""
    coordinator, crowd = prepared(8)
    home = coordinator.store.home
    first, second = serve(home), serve(home)
    assert leads(first) and not leads(second) and first.port != second.port
    with ThreadPoolExecutor(2) as pool:
        for number, member in enumerate(crowd[:6]):
            body = reply(member, tools, f"work-item-{number:08}")
            sent = [pool.submit(answered, served, member, body) for served in (first, second)]
            assert sorted(one.result() for one in sent) == ["accepted", "replayed"]
    assert first.operate("status")["replies"] == 6
    first.kill()
    assert answered(second, crowd[6], reply(crowd[6], tools, "work-item-00000006")) == "accepted"
    until = time.monotonic() + SOON_S
    while not leads(second) and time.monotonic() < until:
        time.sleep(0.1)
    status = second.operate("status")
    assert status["replies"] == 7 and status["journal_mode"] == "postgresql"
    assert second.operate("audit")["rows"] > 0
    third = serve(home)
    assert not leads(third)
    assert answered(third, crowd[7], reply(crowd[7], tools, "work-item-00000007")) == "accepted"
    second.close()  # in good order: the lock is free at once
    until = time.monotonic() + SOON_S
    while not leads(third) and time.monotonic() < until:
        time.sleep(0.1)
    assert third.operate("status")["replies"] == 8
    assert not any("Traceback" in line for served in (first, second, third) for line in served.lines)


def test_one_port_is_that_of_one_coordinator(prepared, serve, make_coordinator, postgres) -> None:
    """Two processes of it share the port; another federation on a database of its own is refused it."""
    coordinator, _ = prepared(1)
    with socket.create_server(("127.0.0.1", 0)) as asked:
        port = asked.getsockname()[1]
    run_operation(coordinator.store.home, "set", {"changes": {"port": str(port)}})
    assert serve(coordinator.store.home).port == serve(coordinator.store.home).port == port
    url = postgres.database()
    stranger = make_coordinator("stranger", database=url, port=port)
    stranger.store.close()
    command = [*COMMAND, "serve", "--home", str(stranger.store.home.root)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; stop each serve of " in refused.stderr
    postgres.drop(url)


def test_who_loses_the_lead_leaves_the_next_one_alone(prepared, serve, postgres) -> None:
    """Its session ends while it stands still, and it lives on: the operator reaches whoever leads then, and no file of
    that one is touched."""
    coordinator, _ = prepared(1)
    loses, next_one = serve(coordinator.store.home), serve(coordinator.store.home)
    held = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1162233422"
    for _ in range(2):
        before = begun(next_one)
        loses.process.send_signal(signal.SIGSTOP)  # else it may take the lead again at once
        assert postgres.run(held) == [(True,)]
        until = time.monotonic() + SOON_S
        while begun(next_one) == before:
            assert time.monotonic() < until
            time.sleep(0.1)
        loses.process.send_signal(signal.SIGCONT)
        time.sleep(2.5)  # it has looked again
        assert any("this process does not lead any more" in line for line in loses.lines)
        assert next_one.operate("status")["members"]
        loses, next_one = next_one, loses
    assert loses.process.poll() is None and next_one.process.poll() is None


def begun(served: Served) -> int:
    """How often it began to lead after another."""
    return sum("this process leads from now on" in line for line in served.lines)


def test_a_new_key_and_a_setting_reach_every_server(prepared, serve) -> None:
    """The operator speaks to who leads; the next request at another finds what changed."""
    coordinator, (member,) = prepared(1)
    first, second = serve(coordinator.store.home), serve(coordinator.store.home)
    told = first.operate("rotate", signing=False)
    assert told["number"] == 2
    first.operate("set", changes={"rounds.deadline_s": "4000"})
    coordinator.keys.ring = open_ring(coordinator.store.home)
    for served in (second, first):
        assert answered(served, member, member.envelope("task", Payload()), "task") == "accepted"


@pytest.mark.long
def test_work_items_sent_twice_at_once_to_four_servers(prepared, serve, tools) -> None:
    """Check 18: each of 200 in two envelopes to two of the four at the same moment: as many accepted, and both hear
    the first answer."""
    items = 200
    coordinator, crowd = prepared(items)
    with ThreadPoolExecutor(4) as pool:
        servers = list(pool.map(serve, [coordinator.store.home] * 4))
    sealed = [[reply(member, tools, "work-item-00000001") for _ in range(2)] for member in crowd]
    pairs = [threading.Barrier(2) for _ in crowd]

    def send(place: int, which: int) -> Any:
        body, served = sealed[place][which], servers[(place + which) % 4]
        pairs[place].wait(60)
        status, answer = served.post("/v1/reply", body)
        assert status == 200
        return crowd[place].open(body, answer)

    with ThreadPoolExecutor(8) as pool:  # who waits for a pair is the last that began, so the other comes next
        sent = [[pool.submit(send, place, which) for which in range(2)] for place in range(items)]
        found = [[one.result() for one in pair] for pair in sent]
    for served in servers:
        served.close()
    assert all(first == second for first, second in found)
    coordinator = open_coordinator(coordinator.store.home)
    with contextlib.closing(coordinator.store) as store, store.transaction() as connection:
        kept = [row.skid for row in connection.execute(select(replies))]
        assert sorted(kept) == sorted(member.signing.key_id for member in crowd)
        check_log(audit.kept_rows(connection))
        events = [row.event for row in audit.rows(connection, after=0, most=100_000)]
        assert events.count("reply_accepted") == items


def open_ring(home: Any) -> Any:
    from edgefl_coordinator.store.key_ring import load_ring

    return load_ring(home)


@pytest.mark.parametrize("kills", [4, pytest.param(25, marks=pytest.mark.nightly)])
def test_servers_are_killed_while_members_send(prepared, serve, tools, kills) -> None:
    """Check 55 with two servers: nothing that was acknowledged is lost, nothing counts twice."""
    draw = random.Random(0)
    coordinator, crowd = prepared(6 * kills)
    running = [serve(coordinator.store.home) for _ in range(2)]
    acknowledged: set[str] = set()

    def sends(member: Any) -> None:
        for attempt in range(40):
            with contextlib.suppress(OSError, http.client.HTTPException):
                body = reply(member, tools, "work-item-00000001")
                if answered(running[(attempt + draw.randrange(2)) % 2], member, body) == "accepted":
                    acknowledged.add(member.signing.key_id)
                    return
            time.sleep(0.25)

    with ThreadPoolExecutor(4) as pool:
        for kill in range(kills):
            sent = [pool.submit(sends, member) for member in crowd[6 * kill : 6 * kill + 6]]
            time.sleep(draw.uniform(0, 0.15))
            which = draw.randrange(2)
            running[which].kill()
            running[which] = serve(coordinator.store.home)
            for one in sent:
                one.result()
    for served in running:
        served.close()
    assert len(acknowledged) == 6 * kills
    coordinator = open_coordinator(coordinator.store.home)
    with contextlib.closing(coordinator.store) as store, store.transaction() as connection:
        kept = [row.skid for row in connection.execute(select(replies))]
        assert sorted(kept) == sorted(acknowledged)
        check_log(audit.kept_rows(connection))
        events = [row.event for row in audit.rows(connection, after=0, most=100_000)]
        assert events.count("reply_accepted") == 6 * kills
        found = stored_rounds.current_round(connection)
        assert found is not None and found.replies == 6 * kills

"""Requests that come at once share a durable commit, and stand or fall alone but with it.

Source: docs/security.md, reliability (kill -9, power loss, disk full), checks 18, 58 and 59; docs/decisions/0055.
"""

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text
from tests.coordinator.carried import together as at_once
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.commits.crowd import CarriedOut
from edgefl_coordinator.commits.shared_commit import MOST
from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.store import open_store
from edgefl_coordinator.store.tables import facts, replies
from edgefl_coordinator.web.sealed_requests import handle
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import ROUTES, Refusal, ReplyRequest

Body = Callable[[Any], object]


@contextlib.contextmanager
def commits(store: Any, seconds: float = 0.0) -> Iterator[list[float]]:
    """Count the commits, each of which takes its time as on a disk."""
    seen: list[float] = []

    def slow(_: object) -> None:
        seen.append(time.monotonic())
        time.sleep(seconds)

    event.listen(store._engine, "commit", slow)
    yield seen
    event.remove(store._engine, "commit", slow)


def together(store: Any, *bodies: Body, first: Body = lambda _: None) -> list[Future[object]]:
    """Run transactions that all wait while the first one works: they share its commit."""

    def one(body: Body) -> object:
        with store.transaction() as connection:
            return body(connection)

    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        started = threading.Event()

        def begin(connection: Any) -> object:
            started.set()
            until = time.monotonic() + 10
            while store._commits._waiting < len(bodies) and time.monotonic() < until:
                time.sleep(0.001)
            return first(connection)

        found = [pool.submit(one, begin)]
        assert started.wait(10)
        found += [pool.submit(one, body) for body in bodies]
    return found


def keep(key: str) -> Body:
    return lambda connection: connection.execute(insert(facts).values(key=key, value="1")).rowcount


def kept(store: Any) -> set[str]:
    with store.transaction() as connection:
        return {key for key in connection.scalars(select(facts.c.key)) if key.startswith("kept")}


def test_they_share_one_commit(coordinator) -> None:
    store = coordinator.store
    with commits(store) as seen:
        found = together(store, *(keep(f"kept {number}") for number in range(8)))
    assert [one.exception() for one in found] == [None] * 9 and len(seen) == 1
    assert len(kept(store)) == 8


def test_a_group_is_bounded(coordinator) -> None:
    """The first of a group waits for the work of at most so many others."""
    store = coordinator.store
    with commits(store) as seen:
        found = together(store, *(keep(f"kept {number}") for number in range(MOST)))
    assert all(one.exception() is None for one in found) and len(seen) == 2
    assert len(kept(store)) == MOST


def test_one_that_fails_is_undone_alone(coordinator) -> None:
    """Its rows are gone; what came before and after it in the group is kept."""
    store = coordinator.store

    def fails(connection: Any) -> None:
        keep("kept by the one that fails")(connection)
        raise LookupError

    with commits(store) as seen:
        before, failed, after = together(store, fails, keep("kept after"), first=keep("kept before"))
    assert isinstance(failed.exception(), LookupError) and before.exception() is after.exception() is None
    assert kept(store) == {"kept before", "kept after"} and len(seen) == 1


def test_nobody_goes_on_before_the_commit(coordinator) -> None:
    """Readers too: what they saw may be another's work, which is not durable yet."""
    store, left = coordinator.store, []

    def read(connection: Any) -> object:
        return connection.scalar(select(facts.c.value).where(facts.c.key == "kept"))

    with commits(store, 0.2) as seen:
        for one in (found := together(store, read, first=keep("kept"))):
            one.add_done_callback(lambda _: left.append(time.monotonic()))
    assert found[1].result() == "1"
    assert len(seen) == 1 and min(left) >= seen[0] + 0.2


def test_a_commit_that_fails_keeps_nothing_of_anybody(coordinator, monkeypatch) -> None:
    """Everybody in the group hears it, whoever committed; the next one goes on."""
    store, dialect = coordinator.store, coordinator.store._engine.dialect
    with monkeypatch.context() as patch:
        patch.setattr(dialect, "do_commit", broken)
        found = together(store, keep("kept 1"), keep("kept 2"), lambda _: "only read")
    errors = [one.exception() for one in found]
    assert [(type(error), getattr(error, "code", "")) for error in errors] == [(StorageError, "storage")] * 4
    assert kept(store) == set()
    keep_alone = together(store, keep("kept 3"))
    assert keep_alone[1].exception() is None and kept(store) == {"kept 3"}


def broken(*_: object) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def test_a_full_disk_ends_the_whole_group(coordinator) -> None:
    """Check 59: SQLite rolls everything back by itself, so that nobody in the group may be told of success."""
    store = coordinator.store

    def fill(connection: Any) -> None:
        pages = connection.scalar(text("PRAGMA page_count"))
        connection.execute(text(f"PRAGMA max_page_count = {int(pages)}"))
        for number in range(1000):
            connection.execute(insert(facts).values(key=f"kept while it fills {number}", value="x" * 4096))

    found = together(store, fill, keep("kept after"), first=keep("kept before"))
    codes = [getattr(one.exception(), "code", None) for one in found]
    assert codes[:2] == ["disk_full", "disk_full"]
    with store.transaction() as connection:
        connection.execute(text("PRAGMA max_page_count = 1073741823"))
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
    assert kept(store) == ({"kept after"} if codes[2] is None else set())


@pytest.mark.parametrize("one_thread", [True, False])
def test_replies_that_come_at_once(make_coordinator, tools, one_thread) -> None:
    """Fewer durable commits than replies, though each needs two in turn: its number's, then its effect's; one that is
    refused leaves an audit row and nothing else; the chain of the audit log holds.
    """
    coordinator = make_coordinator(rounds={"quorum_target": 100})
    crowd = [tools.quick_member(coordinator, f"clinic-{number}") for number in range(9)]
    tools.start_rounds(coordinator)
    payloads = [tools.maps_payload(number) for number in range(8)]
    payloads.append(Payload({"maps.0": payloads[0].arrays["maps.0"] * 2}, payloads[0].scalars))
    bodies = [
        (one, one.envelope("reply", ReplyRequest(idem="x" * 16, reply=payload).to_payload(), rnd=1))
        for one, payload in zip(crowd, payloads, strict=True)
    ]
    works = [partial(handle, coordinator, ROUTES["reply"], body) for _, body in bodies]
    with commits(coordinator.store, 0.1) as seen, ThreadPoolExecutor(9) as pool:
        sent = at_once(coordinator, works) if one_thread else list(pool.map(CarriedOut.of, works))
    opened = [one.open(body, found.get().body)[1] for (one, body), found in zip(bodies, sent, strict=True)]
    refusals = [Refusal.from_payload(payload) for payload in opened]
    assert refusals[:8] == [None] * 8 and refusals[8].code == "bad_contribution"
    assert len(seen) == 4 if one_thread else len(seen) < 8
    with coordinator.store.transaction() as connection:
        found = connection.execute(select(replies)).all()
        events = [row.event for row in audit.rows(connection, after=0, most=1000)]
        check_log(audit.kept_rows(connection))
    assert {row.skid for row in found} == {one.signing.key_id for one in crowd[:8]}
    assert (events.count("reply_accepted"), events.count("refused")) == (8, 1)
    stored = {coordinator.store.get_blob(row.blob) for row in found}
    assert stored == {one.to_bytes() for one in payloads[:8]}


def send_until_killed(coordinator: Any, crowd: list[Any], told: int, *, one_thread: bool) -> None:
    """Send a reply of each, all at once, and write a byte that says whose was acknowledged."""
    coordinator.store = open_store(coordinator.store.home)

    def send(number: int) -> None:
        assert isinstance(crowd[number].reply(1), Payload)
        os.write(told, bytes([number]))

    if one_thread:
        at_once(coordinator, [partial(send, number) for number in range(len(crowd))])
        return
    with ThreadPoolExecutor(len(crowd)) as pool:
        list(pool.map(send, range(len(crowd))))


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_killed_while_replies_share_a_commit(make_coordinator, tools, kills) -> None:
    """Check 55: kill -9 while eight replies are under way, in one thread or in eight: none that was acknowledged is
    lost, none counts twice.
    """
    coordinator = make_coordinator(rounds={"quorum_target": 10_000})
    crowds = [[tools.quick_member(coordinator, f"clinic-{turn}-{number}") for number in range(8)]
              for turn in range(kills)]  # fmt: skip
    tools.start_rounds(coordinator)
    coordinator.store.close()
    for turn, crowd in enumerate(crowds):
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                send_until_killed(coordinator, crowd, told, one_thread=turn % 2 == 0)
            finally:
                os._exit(0)
        os.close(told)
        acknowledged = b"".join(os.read(heard, 1) for _ in range(1 + turn % 8))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(heard, 8):
            acknowledged += more
        os.close(heard)
        coordinator.store = open_store(coordinator.store.home)
        with coordinator.store.transaction() as connection:
            stored = {row.skid: row.blob for row in connection.execute(select(replies))}
        expected = tools.maps_payload().to_bytes()
        assert acknowledged
        for number in acknowledged:
            assert coordinator.store.get_blob(stored[crowd[number].signing.key_id]) == expected
        assert all(next(one.counter) for one in crowd)  # the number that the child used
        assert all(isinstance(one.reply(1), Payload) for one in crowd)  # who heard nothing sends it again
        coordinator.store.close()
    coordinator.store = open_store(coordinator.store.home)
    with coordinator.store.transaction() as connection:
        assert len(connection.execute(select(replies)).all()) == 8 * kills
        assert stored_rounds.current_round(connection).replies == 8 * kills
        check_log(audit.kept_rows(connection))
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
    coordinator.store.close()


def test_no_reply_is_acknowledged_where_the_commit_fails(make_coordinator, tools, monkeypatch) -> None:
    """All hear a sealed `internal`; nothing lies in the store, and the same work items pass afterwards."""
    coordinator = make_coordinator(rounds={"quorum_target": 100})
    crowd = [tools.quick_member(coordinator, f"clinic-{number}") for number in range(4)]
    tools.start_rounds(coordinator)
    before = blob_names(coordinator.store)
    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(coordinator.store._engine.dialect, "do_commit", broken)
        answers = list(pool.map(lambda one: one.reply(1), crowd))
    assert {answer.code for answer in answers} == {"internal"}
    with coordinator.store.transaction() as connection:
        assert connection.execute(select(replies)).all() == []
    assert blob_names(coordinator.store) == before
    assert all(isinstance(one.reply(1), Payload) for one in crowd)


@pytest.mark.parametrize("size", [64 * 1024, 100])
def test_small_and_large_blobs_are_read_alike(coordinator, size) -> None:
    store, data = coordinator.store, b"x" * size
    with store.transaction() as connection:
        small = store.put_small(connection, data)
    for blob in (small, store.put_blob(data)):
        assert store.get_blob(blob.name) == data and blob.size == size
    with pytest.raises(StorageError):
        store.get_blob(small.name, max_bytes=size - 1)
    store.drop_blobs([small.name])
    with pytest.raises(StorageError):
        store.get_blob(small.name)


def ended_by_sqlite(connection: Any) -> None:
    """What SQLite does at a read that fails, and without memory: the transaction is over, and no statement says so."""
    connection.connection.driver_connection.execute("ROLLBACK")


@pytest.mark.parametrize("looks", [True, False])
def test_a_transaction_that_sqlite_ended_tells_nobody_of_success(coordinator, looks: bool) -> None:
    """Neither who worked before, nor who only looked and swallowed the error; who comes after begins anew."""
    store = coordinator.store
    give = store.look if looks else store.transaction

    entered = [threading.Event(), threading.Event()]
    waited = [threading.Event(), threading.Event()]

    def first() -> None:
        with store.transaction() as connection:
            keep("kept before")(connection)
            entered[0].set()
            assert waited[0].wait(10)

    def swallows() -> None:
        with give() as connection, contextlib.suppress(sqlite3.Error):
            entered[1].set()
            assert waited[1].wait(10)
            ended_by_sqlite(connection)
            raise sqlite3.OperationalError("disk I/O error")

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(first)]
        # Each comes while the one before it is inside, for a lock does not keep the order of those who wait for it.
        for inside, wait, body in zip(entered, waited, (swallows, lambda: keep_alone(store)), strict=True):
            assert inside.wait(10)
            found.append(pool.submit(body))
            until = time.monotonic() + 10
            while store._commits._waiting == 0 and time.monotonic() < until:
                time.sleep(0.001)
            wait.set()
    errors = [type(one.exception()) for one in found]
    assert errors == [StorageError, StorageError, type(None)]
    assert kept(store) == {"kept after"}


def keep_alone(store: Any) -> None:
    with store.transaction() as connection:
        keep("kept after")(connection)


@pytest.mark.parametrize("end", ["undo", "keep"])
def test_without_memory_nobody_waits_for_ever(coordinator, monkeypatch, end: str) -> None:
    """Python makes a MemoryError of SQLite's; the next one finds a store that works."""
    store = coordinator.store

    def breaks(_: object) -> None:
        raise MemoryError

    def fails(connection: Any) -> None:
        keep("kept by the one that fails")(connection)
        raise LookupError

    with monkeypatch.context() as patch:
        patch.setattr(store.database, end, breaks)
        found = together(store, fails, first=keep("kept first"))
    assert all(one.exception() is not None for one in found)
    keep_alone(store)
    assert kept(store) == {"kept after"}


def test_a_commit_without_memory_ends_for_all(coordinator, monkeypatch) -> None:
    store = coordinator.store

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store._engine.dialect, "do_commit", no_memory)
        patch.setattr(store._engine.dialect, "do_rollback", no_memory)
        found = together(store, keep("kept 1"), first=keep("kept first"))
    assert all(isinstance(one.exception(), StorageError | MemoryError) for one in found)
    keep_alone(store)
    assert kept(store) == {"kept after"}

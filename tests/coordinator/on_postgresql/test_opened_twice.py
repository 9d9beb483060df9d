"""What several share that have one coordinator on PostgreSQL open. Here one process opens it twice, or four times, and
threads speak to them: they share the folder and the database alone, as processes do, and a test can look into each.
`tests/coordinator/on_postgresql/test_several_processes.py` has real ones.

Source: docs/decisions/0058; docs/security.md check 66; PostgreSQL, "Appendix A: Error Codes" and "Advisory Locks".
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.coordinator.kept_blobs import blob_names
from tests.coordinator.on_postgresql.conftest import events, rows, stored_round

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.rounds.aggregation import commit, lay_out, next_job, step
from edgefl_coordinator.rounds.jobs import read_result
from edgefl_coordinator.store import store
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.store.tables import broadcasts
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import Refusal, ReplyRequest

slow = pytest.mark.slow


@slow
def test_two_accept_an_envelope_once(federated, another, tools) -> None:
    """docs/security.md, replay and idempotency, checks 17 and 18: at both at the same time, twenty times."""
    crowd = [tools.quick_member(federated, f"clinic-{number}") for number in range(20)]
    tools.start_rounds(federated)
    twins = {}
    for member in crowd:
        message = ReplyRequest(idem=f"{member.name:0>16}", reply=tools.maps_payload()).to_payload()
        twins[member.name] = member.envelope("reply", message, rnd=1)
    meet = threading.Barrier(2)

    def send(coordinator: Coordinator, member: Any) -> str:
        at = tools.Member(coordinator, member.name, signing=member.signing, sealing=member.sealing)
        meet.wait(30)
        answer = at.send("reply", twins[member.name])
        return answer.code if isinstance(answer, Refusal) else "accepted"

    with ThreadPoolExecutor(2) as pool:
        for member in crowd:
            one, two = pool.submit(send, federated, member), pool.submit(send, another, member)
            assert {one.result(), two.result()} == {"accepted", "replayed"}
    assert len(rows(federated)) == 20
    assert stored_round(another) == stored_round(federated)


@slow
@pytest.mark.parametrize("items", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_work_items_sent_twice_at_once_to_four(federated, clock, tools, items) -> None:
    """Check 18: each in two envelopes to two of the four: exactly as many accepted, and both hear the first answer."""
    crowd = [tools.quick_member(federated, f"clinic-{number:03}") for number in range(items)]
    tools.start_rounds(federated)
    home, meet = federated.store.home, threading.Barrier(8)
    with contextlib.ExitStack() as ends:
        others = [open_coordinator(home, clock=clock, joins=True) for _ in range(3)]
        for one in others:
            ends.callback(one.store.close)
        four = [federated, *others]

        def send(place: int, seq: int) -> Any:
            member, at = crowd[place], four[(place + seq) % 4]
            there = tools.Member(at, member.name, signing=member.signing, sealing=member.sealing)
            message = ReplyRequest(idem="work-item-00000001", reply=tools.maps_payload()).to_payload()
            request = there.envelope("reply", message, rnd=1, seq=seq)
            meet.wait(60)
            return there.send("reply", request)

        with ThreadPoolExecutor(8) as pool:
            sent = [[pool.submit(send, place, seq) for seq in (1, 2)] for place in range(items)]
            found = [[one.result() for one in pair] for pair in sent]
    assert all(isinstance(first, Payload) and first == second for first, second in found)
    assert len(rows(federated)) == items
    assert events(federated).count("reply_accepted") == items


@slow
def test_what_a_member_may_have_open_is_counted_for_all(federated, another, tools) -> None:
    """Quotas lie in the database: a member that is shut out here is shut out there, at once."""
    member = tools.quick_member(federated, "clinic-a")
    there = tools.Member(another, member.name, signing=member.signing, sealing=member.sealing, counter=member.counter)
    assert isinstance(there.call("task", Payload()), Payload)
    OPERATIONS["revoke"](federated, {"name": "clinic-a"})
    assert there.call("task", Payload()) == 401


def met(store_: Any, times: int) -> Callable[[], None]:
    """Let each commit fail so often with 40001, as PostgreSQL does: it has undone the transaction."""
    dialect, left = store_.database.engine.dialect, {"now": times}
    commit = type(dialect).do_commit

    def commits(connection: Any) -> None:
        if left["now"] > 0:
            left["now"] -= 1
            connection.rollback()
            raise psycopg.errors.SerializationFailure("could not serialize access")
        left["now"] = times
        commit(dialect, connection)

    dialect.do_commit = commits
    return lambda: dialect.__dict__.pop("do_commit", None)


def until_done(work: Callable[[], Any], times: int) -> Any:
    """Do what an operator, or the loop of the rounds, does again."""
    failed = 0
    while True:
        try:
            return work()
        except StorageError as error:
            failed += 1
            assert failed <= 2 * times, error


@slow
def test_transactions_that_meet_others_are_done_again(federated, tools) -> None:
    """Check 66: 40001 at each commit, twenty times: members' requests succeed by themselves, the rest when it is done
    again, and each has its effect once."""
    undo = met(federated.store, 20)
    try:
        pair = []
        for name in ("clinic-a", "clinic-b"):
            member = tools.Member(federated, name)
            facts_ = until_done(lambda name=name: tools.token_of(federated, name), 20)
            proof = member.enrol(facts_)
            typed = {"name": name, "fingerprint": proof.fingerprint}
            until_done(lambda typed=typed: OPERATIONS["approve"](federated, typed), 20)
            pair.append(member)
        until_done(lambda: OPERATIONS["start"](federated, {}), 20)
        for _ in range(200):
            if until_done(lambda: step(federated, tools.toy_worker), 200):
                break
        for member in pair:
            assert isinstance(member.call("task", Payload()), Payload)
            assert isinstance(member.reply(1), Payload)
            assert isinstance(member.call("index", Payload()), Payload)
            assert member.reply(1, idem="another-item-0001").code == "already_replied"
    finally:
        undo()
    told = events(federated)
    for event, times in (("enrolled", 2), ("proved", 2), ("approved", 2), ("start", 1), ("round_opened", 1),
                         ("reply_accepted", 2), ("refused", 2)):  # fmt: skip
        assert told.count(event) == times, (event, told)
    assert len(rows(federated)) == 2


@slow
def test_one_leads_and_another_follows_it(federated, another, running) -> None:
    """Whoever leads holds it against others until its session ends, however that ends."""
    first, second = federated.store.database, another.store.database
    assert first.lead() and first.lead() and not second.lead()
    with pytest.raises(OperatorError, match="another process leads"):
        open_coordinator(federated.store.home)
    leads = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1162233422"
    assert running.run(leads) == [(True,)]
    assert second.lead(wait_s=10) and not first.lead()
    another.store.close()
    assert first.lead(wait_s=10)


@slow
def test_a_job_that_two_did_counts_once(federated, another, tools) -> None:
    """Whoever lost the lead in the middle of a job brings its result late: nothing changes, and no file stays."""
    tools.quick_member(federated, "clinic-a")
    tools.start_rounds(federated)
    tools.quick_member(federated, "clinic-b")  # who joins in the open round, and lacks a broadcast
    work = []
    for coordinator in (federated, another):
        due = next_job(coordinator)
        folder = coordinator.store.home.jobs / f"job-{len(work)}"
        folder.mkdir()
        lay_out(coordinator.store, folder, due.job)
        tools.toy_worker(folder, 60.0)
        work.append((coordinator, due, read_result(folder)))
    commit(*work[0])
    kept, before = rows(federated, broadcasts), {path.name for path in federated.store.home.blobs.iterdir()}
    commit(*work[1])
    assert rows(federated, broadcasts) == kept and len(kept) == 2
    assert {path.name for path in federated.store.home.blobs.iterdir()} == before
    assert events(federated).count("broadcasts_made") == 1


@slow
def test_others_take_over_keys_and_settings(federated, another, tools, asgi) -> None:
    """What one changes in the folder, the next request at another finds."""
    member = tools.quick_member(federated, "clinic-a")
    there, client = tools.Member(another, "clinic-a", signing=member.signing, sealing=member.sealing), asgi(another)
    coordinator_keys.renew_sealing(federated)
    OPERATIONS["set"](federated, {"changes": {"rounds.deadline_s": "77"}})
    client.request("GET", "/healthz")
    assert another.keys.ring.number == federated.keys.ring.number == 2
    assert another.settings.rounds.deadline_s == 77
    there.coordinator = federated  # whose key it seals for
    request = there.envelope("task", Payload())
    assert client.request("POST", "/v1/task", request).status == 200


@slow
def test_a_sweep_leaves_what_others_write(federated, another) -> None:
    """A file without a row may be one that another is about to name; an hour later it is not."""
    young, old = another.store.put_blob(b"young"), another.store.put_blob(b"old")
    path = federated.store.home.blobs / old.name
    with federated.store.transaction() as connection:
        named = federated.store.put_small(connection, b"orphan")
    real = time.time
    assert federated.store.sweep() == 1  # the small one: a row without a name is nobody's
    assert {one.name for one in federated.store.home.blobs.iterdir()} == {young.name, path.name}
    store.time.time = lambda: real() + 4000  # type: ignore[assignment]
    try:
        assert federated.store.sweep() == 2
    finally:
        store.time.time = real  # type: ignore[assignment]
    assert named.name not in blob_names(federated.store) and not list(federated.store.home.blobs.iterdir())

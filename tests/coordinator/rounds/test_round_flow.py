"""Rounds through the sealed routes and the store, with a toy aggregation worker: checks 51, 55, 64 and reliability."""

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sqlalchemy import func, select
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds import aggregation
from edgefl_coordinator.rounds.aggregation import commit, lay_out, next_job, step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, read_result, write_result
from edgefl_coordinator.rounds.stored_rounds import latest_state
from edgefl_coordinator.store.tables import audit, broadcasts, replies, rounds, states
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import BroadcastRequest, Refusal, TaskReply

pytestmark = pytest.mark.both_databases


def count(coordinator: Any, table: Any) -> int:
    with coordinator.store.transaction() as connection:
        return connection.scalar(select(func.count()).select_from(table))


def events(coordinator: Any) -> list[str]:
    with coordinator.store.transaction() as connection:
        return list(connection.scalars(select(audit.c.event).order_by(audit.c.number)))


def task(member: Any) -> TaskReply:
    return TaskReply.from_payload(member.call("task", Payload()))


def broadcast(member: Any, number: int) -> Any:
    return member.call("broadcast", BroadcastRequest(round=number).to_payload(), rnd=number)


@pytest.fixture
def four(coordinator: Any, tools: Any) -> list[Any]:
    return [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcd"]


def test_a_federation_from_first_to_last_round(coordinator, tools, four) -> None:
    """Three exchanges and the final broadcast; each member gets the maps of exactly the three others."""
    assert (task(four[0]).state, task(four[0]).round) == ("waiting", 0)
    assert broadcast(four[0], 1).code == "no_round"
    tools.start_rounds(coordinator)
    for number in (1, 2, 3):
        seen = task(four[0])
        assert (seen.state, seen.round, seen.rounds, seen.replied) == ("open", number, 3, False)
        assert seen.phase == ("warm" if number == 1 else "train")
        for index, member in enumerate(four):
            got = broadcast(member, number)
            peers = {name.split(".")[1] for name in got.arrays}
            assert len(peers) == (0 if number == 1 else 3)
            assert isinstance(member.reply(number, payload=tools.maps_payload(10 * number + index)), Payload)
        assert task(four[0]).state == "closed"
        assert step(coordinator, tools.toy_worker)
    assert task(four[0]).state == "done"
    final = broadcast(four[1], 4)
    others = [tools.maps_payload(30 + index).arrays["maps.0"].tobytes() for index in (0, 2, 3)]
    assert sorted(others) == sorted(array.tobytes() for name, array in final.arrays.items() if name.endswith(".0"))
    assert broadcast(four[1], 5).code == "no_round"
    assert four[0].reply(4).code == "no_round"
    assert not step(coordinator, tools.toy_worker)
    over = task(four[0]).state_sha256
    with coordinator.store.transaction() as connection:
        told = connection.exec_driver_sql("SELECT value FROM facts WHERE key = 'state_sha256'").scalar()
    assert over and json.loads(told) == over
    tools.approved_member(coordinator, "late")  # who comes or goes when all is done took part in nothing
    OPERATIONS["revoke"](coordinator, {"name": "clinic-d"})
    assert task(four[0]).state_sha256 == OPERATIONS["status"](coordinator, {})["state_sha256"] == over


def test_a_straggler_is_told_and_never_mixed_in(coordinator, clock, tools, four) -> None:
    """Check 64: partial close at the deadline; the late reply gets `round_closed`, is logged and not counted."""
    tools.start_rounds(coordinator)
    for member in four[:3]:
        member.reply(1)
    clock.now_ms += 60_000
    late = four[3].reply(1)
    assert isinstance(late, Refusal) and late.code == "round_closed"
    assert step(coordinator, tools.toy_worker)
    assert count(coordinator, replies) == 3
    assert events(coordinator).count("refused") == 1
    assert task(four[3]).round == 2


def test_below_the_minimum_the_round_goes_on(coordinator, clock, tools, four) -> None:
    """Check 64: below the minimum at the deadline, the round is extended and keeps its reply."""
    tools.start_rounds(coordinator)
    first_deadline = task(four[0]).deadline_ms
    four[0].reply(1)
    clock.now_ms += 61_000
    assert not step(coordinator, tools.toy_worker)
    assert task(four[0]).deadline_ms == first_deadline + 60_000
    assert isinstance(four[1].reply(1), Payload)
    clock.now_ms += 60_000
    assert step(coordinator, tools.toy_worker)
    assert count(coordinator, replies) == 2


def test_too_few_others_release_nothing(coordinator, clock, tools, four) -> None:
    """Check 51: three replied, so each of them has two others: nothing is released to them; the fourth sees three."""
    tools.start_rounds(coordinator)
    for member in four[:3]:
        member.reply(1)
    clock.now_ms += 60_000
    step(coordinator, tools.toy_worker)
    refused = broadcast(four[0], 2)
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("small_cohort", 403)
    assert len(broadcast(four[3], 2).arrays) == 6


def test_an_empty_reply_is_no_contribution(coordinator, clock, tools, four) -> None:
    """Check 51: a reply without maps cannot fill a cohort up."""
    tools.start_rounds(coordinator)
    for member in four[:3]:
        member.reply(1)
    four[3].reply(1, payload=Payload({}, {"site_sha256": "0" * 64}))
    step(coordinator, tools.toy_worker)
    assert broadcast(four[0], 2).code == "small_cohort"


EMPTY = Payload({}, {"site_sha256": "0" * 64})


def test_an_empty_second_reply_isolates_nobody(coordinator, tools, four) -> None:
    """Check 51: maps are replaced by a site's newest reply, so who contributed once may hold nothing now."""
    tools.start_rounds(coordinator)
    for index, member in enumerate(four):
        member.reply(1, payload=tools.maps_payload(index))
    step(coordinator, tools.toy_worker)
    assert len(broadcast(four[0], 2).arrays) == 6
    for index, member in enumerate(four):
        member.reply(2, payload=EMPTY if index in (1, 2) else tools.maps_payload(index))
    step(coordinator, tools.toy_worker)
    for member in four:
        assert broadcast(member, 3).code == "small_cohort"


def test_features_alone_close_no_round_and_fill_no_cohort(make_coordinator, clock, tools) -> None:
    """Check 51 and docs/decisions/0033: in a train round features alone do not count for the quorum, and who sends
    nothing else is no other in the average; in the warm round everybody sends features, and each counts."""
    task_ = {"method": "fedclf", "shares_maps": False, "travels": ["features", "weights"]}
    coordinator = make_coordinator(task=task_)
    five = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcde"]
    features = Payload({"features": np.ones((2, 4), np.float16)}, {"site_sha256": "0" * 64, "n_train": 0})
    whole = Payload({"features": np.ones((2, 4), np.float16), "head.weight": np.ones(3, np.float32)},
                    {"site_sha256": "0" * 64, "n_train": 3})  # fmt: skip

    def worker(folder: Path, timeout_s: float) -> None:
        job = read_job(folder)
        made = {site: Payload({}, {"phase": "train", "round": 1, "rounds": 2}).to_bytes() for site in job.sites}
        write_result(folder, JobResult(Payload({}, {"after": job.number}).to_bytes(), ("warm", "train", "train"), made))

    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, worker)
    for member in five[:4]:
        assert isinstance(member.reply(1, payload=features), Payload)
    assert step(coordinator, worker)  # the warm round closed at its target
    assert isinstance(broadcast(five[0], 2), Payload)
    for member in five[1:]:
        assert isinstance(member.reply(2, payload=features), Payload)
    clock.now_ms += 60_000
    assert not step(coordinator, worker) and task(five[0]).state == "open"
    assert isinstance(five[0].reply(2, payload=whole), Payload)
    clock.now_ms += 60_000
    assert not step(coordinator, worker)  # one reply that is averaged, the minimum is two
    told = OPERATIONS["status"](coordinator, {})
    assert (told["replies"], told["contributions"]) == (1, 4)
    late = tools.approved_member(coordinator, "clinic-f")
    assert isinstance(late.reply(2, payload=whole), Payload)
    clock.now_ms += 60_000
    assert step(coordinator, worker) and task(five[0]).round == 3
    for member in five:
        assert broadcast(member, 3).code == "small_cohort"  # an average of two sites, whoever sent features beside it


@pytest.mark.parametrize("shares_maps", [True, False])
def test_a_site_counts_once_whatever_its_key(make_coordinator, clock, tools, shares_maps) -> None:
    """Check 51: a site that enrolled again is one holder, and its old key is no other to itself."""
    coordinator = make_coordinator(task={"shares_maps": shares_maps})
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    for number in (1, 2):
        for index, member in enumerate(three):
            assert isinstance(member.reply(number, payload=tools.maps_payload(index)), Payload)
        clock.now_ms += 60_000
        if number == 1:
            assert step(coordinator, tools.toy_worker)
            OPERATIONS["revoke"](coordinator, {"name": "clinic-c"})
            three[2] = tools.approved_member(coordinator, "clinic-c")
            assert step(coordinator, tools.toy_worker)
    assert step(coordinator, tools.toy_worker)
    for member in three:
        assert broadcast(member, 3).code == "small_cohort"


def test_a_small_cohort_must_be_allowed_and_is_audited(make_coordinator, tools) -> None:
    """docs/security.md, exchange policy: one other only with allow_small_cohort."""
    with pytest.raises(OperatorError, match="allow-small-cohort"):
        make_coordinator("refused", rounds={"min_cohort": 1})
    coordinator = make_coordinator(rounds={"min_cohort": 1, "allow_small_cohort": True, "quorum_target": 2})
    pair = [tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b")]
    tools.start_rounds(coordinator)
    for member in pair:
        member.reply(1)
    step(coordinator, tools.toy_worker)
    assert len(broadcast(pair[0], 2).arrays) == 2


def test_a_member_approved_later_joins_the_open_round(coordinator, tools, four) -> None:
    tools.start_rounds(coordinator)
    late = tools.approved_member(coordinator, "clinic-e")
    assert broadcast(late, 1).code == "not_found"
    assert step(coordinator, tools.toy_worker)
    assert isinstance(broadcast(late, 1), Payload)
    assert not step(coordinator, tools.toy_worker)


def test_a_revoked_members_open_reply_is_dropped(coordinator, tools, four) -> None:
    """docs/security.md, revocation: uploads of the open round are dropped."""
    tools.start_rounds(coordinator)
    four[0].reply(1)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})
    assert count(coordinator, replies) == 0


def test_automatic_start(make_coordinator, tools) -> None:
    coordinator = make_coordinator(rounds={"start": "automatic", "quorum_target": 2})
    tools.approved_member(coordinator, "clinic-a")
    assert not step(coordinator, tools.toy_worker)
    tools.approved_member(coordinator, "clinic-b")
    assert step(coordinator, tools.toy_worker)
    assert count(coordinator, rounds) == 1


def run(coordinator: Any, worker: Callable[[Path, float], None], folder: Path) -> tuple[Any, Any]:
    due = next_job(coordinator)
    folder.mkdir()
    lay_out(coordinator.store, folder, due.job)
    worker(folder, 60)
    return due, read_result(folder)


def test_a_job_done_twice_counts_once(coordinator, tools, four, tmp_path) -> None:
    """Reliability, aggregation exactly once: the same bytes again, and a second commit changes nothing."""
    tools.start_rounds(coordinator)
    for index, member in enumerate(four):
        member.reply(1, payload=tools.maps_payload(index))
    due, first = run(coordinator, tools.toy_worker, tmp_path / "one")
    _, second = run(coordinator, tools.toy_worker, tmp_path / "two")
    assert tools.content(first) == tools.content(second)
    commit(coordinator, due, first)
    before, kept = [count(coordinator, table) for table in (states, rounds, broadcasts)], blob_names(coordinator.store)
    commit(coordinator, due, second)
    assert [count(coordinator, table) for table in (states, rounds, broadcasts)] == before == [2, 2, 8]
    assert blob_names(coordinator.store) == kept


def test_a_second_run_without_one_of_the_cohort_is_refused(coordinator, tools, four, tmp_path) -> None:
    """Check 51: the same round again without one reply would tell that reply by the difference: nothing of it is kept,
    nothing of it is given to anybody, and the state stays that of all four."""
    tools.start_rounds(coordinator)
    for index, member in enumerate(four):
        member.reply(1, payload=tools.maps_payload(index))
    due, first = run(coordinator, tools.toy_worker, tmp_path / "all")
    three = {name: blob for name, blob in due.job.replies.items() if name != "clinic-d"}
    folder = tmp_path / "three"
    folder.mkdir()
    lay_out(coordinator.store, folder, msgspec.structs.replace(due.job, replies=three))
    tools.toy_worker(folder, 60)
    second = read_result(folder)
    assert tools.content(first) != tools.content(second)
    commit(coordinator, due, first)
    state, given = newest(coordinator), [broadcast(member, 2).to_bytes() for member in four]
    kept = blob_names(coordinator.store)
    commit(coordinator, due, second)
    assert newest(coordinator) == state and blob_names(coordinator.store) == kept
    assert [broadcast(member, 2).to_bytes() for member in four] == given
    assert next_job(coordinator) is None and four[3].reply(1, idem="again-work-item-1").code == "round_closed"


def newest(coordinator: Any) -> tuple[int, str] | None:
    with coordinator.store.transaction() as connection:
        return latest_state(connection)


def test_a_start_done_twice_counts_once(coordinator, tools, four, tmp_path) -> None:
    """Reliability: the same holds for the job that opens the first round."""
    OPERATIONS["start"](coordinator, {})
    due, result = run(coordinator, tools.toy_worker, tmp_path / "one")
    for _ in range(2):
        commit(coordinator, due, result)
    assert [count(coordinator, table) for table in (states, rounds, broadcasts)] == [1, 1, 4]
    assert events(coordinator).count("round_opened") == 1


def test_a_kill_inside_aggregation(make_coordinator, tools, monkeypatch) -> None:
    """Reliability: dying before the commit leaves the round closed; the next start does the job, to the same hash."""
    hashes = []
    for name in ("undisturbed", "killed"):
        coordinator = make_coordinator(name)
        members = []
        for index, letter in enumerate("abcd"):
            member = tools.approved_member(coordinator, f"clinic-{letter}")
            if index == 3:
                tools.start_rounds(coordinator)
            members.append(member)
        for index, member in enumerate(members):
            member.reply(1, payload=tools.maps_payload(index))
        if name == "killed":
            with monkeypatch.context() as patch:
                patch.setattr(aggregation, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    step(coordinator, tools.toy_worker)
            coordinator.store.close()
            coordinator = make_coordinator(name)
        assert step(coordinator, tools.toy_worker)
        with coordinator.store.transaction() as connection:
            hashes.append(connection.scalar(select(states.c.sha256).where(states.c.number == 1)))
    assert hashes[0] == hashes[1]


def test_a_failing_worker_loses_nothing(coordinator, tools, four) -> None:
    tools.start_rounds(coordinator)
    for member in four:
        member.reply(1)

    def broken(folder: Path, timeout_s: float) -> None:
        raise OperatorError("the aggregation worker failed (1): out of memory")

    with pytest.raises(OperatorError, match="out of memory"):
        step(coordinator, broken)
    assert events(coordinator)[-1] == "job_failed"
    assert not list(coordinator.store.home.jobs.iterdir())
    assert step(coordinator, tools.toy_worker)


def test_a_full_disk_is_survived(coordinator, tools, four, monkeypatch) -> None:
    """Reliability, full disk: a known error while there is no space, and the job is done once there is some."""
    tools.start_rounds(coordinator)
    for member in four:
        member.reply(1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(StorageError) as refused:
            step(coordinator, tools.toy_worker)
    assert refused.value.code == "disk_full"
    with pytest.raises(StorageError, match="full"):
        step(coordinator, full)
    assert step(coordinator, tools.toy_worker)
    assert task(four[0]).round == 2


def _without_phases(folder: Path, timeout_s: float) -> None:
    (folder / "result.json").write_bytes(b"{}")


def _no_list(folder: Path, timeout_s: float) -> None:
    (folder / "result.json").write_bytes(b'{"state_sha256": "", "phases": [1,')


def _no_process(folder: Path, timeout_s: float) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("worker", [_without_phases, _no_list, _no_process])
def test_a_damaged_job_is_told_and_done_again(coordinator, tools, four, worker) -> None:
    """Reliability: a result without its parts, or a process that does not start, is a known error and is audited."""
    OPERATIONS["start"](coordinator, {})
    with pytest.raises((OperatorError, StorageError)):
        step(coordinator, worker)
    assert events(coordinator)[-1] == "job_failed"
    assert step(coordinator, tools.toy_worker)


def test_replies_are_stored_as_they_came(coordinator, tools, four) -> None:
    tools.start_rounds(coordinator)
    four[0].reply(1, payload=tools.maps_payload(7))
    with coordinator.store.transaction() as connection:
        row = connection.execute(select(replies)).one()
    data = coordinator.store.get_blob(row.blob)
    assert Payload.from_bytes(data) == tools.maps_payload(7)
    assert row.sha256 == hashlib.sha256(data).hexdigest()

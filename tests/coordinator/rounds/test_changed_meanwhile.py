"""What the operator changes while a round is aggregated counts: the job is done anew by the rules that count now.

Source: docs/reference/coordinator.md, settings and grants.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import Job, JobResult, read_job, write_result
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.setting_changes import note_edits
from edgefl_protocol import Payload

pytestmark = pytest.mark.both_databases

FAR = "it lies 10 times as far from the broadcast as the median reply; 8 times is allowed"
Changing = Callable[[], object]


@pytest.fixture
def seen() -> list[Job]:
    return []


@pytest.fixture
def worker(seen: list[Job]) -> Any:
    """A worker that refuses clinic-c without a grant, and asks for a quorum; `meanwhile` happens once, in its midst."""

    def working(meanwhile: Changing) -> Callable[[Path, float], None]:
        changes = [meanwhile]

        def work(folder: Path, timeout_s: float) -> None:
            seen.append(job := read_job(folder))
            for change in changes:
                change()
            changes.clear()
            refused = {} if "clinic-c" in job.granted or job.kind != "aggregate" else {"clinic-c": FAR}
            sound, phases = len(job.replies) - len(refused), ("warm", "train", "train")
            if job.kind == "aggregate" and sound < job.quorum:
                write_result(folder, JobResult(b"", phases, {}, refused, f"too few sound replies: {sound}"))
                return
            made = {site: Payload({}, {"round": 1}).to_bytes() for site in job.sites}
            write_result(folder, JobResult(Payload().to_bytes(), phases, made, refused))

        return work

    return working


@pytest.fixture
def closed(make_coordinator, tools) -> Callable[[int], Any]:
    """Makes a federation of three members, all of which have replied in round 1, with a least number of replies."""

    def make(quorum: int) -> Any:
        rules = {"quorum_min": quorum, "quorum_target": 3, "min_cohort": 1, "allow_small_cohort": True}
        coordinator = make_coordinator(rounds=rules)
        with coordinator.store.transaction() as connection:
            note_edits(connection, coordinator)
        members = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
        tools.start_rounds(coordinator)
        for member in members:
            assert isinstance(member.reply(1), Payload)
        return coordinator

    return make


def grant(coordinator: Any) -> None:
    member = OPERATIONS["status"](coordinator, {})["members"][2]
    approval = {"name": member["name"], "fingerprint": member["fingerprint"], "images": 500}
    OPERATIONS["approve"](coordinator, approval)


def test_a_smaller_quorum_closes_the_round(closed, worker, seen) -> None:
    """Judged by the quorum of before, two sound replies were too few: the round opened again and stood still."""
    coordinator = closed(3)
    smaller = {"changes": {"rounds.quorum_min": "2"}}
    work = worker(lambda: OPERATIONS["set"](coordinator, smaller))
    assert step(coordinator, work) and OPERATIONS["status"](coordinator, {})["problem"] is None
    assert step(coordinator, work) and [job.quorum for job in seen] == [3, 2]
    assert OPERATIONS["status"](coordinator, {})["round"] == 2


def test_a_setting_counts_from_its_own_transaction_on(closed, worker, seen, monkeypatch) -> None:
    """The thread that changes it may get on only after the job is stored: then its process still has the old ones."""
    coordinator = closed(3)
    before = coordinator.settings

    def change() -> None:
        OPERATIONS["set"](coordinator, {"changes": {"rounds.quorum_min": "2"}})
        coordinator.settings = before

    work = worker(change)
    assert step(coordinator, work) and step(coordinator, work)
    assert [job.quorum for job in seen] == [3, 2] and OPERATIONS["status"](coordinator, {})["round"] == 2


def test_another_rule_judges_the_round(closed, worker, seen) -> None:
    coordinator = closed(2)
    work = worker(lambda: OPERATIONS["set"](coordinator, {"changes": {"protection.rule": "median"}}))
    assert step(coordinator, work) and OPERATIONS["status"](coordinator, {})["round"] == 1
    assert step(coordinator, work) and [job.protection.rule for job in seen] == ["clip", "median"]
    assert OPERATIONS["status"](coordinator, {})["round"] == 2


@pytest.mark.parametrize("quorum", [2, 3])
def test_a_grant_lets_the_reply_count(closed, worker, seen, quorum) -> None:
    """Whether the round would have gone on without it, or have opened again."""
    coordinator = closed(quorum)
    work = worker(lambda: grant(coordinator))
    assert step(coordinator, work) and step(coordinator, work)
    assert [dict(job.granted) for job in seen] == [{}, {"clinic-c": 500}]
    facts = OPERATIONS["status"](coordinator, {})
    assert (facts["round"], facts["refused"]) == (2, [])


def test_who_joins_meanwhile_with_a_grant_changes_nothing(closed, worker, seen, tools) -> None:
    """It did not reply: the result is stored, however many join while it is made."""
    coordinator = closed(2)

    def join() -> None:
        tools.approved_member(coordinator, "clinic-d")
        member = OPERATIONS["status"](coordinator, {})["members"][3]
        approval = {"name": member["name"], "fingerprint": member["fingerprint"], "images": 500}
        OPERATIONS["approve"](coordinator, approval)

    assert step(coordinator, worker(join)) and len(seen) == 1
    assert OPERATIONS["status"](coordinator, {})["round"] == 2

"""A member that was shut out leaves the server's state: docs/security.md 4, whenever in a round it happens."""

from pathlib import Path
from typing import Any

import pytest
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.rounds.aggregation import commit, lay_out, next_job, step
from edgefl_coordinator.rounds.jobs import Job, JobResult, read_job, read_result, write_result
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload

pytestmark = pytest.mark.both_databases


@pytest.fixture
def seen() -> list[Job]:
    return []


@pytest.fixture
def worker(seen: list[Job]) -> Any:
    """A worker that remembers its jobs."""

    def work(folder: Path, timeout_s: float) -> None:
        seen.append(job := read_job(folder))
        broadcasts = {site: Payload({}, {"round": 1}).to_bytes() for site in job.sites}
        phases = ("warm", *["train"] * 5)
        write_result(folder, JobResult(Payload({}, {"after": len(seen)}).to_bytes(), phases, broadcasts))

    return work


@pytest.fixture
def five(coordinator, tools, worker) -> list[Any]:
    """Five members in an open first round, which closes with four replies."""
    members = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcde"]
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, worker)
    return members


def test_from_the_next_job_on_its_name_is_gone_until_a_state_is_stored(coordinator, tools, worker, seen, five) -> None:
    """A successor of that name keeps what it sent itself, however the clock goes."""
    OPERATIONS["revoke"](coordinator, {"name": "clinic-e"})
    successor = tools.approved_member(coordinator, "clinic-e")
    assert step(coordinator, worker)
    assert (seen[-1].kind, seen[-1].gone) == ("broadcast", ("clinic-e",))
    for number in (1, 2):
        for member in (*five[1:4], successor):
            assert isinstance(member.reply(number), Payload)
        coordinator.clock.now_ms -= 10
        assert step(coordinator, worker)
        assert (seen[-1].kind, seen[-1].gone) == ("aggregate", ("clinic-e",) if number == 1 else ())
        assert set(seen[-1].replies) == {"clinic-b", "clinic-c", "clinic-d", "clinic-e"}


def test_its_reply_of_a_round_that_has_closed_does_not_count(coordinator, worker, seen, five) -> None:
    for member in five[:4]:
        assert isinstance(member.reply(1), Payload)
    assert next_job(coordinator).job.kind == "aggregate"  # the round has closed
    OPERATIONS["revoke"](coordinator, {"name": "clinic-d"})
    assert step(coordinator, worker)
    assert set(seen[-1].replies) == {"clinic-a", "clinic-b", "clinic-c"} and seen[-1].gone == ("clinic-d",)


def test_what_was_aggregated_meanwhile_is_done_anew(coordinator, worker, seen, five, tmp_path) -> None:
    """A member that is shut out while the worker works: the result that holds its reply is never stored."""
    for member in five[:4]:
        assert isinstance(member.reply(1), Payload)
    due = next_job(coordinator)
    lay_out(coordinator.store, tmp_path, due.job)
    worker(tmp_path, 60)
    before = blob_names(coordinator.store)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-d"})
    commit(coordinator, due, read_result(tmp_path))
    assert OPERATIONS["status"](coordinator, {})["round"] == 1
    assert blob_names(coordinator.store) <= before
    assert step(coordinator, worker)
    assert set(seen[-1].replies) == {"clinic-a", "clinic-b", "clinic-c"}
    assert OPERATIONS["status"](coordinator, {})["round"] == 2


@pytest.mark.parametrize("how", ["shut out", "invited anew"])
def test_the_first_round_opens_without_who_left_before_it(coordinator, tools, worker, seen, how) -> None:
    """One approved member was revoked; one that waited for approval gave way to a second invite for its name."""
    for letter in "abcd":
        tools.approved_member(coordinator, f"clinic-{letter}")
    if how == "shut out":
        tools.approved_member(coordinator, "clinic-x")
        OPERATIONS["revoke"](coordinator, {"name": "clinic-x"})
    else:
        tools.Member(coordinator, "clinic-x").enrol(tools.token_of(coordinator, "clinic-x"))
        tools.token_of(coordinator, "clinic-x")
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, worker) and not step(coordinator, worker)
    facts = OPERATIONS["status"](coordinator, {})
    assert (facts["state"], facts["round"], len(seen)) == ("open", 1, 1)

"""What the operator granted reaches the rule, and what the rule did reaches the operator: docs/security.md check 46."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgefl_coordinator.commands.status import status_lines
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import Job, JobResult, read_job, write_result
from edgefl_coordinator.store import audit_words
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload

pytestmark = pytest.mark.both_databases

TOLD = {"clinic-b": "it claims 5000 images and weighs as 200, 2 times the median"}
ODD = {"clinic-c": "it holds maps of 1 class all alike"}


@pytest.fixture
def phases() -> tuple[str, ...]:
    return ("warm", "train")


@pytest.fixture
def worker(phases) -> Any:
    """A worker that remembers its jobs, and finds clinic-b bounded."""
    seen: list[Job] = []

    def work(folder: Path, timeout_s: float) -> None:
        seen.append(job := read_job(folder))
        broadcasts = {site: Payload({}, {"round": 1}).to_bytes() for site in job.sites}
        told = TOLD if job.kind == "aggregate" else {}
        odd = ODD if job.kind == "aggregate" else {}
        write_result(folder, JobResult(Payload().to_bytes(), phases, broadcasts, bounded=told, noticed=odd))

    work.seen = seen  # type: ignore[attr-defined]
    return work


def test_a_grant_reaches_the_job_and_what_was_bounded_the_operator(coordinator, tools, worker) -> None:
    """`approve --images` again changes a grant; who is bounded stands in status and in the log, with how."""
    members = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcd"]
    for images in (4000, 5000):
        fingerprint = OPERATIONS["status"](coordinator, {})["members"][0]["fingerprint"]
        OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": fingerprint, "images": images})
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, worker)
    for member in members:
        assert isinstance(member.reply(1), Payload)
    assert step(coordinator, worker)
    assert worker.seen[-1].granted == {"clinic-a": 5000} and worker.seen[-1].protection.rule == "clip"
    facts = OPERATIONS["status"](coordinator, {})
    assert facts["bounded"] == [{"round": 1, "name": "clinic-b", "how": TOLD["clinic-b"]}]
    assert facts["noticed"] == [{"round": 1, "name": "clinic-c", "how": ODD["clinic-c"]}]
    assert f"look at: reply of clinic-c in round 1: {ODD['clinic-c']}" in [one.strip() for one in status_lines(facts)]
    assert [one["images"] for one in facts["members"]] == [5000, None, None, None]
    rows = OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 100})["shown"]
    (row,) = [one for one in rows if one["event"] == "reply_bounded"]
    assert audit_words.explanation(row["event"], row["detail"]) == TOLD["clinic-b"]
    (odd,) = [one for one in rows if one["event"] == "reply_noticed"]
    assert (odd["subject"], audit_words.explanation(odd["event"], odd["detail"])) == ("clinic-c", ODD["clinic-c"])
    assert [one["detail"]["images"] for one in rows if one["event"] == "granted"] == [4000, 5000]
    assert TOLD["clinic-b"] not in json.dumps(audit_words.without_explanation(row["event"], row["detail"]))


@pytest.mark.parametrize("phases", [("warm",)])
def test_after_the_last_round_its_bounded_replies_are_told(coordinator, tools, worker) -> None:
    """docs/reference/coordinator.md: `status` told of the round before it, and of a fault mended since."""
    members = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcd"]
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, worker)
    for member in members:
        assert isinstance(member.reply(1), Payload)
    assert step(coordinator, worker)
    facts = OPERATIONS["status"](coordinator, {})
    assert facts["state"] == "done"
    assert [(one["round"], one["name"]) for one in facts["bounded"]] == [(1, "clinic-b")]
    assert [(one["round"], one["name"]) for one in facts["noticed"]] == [(1, "clinic-c")]


def test_a_revoked_members_grant_is_not_its_successors(coordinator, tools) -> None:
    """A new member of the same name has to be granted its images anew."""
    tools.approved_member(coordinator, "clinic-a")
    fingerprint = OPERATIONS["status"](coordinator, {})["members"][0]["fingerprint"]
    OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": fingerprint, "images": 7})
    OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})
    tools.approved_member(coordinator, "clinic-a")
    assert OPERATIONS["status"](coordinator, {})["members"][0]["images"] is None

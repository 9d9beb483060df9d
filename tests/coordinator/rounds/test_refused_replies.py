"""A reply that aggregation refused: its sender hears why, and it is judged again after the operator changed what is
allowed. Source: docs/security.md check 46; docs/reference/coordinator.md, a reply that was refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.rounds.judging import judge
from edgefl_coordinator.rounds.protection.bounding import Protection
from edgefl_coordinator.rounds.refused import _sentence
from edgefl_coordinator.store.tables import audit
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.messages.requests import ReplyReply, TaskReply

pytestmark = pytest.mark.both_databases

SENT = np.zeros(4, np.float32)
FAR = "it lies 20 times as far from the broadcast as the median reply; 8 times is allowed for its 764 images, and "
FAR += "more with a grant of 764"
PHASES = ("train", "train")


def reply(far: float = 1.0, images: int = 52) -> Payload:
    return Payload({"head.bias": SENT + np.float32(far)}, {"site_sha256": "0" * 64, "n_train": images})


MISSHAPEN = Payload({"head.bias": np.ones(3, np.float32)}, reply().scalars)
SHAPE = "the array head.bias is float32 with shape (3,), but in the round's broadcast it is float32 with shape (4,)"


def mean(chosen: Any) -> dict[str, np.ndarray]:
    return {"head.bias": sum(one.arrays["head.bias"] for one in chosen.values()) / len(chosen)}


def worker(folder: Path, timeout_s: float) -> None:
    """FedAvg's server that always sends the same, with the federation's protection."""
    job = read_job(folder)
    sent = Payload({"head.bias": SENT})
    made = dict.fromkeys(job.sites, sent.to_bytes())
    if job.kind != "aggregate":
        write_result(folder, JobResult(sent.to_bytes() if job.kind == "start" else b"", PHASES, made))
        return
    offered = {name: Payload.from_bytes(read_bounded(path, 2**20)) for name, path in job.replies.items()}
    protection = Protection(job.protection, job.granted)
    verdict = judge(offered, dict.fromkeys(offered, sent), mean, quorum=job.quorum, protection=protection)
    data = Payload(verdict.result).to_bytes() if verdict.result else b""
    write_result(folder, JobResult(data, PHASES, made if data else {}, verdict.refused, verdict.problem))


def begun(make_coordinator: Any, tools: Any, clock: Any, odd: Payload, gate: Any = "") -> Any:
    """Three servers of 52 images and a fourth that replied otherwise and was refused; all four are needed."""

    def first_round(folder: Path, timeout_s: float) -> None:
        if gate:
            job, data = read_job(folder), Payload({"head.bias": SENT}).to_bytes()
            write_result(folder, JobResult(data, PHASES, dict.fromkeys(job.sites, data), gate=gate))
        else:
            worker(folder, timeout_s)

    coordinator = make_coordinator(
        task={"shares_maps": False},
        rounds={"quorum_min": 4, "quorum_target": 4, "min_cohort": 2, "count": 2},
        protection={"rule": "mean"},
    )
    members = [tools.approved_member(coordinator, name) for name in ("a", "b", "c", "big")]
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, worker)
    coordinator.serving = True
    clock.now_ms += 5000
    for member in members:
        assert isinstance(member.reply(1, payload=odd if member is members[3] else reply()), Payload)
    assert step(coordinator, first_round)
    return coordinator, members


@pytest.fixture
def federation(make_coordinator, tools, clock) -> Any:
    """The fourth has 764 images without a grant, and lies too far off."""
    return begun(make_coordinator, tools, clock, reply(20.0, 764))


@pytest.fixture
def misshapen(make_coordinator, tools, clock) -> Any:
    """The fourth has an array of another shape."""
    return begun(make_coordinator, tools, clock, MISSHAPEN)


def task_of(member: Any) -> TaskReply:
    return TaskReply.from_payload(member.call("task", Payload()))


def approve(coordinator: Any, tools: Any, member: Any, images: int) -> None:
    (found,) = [one for one in OPERATIONS["status"](coordinator, {})["members"] if one["name"] == member.name]
    OPERATIONS["approve"](coordinator, {"name": member.name, "fingerprint": found["fingerprint"], "images": images})


def test_its_sender_hears_round_and_reason(federation) -> None:
    """It was told nothing, and asked for the same reply again and again."""
    _, members = federation
    told = task_of(members[3])
    assert told.stuck.startswith(f"the reply of round 1 was refused: {FAR}; it is judged again if the operator grants")
    assert told.stuck == f"{told.refusal}; {task_of(members[0]).stuck}"
    assert (told.replied, told.state) == (True, "open")
    others = task_of(members[0])
    assert not others.refusal and others.replied and others.stuck.startswith("round 1 is stuck since")


def test_the_operator_is_told_to_grant_before_a_smaller_quorum(federation, clock) -> None:
    """With the member's name, which the sentence for the members lacks; and since when the round stands still."""
    coordinator, members = federation
    told = OPERATIONS["status"](coordinator, {})["standing"]
    assert told["commands"] == [
        "edgefl-coordinator approve big --fingerprint FINGERPRINT --images 764",
        "edgefl-coordinator set rounds.quorum_min 3",
    ]
    assert "--images 764 (if the member has so many); or: edgefl-coordinator set" in told["sentence"]
    assert (told["cause"], told["since_ms"]) == ("replies_refused", clock.now_ms)
    stuck = task_of(members[0]).stuck
    assert "1 reply was refused" in stuck and "tell the operator" in stuck and "approve" not in stuck


def test_a_grant_lets_it_be_judged_again(federation, tools) -> None:
    """Nobody learns or sends anything again."""
    coordinator, members = federation
    approve(coordinator, tools, members[3], 764)
    assert not task_of(members[3]).stuck and task_of(members[3]).replied
    assert step(coordinator, worker)
    assert task_of(members[3]).round == 2
    facts = OPERATIONS["status"](coordinator, {})
    assert not facts["refused"] and facts["round"] == 2


def test_a_grant_that_is_too_small_leaves_it_refused(federation, tools) -> None:
    coordinator, members = federation
    approve(coordinator, tools, members[3], 60)
    assert step(coordinator, worker)
    assert task_of(members[3]).refusal and not step(coordinator, worker)
    again = members[3].reply(1, payload=reply(), idem="another-work-item")
    assert again.code == "bad_contribution"


@pytest.mark.parametrize("changes", [{"protection.rule": "clip"}, {"rounds.quorum_min": "3"}])
def test_a_changed_rule_or_quorum_lets_it_be_judged_again(federation, clock, changes) -> None:
    """Under the rule `clip` a claim explains the distance; with a quorum of three the round goes on without it."""
    coordinator, members = federation
    OPERATIONS["set"](coordinator, {"changes": changes})
    status = OPERATIONS["status"](coordinator, {})
    assert status["problem"] is None and status["replies"] == 4
    assert step(coordinator, worker)
    assert task_of(members[3]).round == 2
    assert task_of(members[3]).refusal == (
        "" if "protection.rule" in changes else f"the reply of round 1 was refused: {FAR}; the round went on without it"
    )


def test_another_setting_changes_nothing(federation) -> None:
    coordinator, members = federation
    OPERATIONS["set"](coordinator, {"changes": {"limits.open_blobs": "3"}})
    assert task_of(members[3]).refusal and not step(coordinator, worker)


def test_the_round_went_on_without_it(federation) -> None:
    """It hears so until it has replied in the next one, and its file is gone."""
    coordinator, members = federation
    OPERATIONS["set"](coordinator, {"changes": {"rounds.quorum_min": "3"}})
    assert step(coordinator, worker)
    told = task_of(members[3])
    assert told.stuck == f"the reply of round 1 was refused: {FAR}; the round went on without it" and not told.replied
    assert len(blob_names(coordinator.store)) == 1 + 4  # the state and four broadcasts
    ReplyReply.from_payload(members[3].reply(2, payload=reply()))
    assert task_of(members[3]).stuck == "" and task_of(members[0]).stuck == ""


def test_who_was_shut_out_is_not_judged_again(federation, tools) -> None:
    coordinator, members = federation
    OPERATIONS["revoke"](coordinator, {"name": "big"})
    approve(coordinator, tools, members[0], 60)
    assert OPERATIONS["status"](coordinator, {})["replies"] == 3
    assert len(blob_names(coordinator.store)) == 1 + 4 + 3


def test_a_reply_of_the_wrong_form_is_corrected_in_its_round(misshapen) -> None:
    """It waited for the next round, which could not open without it: docs/security.md 4."""
    coordinator, members = misshapen
    told = task_of(members[3])
    assert told.refused and told.correctable and told.refusal.startswith(f"the reply of round 1 was refused: {SHAPE}; ")
    assert not task_of(members[0]).refused and not task_of(members[0]).correctable
    before = blob_names(coordinator.store)
    ReplyReply.from_payload(members[3].reply(1, payload=reply(), idem="the-corrected-one"))
    assert len(before - blob_names(coordinator.store)) == 1  # the refused one is deleted
    assert not task_of(members[3]).refusal and task_of(members[3]).replied
    assert step(coordinator, worker)
    assert task_of(members[3]).round == 2 and not OPERATIONS["status"](coordinator, {})["refused"]
    with coordinator.store.transaction() as connection:
        events = list(connection.scalars(select(audit.c.event)))
    assert events.count("reply_corrected") == 1 and events.count("reply_accepted") == 5


def test_a_correction_weakens_neither_replay_nor_idempotency(misshapen) -> None:
    """docs/security.md 2.5: an `idem` has one payload and one answer, and content that was refused stays refused."""
    _, members = misshapen
    again = members[3].reply(1, payload=MISSHAPEN, idem="the-same-content-again")
    assert (again.code, again.message) == ("bad_contribution", f"the reply of round 1 was refused: {SHAPE}")
    assert members[3].reply(1, payload=reply()).code == "idem_conflict"  # under the key of the refused one
    first = members[3].reply(1, payload=MISSHAPEN)  # a retry of it: the first answer, and no effect
    assert isinstance(first, Payload) and task_of(members[3]).correctable
    fixed = members[3].reply(1, payload=reply(), idem="the-corrected-one")
    assert members[3].reply(1, payload=reply(), idem="the-corrected-one") == fixed
    assert members[3].reply(1, payload=reply(2.0), idem="one-more-in-the-round").code == "round_closed"


def test_a_reply_is_corrected_once_in_a_round(misshapen) -> None:
    """So that nobody tries out what passes."""
    coordinator, members = misshapen
    other = Payload({"head.bias": np.ones(5, np.float32)}, reply().scalars)
    ReplyReply.from_payload(members[3].reply(1, payload=other, idem="wrong-another-time"))
    assert step(coordinator, worker)
    told = task_of(members[3])
    assert told.refused and not told.correctable and "(5,)" in told.refusal
    assert members[3].reply(1, payload=reply(), idem="the-third-attempt").code == "bad_contribution"


def test_it_is_corrected_behind_a_round_that_the_gate_refused(make_coordinator, tools, clock) -> None:
    """Its sender also hears of that round, and is told all the same that another may replace its own: docs/security.md
    4."""
    coordinator, members = begun(make_coordinator, tools, clock, reply(), gate="refused")
    tools.approved_member(coordinator, "late")  # who may still reply, so nothing is stuck yet
    for member in members:
        assert isinstance(member.reply(2, payload=MISSHAPEN if member is members[3] else reply()), Payload)
    assert step(coordinator, worker)
    told = task_of(members[3])
    assert "is stuck" not in told.stuck and told.stuck.endswith(
        "its replies count for nothing, and round 2 begins where it began"
    )
    assert told.refused and told.correctable and told.refusal.startswith("the reply of round 2 was refused: ")
    clock.now_ms += 60_000  # it is called stuck, too
    assert "round 2 is stuck since" in task_of(members[3]).stuck and task_of(members[3]).refusal == told.refusal


def test_a_reply_that_lies_too_far_off_is_not_corrected(federation) -> None:
    """Whoever may try again learns how far is allowed."""
    _, members = federation
    assert task_of(members[3]).refused and not task_of(members[3]).correctable
    assert members[3].reply(1, payload=reply(), idem="one-that-is-nearer").code == "bad_contribution"


def test_a_reason_is_one_printable_line() -> None:
    """A reason quotes names of arrays, which a member chose; a line break would make the task unreadable."""
    told = _sentence(2, "the array a\nb\x1b is " + "x" * 2000)
    assert told.isprintable() and told.startswith("the reply of round 2 was refused: the array a b") and len(told) < 600

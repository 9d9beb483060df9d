"""A round that does not go on, in the store: operator and members read why, and what is named mends it.

Source: docs/decisions/0041.
"""

import sys
import threading
from pathlib import Path

import pytest

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import membership
from edgefl_coordinator.rounds import task_status
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.rounds.worker_process import WorkerProcess
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import BroadcastRequest, Refusal, TaskReply

pytestmark = pytest.mark.both_databases

_SET = "edgefl-coordinator set "
INVITE = "edgefl-coordinator invite NAME --role device"
OLD = {"quorum_min": 2, "quorum_target": 3, "min_cohort": 3, "start": "automatic"}


def task_of(member) -> TaskReply:
    return TaskReply.from_payload(member.call("task", Payload()))


def broadcast_of(member, number: int) -> Payload | Refusal | int:
    return member.call("broadcast", BroadcastRequest(round=number).to_payload(), rnd=number)


@pytest.mark.parametrize("shares_maps", [True, False])
def test_three_members_under_the_old_defaults(make_coordinator, clock, tools, shares_maps) -> None:
    """The stall of a quorum of 3 and a cohort of 3 others: after the first round nobody gets the second broadcast. The
    operator and the members read the same cause, and the setting that the operator reads mends the federation."""
    coordinator = make_coordinator(rounds=OLD, task={"shares_maps": shares_maps})
    coordinator.serving = True
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    assert step(coordinator, tools.toy_worker)
    for member in three:
        assert task_of(member).stuck == ""
        assert isinstance(member.reply(1), Payload)
    assert step(coordinator, tools.toy_worker)
    opened_ms = clock.now_ms
    clock.now_ms += 1000
    assert [broadcast_of(member, 2).code for member in three] == ["small_cohort"] * 3
    told = OPERATIONS["status"](coordinator, {})["standing"]
    assert (told["kind"], told["cause"], told["since_ms"]) == ("stuck", "small_cohort", opened_ms)
    assert told["commands"] == [INVITE, _SET + "rounds.min_cohort 2 rounds.quorum_min 3"]
    assert told["sentence"] == (
        "round 2 is stuck since 2026-09-21 14:13:20 UTC: its broadcast is withheld from 3 members, because it holds "
        "contributions of only 2 others, and at least 3 are required; the operator runs: "
        + told["commands"][0]
        + " (2 more members are needed); or, if fewer others are enough: "
        + told["commands"][1]
    )
    cause = told["sentence"].removesuffix(told["mend"])
    assert {task_of(member).stuck.partition("members cannot")[0] for member in three} == {cause}
    words = told["commands"][1].removeprefix(_SET).split()
    OPERATIONS["set"](coordinator, {"changes": dict(zip(words[::2], words[1::2], strict=True))})
    for number in (2, 3):
        for member in three:
            assert task_of(member).stuck == ""
            assert isinstance(broadcast_of(member, number), Payload)
            assert isinstance(member.reply(number), Payload)
        assert step(coordinator, tools.toy_worker)
    assert task_of(three[0]).state == "done"
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "over"


def test_more_members_mend_what_is_withheld(make_coordinator, tools) -> None:
    """What is named first gives up nothing: those who join now have three others, and their replies close the round."""
    coordinator = make_coordinator(rounds=OLD)
    coordinator.serving = True
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    assert step(coordinator, tools.toy_worker)
    for member in three:
        member.reply(1)
    assert step(coordinator, tools.toy_worker)
    assert OPERATIONS["status"](coordinator, {})["standing"]["commands"][0] == INVITE
    joined = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "de"]
    while step(coordinator, tools.toy_worker):
        pass
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "waits"
    for member in joined:
        assert isinstance(broadcast_of(member, 2), Payload)
        assert isinstance(member.reply(2), Payload)
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "moves"


def test_silence_over_a_deadline_is_told(make_coordinator, clock, tools) -> None:
    """A round that waits says until when; past its deadline it is stuck since then, until the replies come."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    coordinator.serving = True
    deadline_ms = task_of(three[0]).deadline_ms
    three[0].reply(1)
    assert OPERATIONS["status"](coordinator, {})["standing"]["until_ms"] == deadline_ms
    for _ in range(3):  # since the first one, however often it is extended
        clock.now_ms += 60_000
        told = task_of(three[1])
        status = OPERATIONS["status"](coordinator, {})["standing"]
        assert (status["cause"], status["since_ms"]) == ("no_reply", deadline_ms)
        assert status["sentence"].startswith(told.stuck)  # members cannot shut out who does not come back
    three[1].reply(1)
    three[2].reply(1)
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "moves"
    assert step(coordinator, tools.toy_worker)
    assert OPERATIONS["status"](coordinator, {})["standing"]["cause"] == "no_reply"  # of the next round: it waits
    assert task_of(three[0]).stuck == ""


def test_a_round_goes_on_without_who_is_away(make_coordinator, clock, tools) -> None:
    """The smaller quorum that is named after a deadline lets the round close; who was away takes part in the next."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    coordinator.serving = True
    three[0].reply(1)
    three[1].reply(1)
    clock.now_ms += 60_000
    task_of(three[0])
    words = OPERATIONS["status"](coordinator, {})["standing"]["commands"][-1].removeprefix(_SET).split()
    OPERATIONS["set"](coordinator, {"changes": dict(zip(words[::2], words[1::2], strict=True))})
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "moves"
    clock.now_ms += 60_000
    assert step(coordinator, tools.toy_worker)
    assert isinstance(broadcast_of(three[2], 2), Payload) and isinstance(three[2].reply(2), Payload)


def test_a_round_that_opened_again_waits_for_its_new_deadline(make_coordinator, clock, tools) -> None:
    """A deadline that passed before it opened again is past: nobody is told of one, or shut out for it."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    coordinator.serving = True
    four = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcd"]
    tools.start_rounds(coordinator)
    clock.now_ms += 60_000
    assert task_of(four[0]).stuck and not step(coordinator, tools.toy_worker)
    for member in four[:3]:
        member.reply(1)

    def refusing(folder: Path, _: float) -> None:
        refused = {"clinic-c": "the array x is missing"}
        write_result(folder, JobResult(b"", ("warm", "train", "train"), {}, refused, "too few sound replies: 2"))

    assert step(coordinator, refusing)
    told = OPERATIONS["status"](coordinator, {})
    assert (told["standing"]["kind"], told["standing"]["until_ms"]) == ("waits", told["deadline_ms"])
    assert told["deadline_ms"] == clock.now_ms + 60_000 and task_of(four[3]).stuck == ""
    clock.now_ms = told["deadline_ms"]
    assert task_of(four[3]).stuck
    standing = OPERATIONS["status"](coordinator, {})["standing"]
    assert (standing["cause"], standing["since_ms"]) == ("no_reply", told["deadline_ms"])


def test_too_few_replies_are_not_called_unfit(make_coordinator, tools) -> None:
    """One of three members was shut out while the round was closed: two replies are left, and they do fit together. The
    command that is named lets them count."""
    rules = {"quorum_min": 3, "quorum_target": 3, "min_cohort": 1, "allow_small_cohort": True}
    coordinator = make_coordinator(rounds=rules)
    coordinator.serving = True
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    for member in three:
        member.reply(1)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-c"})

    def judging(folder: Path, timeout_s: float) -> None:
        job = read_job(folder)
        if len(job.replies) >= job.quorum:
            return tools.toy_worker(folder, timeout_s)
        return write_result(folder, JobResult(b"", ("warm", "train", "train"), {}, {}, "too few sound replies: 2"))

    assert step(coordinator, judging)
    told = OPERATIONS["status"](coordinator, {})["standing"]
    assert (told["cause"], told["why"]) == ("too_few_members", "it needs 3 replies, and there are 2 members")
    words = told["commands"][-1].removeprefix(_SET).split()
    OPERATIONS["set"](coordinator, {"changes": dict(zip(words[::2], words[1::2], strict=True))})
    assert step(coordinator, judging) and OPERATIONS["status"](coordinator, {})["round"] == 2


def test_a_job_that_fails_is_told_to_members_without_its_cause(make_coordinator, clock, tools) -> None:
    """The sentence names no file and no member; the operator sees the error beside it."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    for member in three:
        member.reply(1)

    def broken(*_: object) -> None:
        raise OperatorError("no space in /srv/secret for clinic-a")

    coordinator.serving, first_ms = True, clock.now_ms
    for _ in range(2):
        with pytest.raises(OperatorError):
            step(coordinator, broken)
        clock.now_ms += 10_000
    status = OPERATIONS["status"](coordinator, {})
    assert (status["standing"]["cause"], status["standing"]["since_ms"]) == ("job_failed", first_ms)
    assert "secret" in status["failing"]["error"] and status["standing"]["mend"].endswith(status["failing"]["error"])
    assert status["standing"]["commands"] == []
    stuck = task_of(three[0]).stuck
    assert stuck.startswith("round 1 is stuck since") and "secret" not in stuck and "clinic" not in stuck
    assert step(coordinator, tools.toy_worker)
    assert task_of(three[0]).stuck == ""


def test_a_job_that_ended_with_the_server_did_not_fail(make_coordinator, tools) -> None:
    """`serve` was stopped while it aggregated: nothing failed, and what mends it is to serve again."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    for member in three:
        member.reply(1)
    worker = WorkerProcess((sys.executable, "-c", "import time; time.sleep(600)"))
    stops = threading.Timer(0.5, worker.stop)
    stops.start()
    with pytest.raises(OperatorError, match="at the next start"):
        step(coordinator, worker)
    stops.join()
    status = OPERATIONS["status"](coordinator, {})
    assert (status["failing"], status["standing"]["cause"]) == (None, "not_served")
    assert "job_failed" not in {
        row["event"] for row in OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 99})["shown"]
    }
    assert step(coordinator, tools.toy_worker)


def broken(*_: object) -> None:
    raise OperatorError("no space")


def with_a_failed_newcomer(make_coordinator, tools):
    """A coordinator in an open round and its three members; the broadcast for a fourth has failed."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    coordinator.serving = True
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    tools.approved_member(coordinator, "clinic-d")
    with pytest.raises(OperatorError):
        step(coordinator, broken)
    return coordinator, three


def test_broadcasts_for_a_newcomer_end_a_failure(make_coordinator, tools) -> None:
    """What failed was tried again and is done, though the round has not closed: nothing is stuck."""
    coordinator, three = with_a_failed_newcomer(make_coordinator, tools)
    assert task_of(three[0]).stuck
    assert step(coordinator, tools.toy_worker)
    assert task_of(three[0]).stuck == "" and OPERATIONS["status"](coordinator, {})["failing"] is None


def test_a_job_that_is_due_no_more_hides_nothing(make_coordinator, clock, tools) -> None:
    """The newcomer whose broadcast failed is shut out: nothing is tried again, and what is missing is told."""
    coordinator, three = with_a_failed_newcomer(make_coordinator, tools)
    assert OPERATIONS["status"](coordinator, {})["standing"]["cause"] == "job_failed"
    OPERATIONS["revoke"](coordinator, {"name": "clinic-d"})
    assert not step(coordinator, broken)
    clock.now_ms += 60_000
    status = OPERATIONS["status"](coordinator, {})
    assert (status["standing"]["cause"], status["failing"]) == ("no_reply", None)
    assert "could not do the round's job" not in task_of(three[0]).stuck


def test_a_start_that_is_due_no_more_is_not_tried_again(make_coordinator, tools) -> None:
    """It failed, and one of those who were to begin is shut out: members are awaited, and nothing fails."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2, "start": "automatic"})
    coordinator.serving = True
    for letter in "abc":
        tools.approved_member(coordinator, f"clinic-{letter}")

    def broken(*_: object) -> None:
        raise OperatorError("no space")

    with pytest.raises(OperatorError):
        step(coordinator, broken)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-c"})
    assert not step(coordinator, broken)
    status = OPERATIONS["status"](coordinator, {})
    assert (status["standing"]["cause"], status["failing"]) == ("too_few_members", None)


def test_an_unserved_coordinator_says_so(make_coordinator, tools) -> None:
    """Nothing moves while no `serve` runs, whatever the round would need."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    for letter in "abc":
        tools.approved_member(coordinator, f"clinic-{letter}")
    tools.start_rounds(coordinator)
    told = OPERATIONS["status"](coordinator, {})["standing"]
    assert (told["kind"], told["commands"]) == ("stuck", ["edgefl-coordinator serve"])


def test_a_look_at_the_round_reads_no_members_keys(make_coordinator, tools, monkeypatch) -> None:
    """Members ask for the task all the time: a look costs two short columns of each, a twelfth of what whole rows of
    ten thousand and a union of sets for each took.
    """
    coordinator = make_coordinator(rounds={"quorum_target": 4})
    four = [tools.quick_member(coordinator, f"clinic-{letter}") for letter in "abcd"]
    tools.start_rounds(coordinator)
    four[0].reply(1)
    looked = []

    def reads(row: object) -> None:
        looked.append(row)

    monkeypatch.setattr(membership, "_member", reads)
    with coordinator.store.transaction() as connection:
        found = task_status.how_it_stands(connection, coordinator.settings, coordinator.clock(), served=True)
    assert (found.kind, looked) == ("waits", [])

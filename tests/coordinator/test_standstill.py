"""Why a round does not go on: the rule as a table, against the state machine, and in the store.

Source: docs/decisions/0041 and docs/security.md check 64.
"""

import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.prospects import beyond_members, set_command, unfinishable, usual_quorum
from edgefl_coordinator.rounds.standstill import FederationStanding, RoundFacts, standing, stuck_sentence
from edgefl_coordinator.rounds.states import Close, Round, cohort_allows, decide
from edgefl_coordinator.rounds.worker_process import WorkerProcess
from edgefl_coordinator.settings import LEAST_COHORT, RoundSettings, TaskSettings
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import BroadcastRequest, Refusal, TaskReply

RULES = RoundSettings(count=2, quorum_min=3, quorum_target=3, min_cohort=2, deadline_s=60)
OLD = RoundSettings(count=2, quorum_min=2, quorum_target=3, min_cohort=3, deadline_s=60)
FOUR = RoundSettings(count=2, quorum_min=4, quorum_target=4, min_cohort=2)
MANUAL = RoundSettings(count=2, quorum_min=3, quorum_target=3, min_cohort=2, start="manual")
MAPS = TaskSettings(method="fedevprompt", name="nevus", classes=("a", "b"), backbone={"image_px": 24, "patch": 12})
DEADLINE = 100_000
_SET = "edgefl-coordinator set "
INVITE = "edgefl-coordinator invite NAME --role device"
RISKY = _SET + "rounds.quorum_min 2 rounds.min_cohort 1 rounds.allow_small_cohort true"
APPROVE = "edgefl-coordinator approve {} --fingerprint FINGERPRINT"


def facts(replies: int = 0, *, tried: int = 0, number: int = 2, state: str = "open", **more: object) -> RoundFacts:
    current = Round(number=number, state=state, deadline_ms=DEADLINE, replies=replies, tried=tried)  # type: ignore[arg-type]
    return RoundFacts(**{"current": current, "members": 3, "opened_ms": 40_000, **more})  # type: ignore[arg-type]


# fmt: off
TABLE = [
    # facts, rules → kind, cause, commands
    (RoundFacts(members=0, started=False), RULES,     "waits", "too_few_members", [INVITE]),
    (RoundFacts(members=2, started=False), RULES,     "waits", "too_few_members", [INVITE]),
    (RoundFacts(members=1, started=False, pending=("hospital",)), RULES, "waits", "too_few_members",
     [APPROVE.format("hospital"), INVITE]),
    (RoundFacts(members=1, started=False, pending=("a", "b", "c")), RULES, "waits", "too_few_members",
     [APPROVE.format("a"), APPROVE.format("b")]),
    (RoundFacts(members=2, started=False), MANUAL,    "waits", "not_started", ["edgefl-coordinator start"]),
    (RoundFacts(members=3), RULES,                    "moves", "aggregating", []),
    (RoundFacts(members=3, failing_ms=7), RULES,      "stuck", "job_failed", []),
    (RoundFacts(members=3, failing_ms=7, served=False), RULES, "waits", "not_served", ["edgefl-coordinator serve"]),
    (RoundFacts(members=3, served=False), RULES,      "waits", "not_served", ["edgefl-coordinator serve"]),
    (facts(able=3), RULES,                            "waits", "no_reply", []),
    (facts(able=3, served=False, served_until_ms=8), RULES, "stuck", "not_served", ["edgefl-coordinator serve"]),
    (facts(2, able=1), RULES,                         "waits", "no_reply", []),
    (facts(3), RULES,                                 "moves", "", []),
    (facts(3, state="aggregating"), RULES,            "moves", "aggregating", []),
    (facts(3, state="aggregating", failing_ms=7), RULES, "stuck", "job_failed", []),
    (facts(3, state="aggregating", failing_ms=7, served=False, served_until_ms=8), RULES, "stuck", "not_served",
     ["edgefl-coordinator serve"]),
    (facts(1, able=2, overdue_ms=9, served=False, served_until_ms=8), RULES, "stuck", "not_served",
     ["edgefl-coordinator serve"]),
    # the three-member federation of the old defaults: all replied once, and nobody may have the second broadcast
    (facts(withheld=(2, 2, 2)), OLD, "stuck", "small_cohort", [_SET + "rounds.min_cohort 2 rounds.quorum_min 3"]),
    # two of three replied before the deadline: the third may, and is not enough
    (facts(able=0, withheld=(1, 1, 2)), OLD, "stuck", "small_cohort",
     [_SET + "rounds.min_cohort 1 rounds.allow_small_cohort true"]),
    (facts(2, able=1, overdue_ms=9), RULES, "stuck", "no_reply", ["edgefl sync", "edgefl-train join"]),
    (facts(3, able=1, overdue_ms=9, members=4), FOUR, "stuck", "no_reply", [_SET + "rounds.quorum_min 3"]),
    (facts(2, tried=2, refused=1), RULES,             "stuck", "replies_refused", [INVITE, RISKY]),
    (facts(3, tried=3, members=4, refused=1), FOUR,   "stuck", "replies_refused", [_SET + "rounds.quorum_min 3"]),
    (facts(3, tried=3), RULES,                        "stuck", "cannot_aggregate", [INVITE]),
    (facts(3, tried=3, able=1), RULES,                "waits", "no_reply", []),
    (facts(1, able=1, members=2), RULES,              "stuck", "too_few_members", [INVITE, RISKY]),
    (facts(0, members=0), RULES,                      "stuck", "too_few_members", [INVITE]),
    (facts(2, beside=1), RULES,                       "stuck", "too_few_members", [INVITE, RISKY]),
    (facts(3, state="done", over=True), RULES,        "over", "", []),
    (facts(3, state="done", over=True, able=1, withheld=(1, 1)), RULES, "over", "small_cohort", []),
]
# fmt: on


@pytest.mark.parametrize(("found", "rules", "kind", "cause", "commands"), TABLE)
def test_table(found, rules, kind, cause, commands) -> None:
    """Each cause by name, with what mends it; where nothing is missing, when it goes on."""
    told = standing(found, rules)
    assert (told.kind, told.cause, list(told.commands)) == (kind, cause, commands)
    assert all(command in told.mend for command in commands)
    assert bool(stuck_sentence(told, 2)) is (kind == "stuck")
    if (kind, cause, commands[:1]) == ("stuck", "no_reply", ["edgefl sync"]):  # its own sync may have failed
        assert told.mend.endswith("; it says what keeps a reply back")
    if kind == "stuck":
        assert told.since_ms is not None


members_ = st.integers(0, 6)
rules_ = st.builds(
    lambda least, more, cohort, start: RoundSettings(
        count=3, quorum_min=least, quorum_target=least + more, min_cohort=cohort, allow_small_cohort=True, start=start
    ),
    st.integers(1, 6), st.integers(0, 4), st.integers(0, 6), st.sampled_from(["automatic", "manual"]),
)  # fmt: skip


@st.composite
def open_rounds(draw, rules) -> RoundFacts:
    """An open round; who has not replied and may not have the broadcast has too few others in it."""
    replies, able, refused = draw(members_), draw(members_), draw(members_)
    few = st.integers(0, rules.min_cohort - 1) if rules.min_cohort else st.nothing()
    withheld = tuple(draw(st.lists(few, max_size=6))) if rules.min_cohort else ()
    return facts(
        replies, tried=draw(st.integers(0, replies)), able=able, withheld=withheld, refused=refused,
        members=replies + able + refused + len(withheld), overdue_ms=draw(st.sampled_from([None, 50_000])),
    )  # fmt: skip


def closes(found: RoundFacts, rules: RoundSettings, replies: int) -> bool:
    """Whether the state machine closes the round with so many replies, at its deadline."""
    return isinstance(decide(replace(found.current, replies=replies), rules, DEADLINE), Close)


@given(st.data(), rules_)
def test_it_moves_on_at_a_known_time_or_is_stuck_by_name(data, rules) -> None:
    """The state machine is the judge: what is not called stuck closes by the told time once those who may reply have;
    what is called stuck does not close even then, unless its members were merely silent over a deadline."""
    found = data.draw(open_rounds(rules))
    told, possible = standing(found, rules), found.current.replies + found.able
    if told.kind in ("moves", "waits"):
        assert told.until_ms == DEADLINE
        assert closes(found, rules, possible)
        assert told.kind == "waits" or closes(found, rules, found.current.replies)
        assert found.overdue_ms is None or told.kind == "moves"  # silence over a deadline is named
    else:
        assert told.kind == "stuck" and told.cause and told.why and told.commands and told.since_ms is not None
        assert closes(found, rules, possible) is (told.cause == "no_reply")


def carried_out(command: str, rules: RoundSettings) -> RoundSettings:
    """The rules after `set`, as the operator types it."""
    words = command.removeprefix(_SET).split()
    changes = {key.removeprefix("rounds."): value == "true" if value == "true" else int(value)
               for key, value in zip(words[::2], words[1::2], strict=True)}  # fmt: skip
    return RoundSettings(**{name: getattr(rules, name) for name in rules.__struct_fields__} | changes)


def test_what_a_sentence_adds() -> None:
    """A cohort below two others is named with what it costs; contributions beside the average are no replies."""
    told = standing(facts(withheld=(1, 1, 2)), OLD)
    assert told.mend.endswith("true (with so few, a single contribution can be told apart), or more members join")
    assert standing(facts(1, able=1, members=2), RULES).mend == (
        f"the operator runs: {INVITE}; or, if a single contribution may be told apart: {RISKY}"
    )
    waits = standing(RoundFacts(members=1, started=False, pending=("hospital",)), RULES)
    assert waits.mend == (
        f"approve hospital: {APPROVE.format('hospital')}, then invite and approve 1 more: {INVITE} (or --role site, "
        "for a server)"
    )
    assert standing(facts(2, beside=1), RULES).why == (
        "it needs 3 replies, and there are 3 members, of which 1 sent contributions, which are not averaged"
    )


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), rules_)
def test_a_setting_that_is_told_mends(data, rules) -> None:
    """A `set` command that is named makes the round one that closes when those who then may reply have."""
    found = data.draw(open_rounds(rules))
    told = standing(found, rules)
    assume(told.kind == "stuck" and told.commands[0].startswith(_SET))
    mended = carried_out(told.commands[0], rules)
    freed = sum(others >= mended.min_cohort for others in found.withheld)
    open_again = replace(found, current=replace(found.current, tried=0))  # `set` lets replies be tried again
    assert closes(open_again, mended, found.current.replies + found.able + freed)
    if not unfinishable(rules, MAPS):
        assert not unfinishable(mended, MAPS)  # so that `set` takes it


def runs_to_the_end(rules: RoundSettings, members: int, alive: int) -> bool:
    """Whether a federation of an averaging method ends, of whose members `alive` reply whenever they may."""
    averaged: set[int] = set()
    for number in range(1, rules.count + 1):
        able = {one for one in range(alive) if cohort_allows(len(averaged - {one}), number, rules.min_cohort)}
        current = Round(number=number, state="open", deadline_ms=DEADLINE, replies=0)
        arrived: set[int] = set()
        for one in sorted(able):
            if decide(replace(current, replies=len(arrived)), rules, 0) is None:
                arrived.add(one)
        if not isinstance(decide(replace(current, replies=len(arrived)), rules, DEADLINE), Close):
            return False
        averaged = arrived
    return rules.start == "manual" or members >= rules.quorum_target


@given(rules_, st.integers(1, 8))
def test_what_init_takes_can_finish(rules, members) -> None:
    """Settings that pass end with every number of living members from the quorum on; those that do not, stop."""
    why = unfinishable(rules, MAPS, members)
    ends = members >= rules.quorum_min and all(
        runs_to_the_end(rules, members, alive) for alive in range(rules.quorum_min, members + 1)
    )
    assert ends is not bool(why), (why, rules)


@given(
    st.integers(1, 40), st.none() | st.integers(1, 40), st.none() | st.integers(1, 40), st.none() | st.integers(0, 9)
)
def test_the_usual_quorum_fits(members, least, target, cohort) -> None:
    """Whatever an operator leaves out fits what they gave: without more than a number of members, all passes."""
    found = usual_quorum(members, least, target, cohort)
    assert (least or found.quorum_min, target or found.quorum_target) == (found.quorum_min, found.quorum_target)
    if least is None and target is None and cohort is None:
        rules = RoundSettings(
            count=2, quorum_min=found.quorum_min, quorum_target=found.quorum_target, min_cohort=found.min_cohort,
            allow_small_cohort=members <= LEAST_COHORT,
        )  # fmt: skip
        assert not unfinishable(rules, MAPS, members)
        assert found.min_cohort == min(3, members - 1) and found.quorum_target == members


@pytest.mark.parametrize(
    ("changes", "members", "words"),
    [
        ({"quorum_min": 2, "min_cohort": 3}, 3,
         "give rounds.quorum_min 4 or more, or rounds.min_cohort 1 or less with rounds.allow_small_cohort true"),
        ({"quorum_min": 4, "quorum_target": 4}, 3, "needs 4 replies, and 3 members cannot"),
        ({"quorum_target": 4}, 3, "wait for 4 approved members"),
        ({"quorum_min": 1751, "quorum_target": 1751}, 1751, "3502 arrays, and at most 3500 travel together"),
        ({}, 3, ""),
        ({"quorum_target": 4, "start": "manual"}, 3, ""),
    ],
)  # fmt: skip
def test_what_cannot_finish_says_what_to_give(changes, members, words) -> None:
    rules = RoundSettings(**{"count": 2, "quorum_min": 3, "quorum_target": 3, "min_cohort": 2, **changes})
    why = unfinishable(rules, MAPS, members)
    assert words in why if words else why == ""


def task_of(member) -> TaskReply:
    return TaskReply.from_payload(member.call("task", Payload()))


def broadcast_of(member, number: int) -> Payload | Refusal | int:
    return member.call("broadcast", BroadcastRequest(round=number).to_payload(), rnd=number)


@pytest.mark.parametrize("shares_maps", [True, False])
def test_three_members_under_the_old_defaults(make_coordinator, clock, tools, shares_maps) -> None:
    """The stall of a quorum of 3 and a cohort of 3 others: after the first round nobody gets the second broadcast. The
    operator and the members read the same sentence, and the command in it mends the federation to its end."""
    old = {"quorum_min": 2, "quorum_target": 3, "min_cohort": 3, "start": "automatic"}
    coordinator = make_coordinator(rounds=old, task={"shares_maps": shares_maps})
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
    assert told["commands"] == [_SET + "rounds.min_cohort 2 rounds.quorum_min 3"]
    assert told["sentence"] == (
        "round 2 is stuck since 2026-09-21 14:13:20 UTC: its broadcast is withheld from 3 members, because it holds "
        "contributions of only 2 others, and at least 3 are required; the operator runs: " + told["commands"][0]
    )
    assert {task_of(member).stuck for member in three} == {told["sentence"]}
    words = told["commands"][0].removeprefix(_SET).split()
    OPERATIONS["set"](coordinator, {"changes": dict(zip(words[::2], words[1::2], strict=True))})
    for number in (2, 3):
        for member in three:
            assert task_of(member).stuck == ""
            assert isinstance(broadcast_of(member, number), Payload)
            assert isinstance(member.reply(number), Payload)
        assert step(coordinator, tools.toy_worker)
    assert task_of(three[0]).state == "done"
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "over"


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
        assert (status["cause"], status["since_ms"], status["sentence"]) == ("no_reply", deadline_ms, told.stuck)
    three[1].reply(1)
    three[2].reply(1)
    assert OPERATIONS["status"](coordinator, {})["standing"]["kind"] == "moves"
    assert step(coordinator, tools.toy_worker)
    assert OPERATIONS["status"](coordinator, {})["standing"]["cause"] == "no_reply"  # of the next round: it waits
    assert task_of(three[0]).stuck == ""


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


def test_broadcasts_for_a_newcomer_end_a_failure(make_coordinator, tools) -> None:
    """What failed was tried again and is done, though the round has not closed: nothing is stuck."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    coordinator.serving = True
    three = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(coordinator)
    tools.approved_member(coordinator, "clinic-d")

    def broken(*_: object) -> None:
        raise OperatorError("no space")

    with pytest.raises(OperatorError):
        step(coordinator, broken)
    assert task_of(three[0]).stuck
    assert step(coordinator, tools.toy_worker)
    assert task_of(three[0]).stuck == "" and OPERATIONS["status"](coordinator, {})["failing"] is None


def test_an_unserved_coordinator_says_so(make_coordinator, tools) -> None:
    """Nothing moves while no `serve` runs, whatever the round would need."""
    coordinator = make_coordinator(rounds={"quorum_min": 3, "quorum_target": 3, "min_cohort": 2})
    for letter in "abc":
        tools.approved_member(coordinator, f"clinic-{letter}")
    tools.start_rounds(coordinator)
    told = OPERATIONS["status"](coordinator, {})["standing"]
    assert (told["kind"], told["commands"]) == ("stuck", ["edgefl-coordinator serve"])


def test_standing_names_no_more_than_it_has() -> None:
    """Without a known beginning the sentence tells none."""
    told = FederationStanding(kind="stuck", cause="x", why="so", mend="do this")
    assert stuck_sentence(told, 0) == "the federation is stuck: so; do this"


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(rules_, st.integers(1, 8))
def test_what_a_warning_tells_lets_rounds_close(rules, members) -> None:
    """After a member was shut out: what is to be set makes all who are left enough, and early; else nothing is said."""
    assume(not unfinishable(rules, MAPS))
    why, changes = beyond_members(rules, members)
    assert bool(why) is (members < rules.quorum_target) is bool(changes)
    if changes:
        mended = carried_out(set_command(changes), rules)
        assert decide(Round(number=1, state="open", deadline_ms=DEADLINE, replies=members), mended, 0) is not None
        assert not unfinishable(mended, MAPS, members)
    assert beyond_members(rules, 0)[1] == {}

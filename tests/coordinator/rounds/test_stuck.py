"""Why a round does not go on: the rule as a table, and against the state machine. In the store: `test_stuck_rounds`.

Source: docs/decisions/0041 and docs/security.md check 64.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from edgefl_coordinator.rounds.quorum import beyond_members, set_command, unfinishable, usual_quorum
from edgefl_coordinator.rounds.states import Close, Round, cohort_allows, decide
from edgefl_coordinator.rounds.stuck import FederationStanding, RoundFacts, standing, stuck_sentence
from edgefl_coordinator.settings import LEAST_COHORT, RoundSettings, TaskSettings

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
RISKY_TWO = RISKY.replace(_SET, _SET + "rounds.quorum_target 2 ")  # where only two members are left: what `revoke` says
RISKY_ONE = _SET + "rounds.quorum_min 1 rounds.min_cohort 0 rounds.allow_small_cohort true"
EARLY = RoundSettings(count=2, quorum_min=3, quorum_target=4, min_cohort=2)
ANYBODY = APPROVE.format("NAME")


def facts(replies: int = 0, *, tried: int = 0, number: int = 2, state: str = "open", **more: object) -> RoundFacts:
    current = Round(number=number, state=state, deadline_ms=DEADLINE, replies=replies, tried=tried)  # type: ignore[arg-type]
    return RoundFacts(**{"current": current, "members": 3, "opened_ms": 40_000, **more})  # type: ignore[arg-type]


SILENT = [
    "edgefl sync", "edgefl contribute", "edgefl-train join", "edgefl-coordinator revoke NAME",
    "edgefl-coordinator invite NAME --role device",
]  # fmt: skip

# fmt: off
TABLE = [
    # facts, rules → kind, cause, commands
    (RoundFacts(members=0, started=False), RULES,     "waits", "too_few_members", [INVITE]),
    (RoundFacts(members=2, started=False), RULES,     "waits", "too_few_members", [INVITE]),
    (RoundFacts(members=1, started=False, pending=("hospital",)), RULES, "waits", "too_few_members",
     [APPROVE.format("hospital"), INVITE]),
    (RoundFacts(members=1, started=False, pending=("a", "b", "c")), RULES, "waits", "too_few_members",
     [APPROVE.format("a"), APPROVE.format("b")]),
    # open invites are counted: nobody is advised to invite more than are missing
    (RoundFacts(members=1, started=False, invited=2), RULES, "waits", "too_few_members", [ANYBODY]),
    (RoundFacts(members=0, started=False, invited=1, pending=("a",)), RULES, "waits", "too_few_members",
     [APPROVE.format("a"), ANYBODY, INVITE]),
    (facts(0, members=0, invited=1), RULES,           "stuck", "too_few_members", [ANYBODY, INVITE]),
    (facts(1, able=1, members=2, invited=1), RULES,   "stuck", "too_few_members", [ANYBODY, RISKY_TWO]),
    (RoundFacts(members=2, started=False), MANUAL,    "waits", "not_started", ["edgefl-coordinator start"]),
    (RoundFacts(members=3), RULES,                    "moves", "aggregating", []),
    (RoundFacts(members=3, failing_ms=7), RULES,      "stuck", "job_failed", []),
    (RoundFacts(members=3, failing_ms=7, served=False), RULES, "waits", "not_served", ["edgefl-coordinator serve"]),
    (RoundFacts(members=3, served=False), RULES,      "waits", "not_served", ["edgefl-coordinator serve"]),
    (facts(able=3), RULES,                            "waits", "no_reply", []),
    (facts(able=3, served=False, stopped_ms=8), RULES, "stuck", "not_served", ["edgefl-coordinator serve"]),
    (facts(2, able=1), RULES,                         "waits", "no_reply", []),
    (facts(3), RULES,                                 "moves", "", []),
    (facts(3, state="aggregating"), RULES,            "moves", "aggregating", []),
    (facts(3, state="aggregating", failing_ms=7), RULES, "stuck", "job_failed", []),
    (facts(3, state="aggregating", failing_ms=7, served=False, restored_ms=8), RULES, "stuck", "not_served",
     ["edgefl-coordinator serve"]),
    (facts(1, able=2, overdue_ms=9, served=False, sign_ms=8), RULES, "stuck", "not_served",
     ["edgefl-coordinator serve"]),
    # a full disk, whatever else is wrong: what mends the rest could not be carried out
    (facts(1, able=2, overdue_ms=9, disowned_ms=7, full="/srv/fl"), RULES, "stuck", "disk_full", []),
    (facts(3, state="aggregating", failing_ms=7, full="/srv/fl"), RULES, "stuck", "disk_full", []),
    (facts(3, served=False, sign_ms=8, full="/srv/fl"), RULES, "stuck", "disk_full", ["edgefl-coordinator serve"]),
    (RoundFacts(members=0, started=False, full="/srv/fl"), RULES, "stuck", "disk_full", []),
    (facts(3, state="done", over=True, full="/srv/fl"), RULES, "over", "", []),
    # the three-member federation of the old defaults: all replied once, and nobody may have the second broadcast
    (facts(withheld=(2, 2, 2)), OLD, "stuck", "small_cohort", [_SET + "rounds.min_cohort 2 rounds.quorum_min 3"]),
    (facts(withheld=(2, 2, 2), newcomer=3), OLD, "stuck", "small_cohort",
     [INVITE, _SET + "rounds.min_cohort 2 rounds.quorum_min 3"]),
    (facts(withheld=(2, 2, 2), newcomer=3, pending=("a", "b")), OLD, "stuck", "small_cohort",
     [*map(APPROVE.format, "ab"), _SET + "rounds.min_cohort 2 rounds.quorum_min 3"]),
    # two of three replied before the deadline: the third may, and is not enough
    (facts(able=0, withheld=(1, 1, 2)), OLD, "stuck", "small_cohort",
     [_SET + "rounds.min_cohort 1 rounds.allow_small_cohort true"]),
    (facts(2, able=1, overdue_ms=9), RULES, "stuck", "no_reply", [*SILENT, RISKY]),
    (facts(0, able=3, overdue_ms=9), RULES, "stuck", "no_reply", SILENT),  # no quorum is as small as none
    (facts(3, able=1, overdue_ms=9, members=4), FOUR, "stuck", "no_reply", [_SET + "rounds.quorum_min 3"]),
    (facts(2, tried=2, refused=1), RULES,             "stuck", "replies_refused", [INVITE, RISKY]),
    (facts(3, tried=3, members=4, refused=1), FOUR,   "stuck", "replies_refused", [_SET + "rounds.quorum_min 3"]),
    # a refused member with a grant for what it claims gives up nothing, so it comes first
    (facts(3, tried=3, members=4, refused=1, grants=(("big", 764),)), FOUR, "stuck", "replies_refused",
     [APPROVE.format("big") + " --images 764", _SET + "rounds.quorum_min 3"]),
    (facts(1, tried=1, refused=1, grants=(("big", 764),), pending=("a",)), RULES, "stuck", "replies_refused",
     [APPROVE.format("big") + " --images 764", APPROVE.format("a"), RISKY_ONE]),
    (facts(3, members=4), EARLY,                      "moves", "", [_SET + "rounds.quorum_target 3"]),
    (facts(3, members=4, able=1), EARLY,              "moves", "", []),
    (facts(3, tried=3), RULES,                        "stuck", "cannot_aggregate", [INVITE]),
    (facts(2, tried=2, members=2), RULES,             "stuck", "too_few_members", [INVITE, RISKY_TWO]),
    (facts(3, tried=3, able=1), RULES,                "waits", "no_reply", []),
    (facts(1, able=1, members=2), RULES,              "stuck", "too_few_members", [INVITE, RISKY_TWO]),
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
    if kind == "stuck":
        unknown = cause == "disk_full" or found.sign_ms is not None  # nobody could note it
        assert (told.since_ms is None) is unknown


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
    told = standing(facts(withheld=(1, 1, 2), newcomer=2), OLD)  # a newcomer would have two others, of three
    assert told.mend.endswith("true (with so few, a single contribution can be told apart)") and INVITE not in told.mend
    told = standing(
        facts(withheld=(1, 1), newcomer=2),
        RoundSettings(count=2, quorum_min=2, quorum_target=3, min_cohort=2, deadline_s=60),
    )
    assert told.mend == (
        f"the operator runs: {INVITE} (2 more members are needed); or, if a single contribution may be told apart: "
        f"{_SET}rounds.min_cohort 1 rounds.allow_small_cohort true"
    )
    assert standing(facts(1, able=1, members=2), RULES).mend == (
        f"the operator runs: {INVITE}; or, if a single contribution may be told apart: {RISKY_TWO}"
    )
    waits = standing(RoundFacts(members=1, started=False, pending=("hospital",)), RULES)
    assert waits.mend == (
        f"approve hospital: {APPROVE.format('hospital')}, then invite and approve 1 more: {INVITE} (or --role site, "
        "for a server)"
    )
    invited = standing(RoundFacts(members=0, started=False, invited=1), RULES)
    assert invited.mend == (
        f"approve who uses the 1 open invite: {ANYBODY}, then invite and approve 2 more: {INVITE} (or --role site, for "
        "a server)"
    )
    enough = standing(RoundFacts(members=1, started=False, invited=4), RULES)
    assert enough.mend == f"approve who uses 2 of the 4 open invites: {ANYBODY}"
    assert standing(facts(2, beside=1), RULES).why == (
        "it needs 3 replies, and there are 3 members, of which 1 sent contributions, which are not averaged"
    )


def test_a_round_is_stuck_since_the_reply_that_it_lacks_fell_away() -> None:
    """By hand: of five members each may reply, three are needed. The third that falls away, at 70 s, is the one; who
    falls away later changes nothing. It said when the round opened."""
    five = RoundSettings(count=2, quorum_min=3, quorum_target=5, min_cohort=2)
    for able, losses_ms in (
        (3, (50_000, 60_000)),
        (2, (50_000, 60_000, 70_000)),
        (1, (50_000, 60_000, 70_000, 80_000)),
    ):
        told = standing(facts(0, able=able, members=able, losses_ms=losses_ms), five)
        assert (told.kind, told.since_ms) == (("waits", None) if able == 3 else ("stuck", 70_000))
    assert standing(facts(0, able=2, members=2), five).since_ms == 40_000  # so few from the beginning
    assert standing(facts(0, able=2, members=2, raised_ms=90_000), five).since_ms == 90_000  # `set` asked for more


def test_a_round_with_enough_replies_says_when_it_goes_on() -> None:
    """An operator read `at least 3, closes early at 4` and waited an hour without a word."""
    told = standing(facts(3, members=4), EARLY)
    assert told.why == (
        "the round has enough replies and goes on at 1970-01-01 00:01:40 UTC, for no more than 3 replies can come"
    )
    assert standing(facts(3, able=1), EARLY).why.endswith("goes on at 1970-01-01 00:01:40 UTC")
    assert isinstance(decide(facts(3).current, carried_out(told.commands[0], EARLY), 0), Close)  # what is named does it


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data(), rules_)
def test_a_setting_that_is_told_mends(data, rules) -> None:
    """A `set` command that is named makes the round one that closes when those who then may reply have."""
    found = data.draw(open_rounds(rules))
    told = standing(found, rules)
    assume(told.kind == "stuck" and told.commands[-1].startswith(_SET))
    mended = carried_out(told.commands[-1], rules)
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

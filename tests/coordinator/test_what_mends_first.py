"""What a stuck federation is told to do first: what keeps its protection (docs/reference/coordinator.md, stuck)."""

import pytest

from edgefl_coordinator.rounds.states import Round
from edgefl_coordinator.rounds.stuck import RoundFacts, standing, stuck_sentence, unnamed
from edgefl_coordinator.settings import RoundSettings

RULES = RoundSettings(count=2, quorum_min=3, quorum_target=3, min_cohort=2)
FOUR = RoundSettings(count=2, quorum_min=4, quorum_target=4, min_cohort=2)
PAIR = RoundSettings(count=2, quorum_min=2, quorum_target=2, min_cohort=1, allow_small_cohort=True)
APPROVE = "edgefl-coordinator approve NAME --fingerprint FINGERPRINT"
INVITE = "edgefl-coordinator invite NAME --role device"
_SET = "edgefl-coordinator set "
RISKY = _SET + "rounds.quorum_target 2 rounds.quorum_min 2 rounds.min_cohort 1 rounds.allow_small_cohort true"
RISKY_ONE = _SET + "rounds.quorum_target 1 rounds.quorum_min 1 rounds.min_cohort 0 rounds.allow_small_cohort true"


def facts(replies: int, able: int, *pending: str, **more: object) -> RoundFacts:
    """An open round of as many members as have replied or may."""
    current = Round(number=2, state="open", deadline_ms=100_000, replies=replies, tried=0)
    return RoundFacts(current=current, members=replies + able, able=able, pending=pending, opened_ms=40_000, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "rules", "commands"),
    [
        (facts(1, 1, "d3"), RULES, [APPROVE, RISKY]),
        (facts(0, 1, "d3"), RULES, [APPROVE, INVITE, RISKY_ONE]),
        (facts(1, 2, "d3"), FOUR, [APPROVE, _SET + "rounds.quorum_target 3 rounds.quorum_min 3"]),
        (facts(1, 2), FOUR, [_SET + "rounds.quorum_target 3 rounds.quorum_min 3"]),
        (facts(0, 1), PAIR, [INVITE, _SET + "rounds.quorum_target 1 rounds.quorum_min 1 rounds.min_cohort 0"]),
    ],
)
def test_a_member_comes_before_a_smaller_quorum(found, rules, commands) -> None:
    """Who waits for approval first, settings with which a contribution can be told apart last, and called so. Members
    read the sentence, so it names nobody."""
    told = standing(unnamed(found), rules)
    sentence = stuck_sentence(told, 2)
    assert (told.kind, told.cause, list(told.commands)) == ("stuck", "too_few_members", commands)
    places = [sentence.index(command) for command in commands]
    assert places == sorted(places) and "d3" not in sentence
    assert ("min_cohort" in sentence) is ("if a single contribution may be told apart" in sentence)


def test_the_operator_reads_whom_to_approve() -> None:
    """Each who waits has a command of its own, as far as members are missing; who was only invited has no name yet."""
    told = standing(facts(0, 1, "a", "b", "c"), RULES).commands
    assert told[:-1] == tuple(APPROVE.replace("NAME", name) for name in "ab")
    told = standing(facts(0, 1, "a", invited=1), RULES).commands
    assert told[:-1] == (APPROVE.replace("NAME", "a"), APPROVE)


@pytest.mark.parametrize("served", [True, False])
def test_a_half_changed_signing_key_comes_first(served) -> None:
    """Whatever else is wrong: members refuse the server before they could do anything about the rest."""
    told = standing(facts(0, 3, served=served, disowned_ms=5), RULES)
    assert (told.kind, told.cause, told.since_ms) == ("stuck", "key_not_changed", 5)
    assert told.commands == ("edgefl-coordinator rotate --signing",)

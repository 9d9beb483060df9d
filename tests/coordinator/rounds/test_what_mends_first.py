"""What a stuck federation is told to do first: what keeps its protection (docs/reference/coordinator.md, stuck)."""

from dataclasses import replace

import pytest

from edgefl_coordinator.rounds.states import Round
from edgefl_coordinator.rounds.stuck import RoundFacts, standing, stuck_sentence
from edgefl_coordinator.settings import RoundSettings

RULES = RoundSettings(count=2, quorum_min=3, quorum_target=3, min_cohort=2)
FOUR = RoundSettings(count=2, quorum_min=4, quorum_target=4, min_cohort=2)
FIVE = RoundSettings(count=2, quorum_min=4, quorum_target=5, min_cohort=3)
PAIR = RoundSettings(count=2, quorum_min=2, quorum_target=2, min_cohort=1, allow_small_cohort=True)
APPROVE = "edgefl-coordinator approve NAME --fingerprint FINGERPRINT"
APPROVE_D3 = APPROVE.replace("NAME", "d3")
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
        (facts(1, 1, "d3"), RULES, [APPROVE_D3, RISKY]),
        (facts(0, 1, "d3"), RULES, [APPROVE_D3, INVITE, RISKY_ONE]),
        (facts(1, 2, "d3"), FOUR, [APPROVE_D3, _SET + "rounds.quorum_target 3 rounds.quorum_min 3"]),
        (facts(1, 2), FOUR, [_SET + "rounds.quorum_target 3 rounds.quorum_min 3"]),
        (facts(0, 1), PAIR, [INVITE, _SET + "rounds.quorum_target 1 rounds.quorum_min 1 rounds.min_cohort 0"]),
    ],
)
def test_a_member_comes_before_a_smaller_quorum(found, rules, commands) -> None:
    """Who waits for approval first, settings with which a contribution can be told apart last, and called so. Members
    read why, whom to tell, and neither a name nor a command that only the operator can run."""
    told = standing(found, rules)
    sentence, to_member = stuck_sentence(told, 2), stuck_sentence(told, 2, to_member=True)
    assert told.why in to_member and "tell the operator" in to_member
    assert "d3" not in to_member and not any(command in to_member for command in commands)
    assert (told.kind, told.cause, list(told.commands)) == ("stuck", "too_few_members", commands)
    places = [sentence.index(command) for command in commands]
    assert places == sorted(places)
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


def test_a_model_that_nobody_published_is_the_cause_of_silence() -> None:
    """Of a round that waited for a device without a model, all were told to do what they had just done."""
    silent = facts(1, 2, overdue_ms=9)
    told = standing(replace(silent, unpublished="main/nevus"), RULES)
    publish = "edgefl-coordinator publish FILE.edgefl --trust PUB"
    assert (told.kind, told.cause, told.commands, told.since_ms) == ("stuck", "no_bundle", (publish,), 9)
    why = "no bundle of main/nevus is published, so devices have no model to learn with; it has 1 reply and needs 3"
    assert told.why.startswith(why) and told.mend.startswith(f"the operator runs: {publish}; then each member")
    to_member = stuck_sentence(told, 2, to_member=True)
    assert why in to_member and "; tell the operator to publish one; then each member that has not" in to_member
    assert "edgefl-coordinator" not in to_member
    for_silence = stuck_sentence(standing(silent, RULES), 2, to_member=True)
    assert "edgefl sync" in for_silence and "revoke" not in for_silence and "set" not in for_silence


@pytest.mark.parametrize(
    ("rules", "replies", "given_up", "command"),
    [
        (RULES, 2, "if a single contribution may be told apart",
         _SET + "rounds.quorum_min 2 rounds.min_cohort 1 rounds.allow_small_cohort true"),
        (FIVE, 3, "if fewer others are enough", _SET + "rounds.quorum_min 3 rounds.min_cohort 2"),
    ],
)  # fmt: skip
def test_a_member_that_is_away_need_not_be_shut_out(rules, replies, given_up, command) -> None:
    """With two of three replies after the deadline `status` offered `revoke` alone, and a revoked key never counts
    again. What can be undone stands beside it, with what it gives up."""
    told = standing(facts(replies, rules.quorum_target - replies, overdue_ms=9), rules)
    assert told.cause == "no_reply" and told.commands[-1] == command
    assert "if one never comes back: edgefl-coordinator revoke NAME (its keys never count again)" in told.mend
    assert told.mend.endswith(f"; or, to go on while it is away, {given_up}: {command}")

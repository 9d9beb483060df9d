"""The round state machine without HTTP or store: docs/security.md check 64, and invariants by hypothesis (check 61)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_coordinator.rounds.states import (
    Close,
    Extend,
    Round,
    accepts,
    cohort_allows,
    decide,
    starts_by_itself,
)
from edgefl_coordinator.settings import RoundSettings

POLICY = RoundSettings(count=1, quorum_min=2, quorum_target=4, deadline_s=60)
DEADLINE = 100_000

# fmt: off
OUTCOMES = [
    # replies, milliseconds to the deadline → outcome            the row of check 64
    (0,  60_000, None),                                        # just opened
    (3,       1, None),                                        # stragglers: there is time yet
    (4,  60_000, Close("target")),                             # all there, early
    (5,       0, Close("target")),
    (3,       0, Close("deadline")),                           # stragglers: partial close
    (2,       0, Close("deadline")),                           # exactly the minimum
    (1,       0, Extend(DEADLINE + 60_000)),                   # below the minimum
    (0,       0, Extend(DEADLINE + 60_000)),                   # all late
    (0,  -1_000, Extend(DEADLINE + 60_000)),
    (1, -60_000, Extend(DEADLINE + 120_000)),                  # the coordinator was down over a whole period
    (2, -99_000, Close("deadline")),
]
# fmt: on


@pytest.mark.parametrize(("replies", "left_ms", "outcome"), OUTCOMES)
def test_quorum_table(replies, left_ms, outcome) -> None:
    """Check 64: the outcome table is exact."""
    current = Round(number=1, state="open", deadline_ms=DEADLINE, replies=replies)
    assert decide(current, POLICY, DEADLINE - left_ms) == outcome


# fmt: off
AFTER_A_FAILURE = [
    # replies, tried, milliseconds to the deadline → outcome
    (4, 4, 60_000, None),                                      # all there, and all tried together before
    (4, 4,      0, Extend(DEADLINE + 60_000)),
    (2, 2,      0, Extend(DEADLINE + 60_000)),
    (3, 2, 60_000, None),                                      # one has come to them
    (3, 2,      0, Close("deadline")),
    (5, 4, 60_000, Close("target")),
    (1, 1,      0, Extend(DEADLINE + 60_000)),
]
# fmt: on


@pytest.mark.parametrize(("replies", "tried", "left_ms", "outcome"), AFTER_A_FAILURE)
def test_what_could_not_be_aggregated_is_not_tried_again(replies, tried, left_ms, outcome) -> None:
    """Check 46: a round that opened again closes only with a reply more than was tried."""
    current = Round(number=1, state="open", deadline_ms=DEADLINE, replies=replies, tried=tried)
    assert decide(current, POLICY, DEADLINE - left_ms) == outcome


@pytest.mark.parametrize("state", ["aggregating", "done"])
def test_a_closed_round_stays_closed(state) -> None:
    current = Round(number=1, state=state, deadline_ms=DEADLINE, replies=9)
    assert decide(current, POLICY, DEADLINE + 1) is None
    assert accepts(current, 1, 0) == "round_closed"


def test_which_round_takes_a_reply() -> None:
    """docs/security.md, reliability: late is `round_closed`, early is `no_round`."""
    current = Round(number=2, state="open", deadline_ms=DEADLINE, replies=0)
    assert accepts(current, 2, DEADLINE - 1) == "yes"
    assert accepts(current, 2, DEADLINE) == "round_closed"
    assert accepts(current, 1, 0) == "round_closed"
    assert accepts(current, 3, 0) == "no_round"
    assert accepts(None, 1, 0) == "no_round"


def test_who_opens_the_first_round() -> None:
    manual = RoundSettings(count=1, quorum_target=4, start="manual")
    assert starts_by_itself(4, POLICY)
    assert not starts_by_itself(3, POLICY)
    assert not starts_by_itself(9, manual)


@pytest.mark.parametrize(("others", "number", "allowed"), [(0, 1, True), (2, 2, False), (3, 2, True), (0, 2, False)])
def test_cohort(others, number, allowed) -> None:
    """Check 51: below `min_cohort` others nothing of theirs is released; the first broadcast holds nobody's."""
    assert cohort_allows(others, number, 3) is allowed


steps = st.lists(st.one_of(st.just("reply"), st.integers(0, 200_000)), max_size=40)


@given(steps, st.integers(1, 4), st.integers(0, 4), st.integers(1, 90))
def test_invariants(program, minimum, more, deadline_s) -> None:
    """Check 61: whatever the order of replies and clock jumps, a closed round has its quorum, an open one lies ahead of
    its deadline, and no reply is taken after closing."""
    rules = RoundSettings(count=1, quorum_min=minimum, quorum_target=minimum + more, deadline_s=deadline_s)
    now_ms = 0
    current = Round(number=1, state="open", deadline_ms=deadline_s * 1000, replies=0)
    for action in program:
        if isinstance(action, int):
            now_ms += action
        verdict = decide(current, rules, now_ms)
        if isinstance(verdict, Close):
            assert current.replies >= rules.quorum_min
            current = replace(current, state="aggregating")
        elif isinstance(verdict, Extend):
            assert current.replies < rules.quorum_min
            assert now_ms < verdict.deadline_ms <= now_ms + deadline_s * 1000
            current = replace(current, deadline_ms=verdict.deadline_ms)
        if current.state == "open":
            assert now_ms < current.deadline_ms
            assert current.replies < rules.quorum_target
        if action == "reply" and accepts(current, 1, now_ms) == "yes":
            assert current.state == "open"
            current = replace(current, replies=current.replies + 1)

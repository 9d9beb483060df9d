"""When a round opens, closes and ends: a pure state machine, without store, clock or network.

Guarantees: a round moves only open → aggregating → done; a reply is taken only by the open round and before it closed;
the outcome depends on the replies and the time, never on which timer fired first, because every caller asks `decide`
before it accepts. Source: docs/security.md, reliability, and check 64.

    open, replies >= target                       close, reason "target"
    open, deadline passed, replies >= minimum     close, reason "deadline"
    open, deadline passed, replies < minimum      extend by one deadline; the replies it has are kept
    otherwise                                     nothing

A round whose replies could not be aggregated opens again with those that are sound. It closes only once a reply has
come to them, so the same replies are never tried twice.
"""

from dataclasses import dataclass
from typing import Literal

RoundState = Literal["open", "aggregating", "done"]


@dataclass(frozen=True, kw_only=True)
class RoundPolicy:
    """How a federation runs its rounds.

    Attributes:
        quorum_min: replies below which a round is not aggregated.
        quorum_target: replies at which it closes early, and members that start the first round by themselves.
        deadline_s: seconds from opening to the deadline.

    Raises:
        ValueError: the numbers contradict each other.
    """

    quorum_min: int
    quorum_target: int
    deadline_s: int

    def __post_init__(self) -> None:
        if not 1 <= self.quorum_min <= self.quorum_target:
            raise ValueError(f"quorum needs 1 <= minimum ({self.quorum_min}) <= target ({self.quorum_target})")
        if self.deadline_s < 1:
            raise ValueError(f"the round deadline is {self.deadline_s} s, at least 1 s is needed")


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round as stored.

    Attributes:
        number: from 1.
        state: where it stands.
        deadline_ms: Unix milliseconds.
        replies: accepted so far.
        tried: replies left from an aggregation that failed; 0 where there was none.
    """

    number: int
    state: RoundState
    deadline_ms: int
    replies: int
    tried: int = 0


@dataclass(frozen=True)
class Close:
    """Stop taking replies and aggregate."""

    reason: Literal["target", "deadline"]


@dataclass(frozen=True)
class Extend:
    """Too few replies at the deadline: go on with a new one."""

    deadline_ms: int


def decide(current: Round, policy: RoundPolicy, now_ms: int) -> Close | Extend | None:
    """Return what has to happen to the current round now, or None."""
    if current.state != "open":
        return None
    untried = current.replies > current.tried
    if untried and current.replies >= policy.quorum_target:
        return Close("target")
    if now_ms < current.deadline_ms:
        return None
    if untried and current.replies >= policy.quorum_min:
        return Close("deadline")
    period_ms = policy.deadline_s * 1000
    missed = (now_ms - current.deadline_ms) // period_ms + 1  # after a long stop the new deadline still lies ahead
    return Extend(current.deadline_ms + missed * period_ms)


def accepts(current: Round | None, number: int, now_ms: int) -> Literal["yes", "no_round", "round_closed"]:
    """Judge a reply for round `number`, after `decide` was carried out."""
    if current is None or number > current.number:
        return "no_round"
    if number < current.number or current.state != "open" or now_ms >= current.deadline_ms:
        return "round_closed"
    return "yes"


def starts_by_itself(approved: int, policy: RoundPolicy, *, automatic: bool) -> bool:
    """Tell whether the first round opens without the operator's `start`."""
    return automatic and approved >= policy.quorum_target


def cohort_allows(others: int, number: int, min_cohort: int) -> bool:
    """Tell whether a broadcast may be released to a member.

    Args:
        others: members other than the receiver whose replies were aggregated before this round.
        number: the round; the first holds nobody's contribution yet.
        min_cohort: other contributors needed.
    """
    return number == 1 or others >= min_cohort

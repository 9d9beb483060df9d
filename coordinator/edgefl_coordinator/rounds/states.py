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

from edgefl_coordinator.settings import RoundSettings

RoundState = Literal["open", "aggregating", "done"]
NOTHING = -1  # in the place of a number of others: the broadcast holds what no member sent


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round as stored."""

    number: int  # from 1
    state: RoundState
    deadline_ms: int  # Unix milliseconds
    replies: int  # accepted so far
    tried: int = 0  # replies left from an aggregation that failed; 0 where there was none


@dataclass(frozen=True)
class Close:
    """Stop taking replies and aggregate."""

    reason: Literal["target", "deadline"]


@dataclass(frozen=True)
class Extend:
    """Too few replies at the deadline: go on with a new one."""

    deadline_ms: int


def decide(current: Round, rules: RoundSettings, now_ms: int) -> Close | Extend | None:
    """Return what has to happen to the current round now, or None."""
    if current.state != "open":
        return None
    untried = current.replies > current.tried
    if untried and current.replies >= rules.quorum_target:
        return Close("target")
    if now_ms < current.deadline_ms:
        return None
    if untried and current.replies >= rules.quorum_min:
        return Close("deadline")
    period_ms = rules.deadline_s * 1000
    missed = (now_ms - current.deadline_ms) // period_ms + 1  # after a long stop the new deadline still lies ahead
    return Extend(current.deadline_ms + missed * period_ms)


def accepts(current: Round | None, number: int, now_ms: int) -> Literal["yes", "no_round", "round_closed"]:
    """Judge a reply for round `number`, after `decide` was carried out."""
    if current is None or number > current.number:
        return "no_round"
    if number < current.number or current.state != "open" or now_ms >= current.deadline_ms:
        return "round_closed"
    return "yes"


def starts_by_itself(approved: int, rules: RoundSettings) -> bool:
    """Tell whether the first round opens without the operator's `start`, with so many approved members."""
    return rules.start == "automatic" and approved >= rules.quorum_target


def cohort_allows(others: int, number: int, min_cohort: int) -> bool:
    """Tell whether a broadcast with contributions of so many others may be released; the first round's holds none."""
    return number == 1 or others == NOTHING or others >= min_cohort

"""What may leave this device, how often, how much and until when, as its owner decided: `policy.toml` in the home.

    format = 1
    [limits]                   # 0 stops what it limits; a limit that is not named has its default
    rounds_per_day = 48
    bytes_per_day = 1073741824
    bytes_per_round = 134217728
    [allowed]                  # what may leave, each with the last day (UTC) of the owner's consent, or "always"
    maps = 2027-11-21

Guarantees:

* Without a file, or with one that names nothing, nothing leaves. A file that is damaged, or holds a word that is not
  known here, is refused: a misspelt limit must never mean "no limit". What may leave stands last, so that a file that
  was cut off allows less, never more.
* What leaves is judged by the names of its arrays (`rules.travels`), not by what a method says of itself; whatever
  has no name of its own counts as `weights`, which tell most.
* A day is the last 24 hours, in bytes of payloads as `spending` noted them.

A sentence of refusal names the command that changes the decision. Source: docs/security.md, exchange policy and threat
model (A5).
"""

import datetime
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from edgefl_client.home import Home
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.travels import KINDS
from edgefl_protocol.sentences import counted

ALWAYS = "always"
_WORDS = {  # of `rules.travels.KINDS`
    "maps": "attention maps of pictures",
    "features": "features of pictures",
    "prototypes": "means of features of a class",
    "logits": "mean answers of the model",
    "prompts": "learned prompts",
    "weights": "learned weights of the network",
}
PASSES = frozenset({"day_too_large", "too_many_rounds"})  # refusals that pass with time
_MAX_BYTES = 64 * 2**10
_HEAD = "# What may leave this device. Written by edgefl policy; a comment added here is lost when it writes again.\n"


class PolicyError(EdgeflError):
    """The owner's policy refuses; nothing left the device."""

    code = "policy"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How often and how much."""

    rounds_per_day: int = 48  # answered in 24 hours
    bytes_per_day: int = 1024 * 2**20  # of payloads in 24 hours
    bytes_per_round: int = 128 * 2**20  # of one reply; a ResNet-18 and its momentum encoder are 92 MB


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What left this device in the 24 hours before a moment, apart from the reply in question."""

    now_ms: int  # the moment, Unix milliseconds
    rounds: int = 0  # rounds answered, without the one in question
    bytes: int = 0  # of payloads


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The owner's decisions."""

    # kind of content → last day of consent, or None for no end
    allowed: Mapping[str, datetime.date | None] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)  # how often and how much

    def check(self, travels: Sequence[str], size: int, spent: Spent) -> None:
        """Refuse what may not leave.

        Args:
            travels: kinds of content, as `travels_of` names them.

        Raises:
            PolicyError: `not_allowed`, `consent_expired`, `round_too_large`, `day_too_large` or `too_many_rounds`.
        """
        for kind in travels:
            self._check_consent(kind, spent.now_ms)
        if not travels and not any(self.holds(kind, spent.now_ms) for kind in self.allowed):
            raise PolicyError(
                "nothing may leave this device, not even numbers, until its owner allows it: see edgefl policy show",
                "not_allowed",
            )
        limits = self.limits
        if size > limits.bytes_per_round:
            raise PolicyError(
                f"the reply takes {size} bytes, but the policy of this device allows {limits.bytes_per_round} a "
                f"round: edgefl policy limit --bytes-per-round {size} allows it",
                "round_too_large",
            )
        if 0 < limits.bytes_per_day < size:  # waiting would never help
            raise PolicyError(
                f"the reply takes {size} bytes, but the policy of this device allows {limits.bytes_per_day} in 24 "
                f"hours: edgefl policy limit --bytes-per-day {size} allows it",
                "round_too_large",
            )
        if spent.bytes + size > limits.bytes_per_day:
            raise PolicyError(
                f"{spent.bytes} bytes left this device in the last 24 hours and the reply takes {size} more, but "
                f"the policy of this device allows {limits.bytes_per_day} in 24 hours: wait, or allow more with "
                "edgefl policy limit --bytes-per-day N",
                "day_too_large",
            )
        if spent.rounds + 1 > limits.rounds_per_day:
            raise PolicyError(
                f"{counted(spent.rounds, 'round was', 'rounds were')} answered in the last 24 hours, and the policy "
                f"of this device allows {limits.rounds_per_day}: wait, or allow more with edgefl policy limit "
                "--rounds-per-day N",
                "too_many_rounds",
            )

    def _check_consent(self, kind: str, now_ms: int) -> None:
        if kind not in self.allowed:
            raise PolicyError(
                f"{_WORDS.get(kind, kind)} may not leave this device, because its owner has not allowed it: edgefl "
                f"policy allow {kind} allows it, and edgefl contribute --dry-run shows what would leave",
                "not_allowed",
            )
        last = self.allowed[kind]
        if last is not None and not self.holds(kind, now_ms):
            raise PolicyError(
                f"the consent for {_WORDS[kind]} to leave this device ended on {last.isoformat()}: edgefl policy "
                f"allow {kind} renews it",
                "consent_expired",
            )

    def holds(self, kind: str, now_ms: int) -> bool:
        """Tell whether the consent to an allowed kind holds at a moment."""
        last = self.allowed[kind]
        return last is None or day_of(now_ms) <= last

    def to_json(self) -> dict[str, Any]:
        """Give the object that `edgefl policy show --json` prints."""
        return {
            "allowed": {kind: ALWAYS if last is None else last.isoformat() for kind, last in self._ordered()},
            "limits": {one.name: getattr(self.limits, one.name) for one in fields(self.limits)},
        }

    def to_toml(self) -> str:
        """Write the content of `policy.toml`."""
        lines = [_HEAD + "format = 1", "", "[limits]"]
        lines += [f"{one.name} = {getattr(self.limits, one.name)}" for one in fields(self.limits)]
        lines += ["", "[allowed]"]
        lines += [
            f"{kind} = " + (f'"{ALWAYS}"' if last is None else last.isoformat()) for kind, last in self._ordered()
        ]
        return "\n".join(lines) + "\n"

    def _ordered(self) -> list[tuple[str, datetime.date | None]]:
        return [(kind, self.allowed[kind]) for kind in KINDS if kind in self.allowed]


def day_of(now_ms: int) -> datetime.date:
    """Give the day of a moment, in UTC."""
    return datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC).date()


def policy_text(policy: Policy, spent: Spent) -> str:
    """Write a policy for a person, a line per kind and limit."""
    lines = []
    for kind, words in _WORDS.items():
        state = "stays here"
        if kind in policy.allowed:
            last = policy.allowed[kind]
            until = "" if last is None else f" until {last.isoformat()}"
            state = (
                f"may leave{until}" if policy.holds(kind, spent.now_ms) else f"stays here: the consent ended on {last}"
            )
        lines.append(f"{kind} ({words}): {state}")
    limits = policy.limits
    lines.append(f"rounds in 24 hours: {spent.rounds} of {limits.rounds_per_day}")
    lines.append(f"bytes in 24 hours: {spent.bytes} of {limits.bytes_per_day}")
    lines.append(f"bytes of one reply: {limits.bytes_per_round} at most")
    return "\n".join(lines)


def load_policy(home: Home) -> Policy:
    """Read the owner's decisions; without a file nothing is allowed.

    Raises:
        PolicyError: the file is damaged, or holds what is not known here (`bad_policy`).
    """
    if not home.policy_file.exists():
        return Policy()
    try:
        return _read(tomllib.loads(read_bounded(home.policy_file, _MAX_BYTES).decode("utf-8")))
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, or no policy
        why = " ".join(str(error).split())[:200]
        raise PolicyError(
            f"this version cannot read the policy {home.policy_file} ({why}), so nothing may leave; correct the "
            "file, or remove it and decide again with edgefl policy",
            "bad_policy",
        ) from error


def save_policy(home: Home, policy: Policy) -> None:
    """Keep the owner's decisions durably."""
    home.prepare()
    write_atomic(home.policy_file, policy.to_toml().encode(), mode=0o600)


def _read(record: dict[str, Any]) -> Policy:
    _only(record, {"format", "allowed", "limits"}, "")
    if type(record.get("format")) is not int or record["format"] != 1:
        raise ValueError(f"format is {record.get('format')!r}, but only format 1 is known")
    allowed, limits = record.get("allowed", {}), record.get("limits", {})
    if not isinstance(allowed, dict) or not isinstance(limits, dict):
        raise ValueError("allowed and limits must be tables")
    _only(allowed, set(KINDS), "allowed.")
    _only(limits, {one.name for one in fields(Limits)}, "limits.")
    for name, value in limits.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"limits.{name} is {value!r}, but must be a whole number from 0")
    return Policy(allowed={kind: _last_day(kind, value) for kind, value in allowed.items()}, limits=Limits(**limits))


def _last_day(kind: str, value: object) -> datetime.date | None:
    if value == ALWAYS:
        return None
    if type(value) is not datetime.date:  # a time of day is more than was asked for
        raise ValueError(f'allowed.{kind} is {value!r}, but must be a date such as 2027-11-21, or "{ALWAYS}"')
    return value


def _only(table: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ValueError(f"{where}{unknown[0]} is not known; allowed: {', '.join(sorted(known))}")

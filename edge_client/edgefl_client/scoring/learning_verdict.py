"""The rule of the learning gate: whether what a device learned may take the place of the bundle's own values.

It passes where all six hold, on the pictures held back; each has a name in `refused_for`:

    few_pictures        of each class at least 20 pictures judge
    balanced_accuracy   of all of them, the balanced accuracy is not below the bundle's
    referrals           at most 5 % of the pictures more are referred than by the bundle
    not_referred        of those not referred, the balanced accuracy is at most 0.05 below the bundle's
    no_suspicious       pictures of a suspicious class judge, where the bundle may name one
    missed              no more pictures of suspicious classes are wrong without a referral than by the bundle

Where either leaves fewer than 20 pictures without a referral, one picture moves that accuracy by more than 0.05. Then
`referrals` and `not_referred` are: no picture more is referred, and no picture more is wrong without a referral. So
whoever refers everything passes only where the bundle does so too. Source: docs/decisions/0042, docs/design.md 7
(personal values).
"""

from dataclasses import dataclass
from typing import Any

LEAST_HELD = 20  # pictures of each class
LEAST_NOT_REFERRED = 20  # pictures from which their balanced accuracy is compared
MORE_REFERRED_PCT = 5  # of the pictures held back
LESS_ACCURATE = 0.05  # balanced accuracy of the pictures not referred
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one set of values answers to the pictures held back."""

    balanced_accuracy: float  # of all of them
    referred: int  # pictures for which it asks for a look
    balanced_accuracy_not_referred: float | None  # of the others; None where there is none
    wrong_not_referred: int  # of the others, those that it predicts wrongly
    missed: int  # of the wrong ones, those whose true class is not known to be benign


@dataclass(frozen=True, kw_only=True)
class LearningVerdict:
    """What the learning gate found."""

    bundle: Answers  # with the bundle's values
    personal: Answers  # with those learned here
    held: int  # pictures it was measured on
    least_of_a_class: int  # of the class with the fewest
    class_rule: bool  # whether `suspicious_class` counted; not where it refers every picture, whatever was learned
    # whether pictures of suspicious classes judge, or there is no such class to miss; without them nobody knows
    suspicious_judged: bool = True

    @property
    def passed(self) -> bool:
        """Whether the personal values may be used and shared."""
        return not self.refused_for

    @property
    def enough_not_referred(self) -> bool:
        """Whether both leave enough pictures without a referral to compare how right these are."""
        return self.held - max(self.bundle.referred, self.personal.referred) >= LEAST_NOT_REFERRED

    @property
    def most_referred(self) -> int:
        """How many pictures the personal values may refer."""
        more = self.held * MORE_REFERRED_PCT // 100 if self.enough_not_referred else 0
        return self.bundle.referred + more

    @property
    def refused_for(self) -> tuple[str, ...]:
        """Name the conditions that do not hold."""
        holds = {
            "few_pictures": self.least_of_a_class >= LEAST_HELD,
            "balanced_accuracy": self.personal.balanced_accuracy >= self.bundle.balanced_accuracy,
            "referrals": self.personal.referred <= self.most_referred,
            "not_referred": self._right_enough(),
            "no_suspicious": self.suspicious_judged,
            "missed": self.personal.missed <= self.bundle.missed,
        }
        return tuple(name for name, held in holds.items() if not held)

    def _right_enough(self) -> bool:
        """Whether the pictures not referred are told about as rightly as by the bundle."""
        ours, theirs = self.personal.balanced_accuracy_not_referred, self.bundle.balanced_accuracy_not_referred
        if not self.enough_not_referred or ours is None or theirs is None:
            return self.personal.wrong_not_referred <= self.bundle.wrong_not_referred
        return ours >= theirs - LESS_ACCURATE - _ROUNDING

    def to_json(self) -> dict[str, Any]:
        """Give the `gate` object of a report."""
        return {
            "passed": self.passed,
            "bundle_balanced_accuracy": self.bundle.balanced_accuracy,
            "personal_balanced_accuracy": self.personal.balanced_accuracy,
            "held_back": self.held,
            "least_of_a_class": self.least_of_a_class,
            "bundle_wrong_not_referred": self.bundle.wrong_not_referred,
            "personal_wrong_not_referred": self.personal.wrong_not_referred,
            "bundle_missed": self.bundle.missed,
            "personal_missed": self.personal.missed,
            "refused_for": list(self.refused_for),
            "bundle_referred": self.bundle.referred,
            "personal_referred": self.personal.referred,
            "most_referred": self.most_referred,
            "bundle_balanced_accuracy_not_referred": self.bundle.balanced_accuracy_not_referred,
            "personal_balanced_accuracy_not_referred": self.personal.balanced_accuracy_not_referred,
            "enough_not_referred": self.enough_not_referred,
            "class_rule": self.class_rule,
            "suspicious_judged": self.suspicious_judged,
        }

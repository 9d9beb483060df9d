"""The rule of the learning gate: whether what a device learned may take the place of the values that score now.

It passes where all seven hold, on the pictures held back; each has a name in `refused_for`:

    few_pictures        of each class at least 20 pictures judge
    balanced_accuracy   of all of them, the balanced accuracy is not below the bundle's
    referrals           at most 5 % of the pictures more are referred than by the bundle
    not_referred        of those not referred, the balanced accuracy is at most 0.05 below the bundle's
    no_suspicious       pictures of a suspicious class judge, where the bundle may name one
    missed              no more pictures of suspicious classes are wrong without a referral than by the bundle
    before              the four that compare hold beside the personal values in use, too, where there are some

The first six decide what may be shared, all of them what scores from now on.

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

    def to_json(self) -> dict[str, Any]:
        """Give the figures by name."""
        return {
            "balanced_accuracy": self.balanced_accuracy,
            "referred": self.referred,
            "balanced_accuracy_not_referred": self.balanced_accuracy_not_referred,
            "wrong_not_referred": self.wrong_not_referred,
            "missed": self.missed,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """New values beside others, on the same pictures."""

    new: Answers
    others: Answers  # of the values that the new ones would take the place of
    held: int  # pictures

    @property
    def enough_not_referred(self) -> bool:
        """Whether both leave enough pictures without a referral to compare how right these are."""
        return self.held - max(self.others.referred, self.new.referred) >= LEAST_NOT_REFERRED

    @property
    def most_referred(self) -> int:
        """How many pictures the new values may refer."""
        more = self.held * MORE_REFERRED_PCT // 100 if self.enough_not_referred else 0
        return self.others.referred + more

    @property
    def worse_in(self) -> tuple[str, ...]:
        """Name the conditions in which the new values are worse."""
        holds = {
            "balanced_accuracy": self.new.balanced_accuracy >= self.others.balanced_accuracy,
            "referrals": self.new.referred <= self.most_referred,
            "not_referred": self._right_enough(),
            "missed": self.new.missed <= self.others.missed,
        }
        return tuple(name for name, held in holds.items() if not held)

    def _right_enough(self) -> bool:
        """Whether the pictures not referred are told about as rightly as by the others."""
        ours, theirs = self.new.balanced_accuracy_not_referred, self.others.balanced_accuracy_not_referred
        if not self.enough_not_referred or ours is None or theirs is None:
            return self.new.wrong_not_referred <= self.others.wrong_not_referred
        return ours >= theirs - LESS_ACCURATE - _ROUNDING


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
    classes: int | None = None  # that the pictures held back show; None in values kept before it was counted
    before: Answers | None = None  # with the personal values that were in use; None where there were none

    @property
    def passed(self) -> bool:
        """Whether the new values are used from now on."""
        return not self.refused_for

    @property
    def no_worse_than_bundle(self) -> bool:
        """Whether the new values may be shared: whatever is in use here, they are no worse than the bundle's."""
        return set(self.refused_for) <= {"before"}

    @property
    def chance(self) -> float | None:
        """The balanced accuracy of a guess; None where the number of classes is not known."""
        return 1 / self.classes if self.classes else None

    @property
    def beside_bundle(self) -> Comparison:
        """Compare with the bundle's values."""
        return Comparison(new=self.personal, others=self.bundle, held=self.held)

    @property
    def beside_before(self) -> Comparison | None:
        """Compare with the personal values that were in use; None where there were none."""
        return None if self.before is None else Comparison(new=self.personal, others=self.before, held=self.held)

    @property
    def refused_for(self) -> tuple[str, ...]:
        """Name the conditions that do not hold."""
        worse, before = self.beside_bundle.worse_in, self.beside_before
        fails = {
            "few_pictures": self.least_of_a_class < LEAST_HELD,
            "balanced_accuracy": "balanced_accuracy" in worse,
            "referrals": "referrals" in worse,
            "not_referred": "not_referred" in worse,
            "no_suspicious": not self.suspicious_judged,
            "missed": "missed" in worse,
            "before": before is not None and bool(before.worse_in),
        }
        return tuple(name for name, failed in fails.items() if failed)

    def to_json(self) -> dict[str, Any]:
        """Give the `gate` object of a report."""
        beside = self.beside_bundle
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
            "most_referred": beside.most_referred,
            "bundle_balanced_accuracy_not_referred": self.bundle.balanced_accuracy_not_referred,
            "personal_balanced_accuracy_not_referred": self.personal.balanced_accuracy_not_referred,
            "enough_not_referred": beside.enough_not_referred,
            "class_rule": self.class_rule,
            "suspicious_judged": self.suspicious_judged,
            "chance": self.chance,
            "before": self._before_json(),
        }

    def _before_json(self) -> dict[str, Any] | None:
        """Give the figures of the personal values that were in use, and what the new ones are worse in."""
        if self.before is None or (beside := self.beside_before) is None:
            return None
        return self.before.to_json() | {
            "most_referred": beside.most_referred,
            "enough_not_referred": beside.enough_not_referred,
            "worse_in": list(beside.worse_in),
        }

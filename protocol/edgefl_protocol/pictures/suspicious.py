"""The rule `suspicious_class`: when a picture is referred for a class that is not known to be benign.

Guarantees: the trainer, which chooses the threshold and counts what passes, and whatever scores a picture ask the same
function. Source: docs/methods.md, section 1.8; docs/decisions/0043 and 0072.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.strict_json import check_keys

# Summed probability from which suspicious classes refer where no threshold was chosen. Whoever excises nine lesions for
# one melanoma, as specialised clinics did (Argenziano et al. 2012), acts at one in nine; a look costs less. 0043.
DEFAULT_SUSPICIOUS_FROM = 0.10
# And from which they refer whatever was chosen: a model that names nearly all suspicious pictures itself would choose a
# threshold near 1, and let "nevus 46 %, melanoma 45 %" pass. docs/decisions/0072.
MOST_SUSPICIOUS_FROM = 1 / 3
NO_CLASS = -1  # index of the predicted class where none is named
MAX_STATEMENT = 1000  # characters
MAX_PICTURES = 2**31  # that a threshold may say it was chosen on


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """From which probability on the suspicious classes refer together, and what that rule reached where it was chosen.

    `threshold` is None where it could not be chosen, for want of pictures: then `DEFAULT_SUSPICIOUS_FROM` is in force.
    Both figures are of the whole rule, on the site's `tune` pictures; None where there was no picture of the kind.
    """

    threshold: float | None  # summed probability of the suspicious classes, at or above which a picture is referred
    sensitivity: float | None  # share of the pictures of suspicious classes that the rule refers
    specificity: float | None  # share of the pictures of benign classes that it does not refer
    suspicious: int  # pictures of suspicious classes, from which the threshold was chosen
    benign: int  # pictures of benign classes
    statement: str  # the same in words

    @property
    def tried(self) -> "TriedRule | None":
        """On how many pictures of suspicious classes the rule was tried, and how many passed; None of none."""
        if self.sensitivity is None or self.suspicious == 0:
            return None
        return TriedRule(
            pictures=self.suspicious,
            passed=self.suspicious - round(self.sensitivity * self.suspicious),
            benign_passed=None if self.specificity is None else round(self.specificity * self.benign),
        )

    def __post_init__(self) -> None:
        if not (isinstance(self.statement, str) and 1 <= len(self.statement) <= MAX_STATEMENT):
            raise ValueError(f"statement must be text of 1 to {MAX_STATEMENT} characters")
        for share in (self.threshold, self.sensitivity, self.specificity):
            if share is not None and not (type(share) in (int, float) and 0.0 <= share <= 1.0):
                raise ValueError("threshold, sensitivity and specificity must be numbers from 0 to 1, or null")
        for count in (self.suspicious, self.benign):
            if type(count) is not int or not 0 <= count <= MAX_PICTURES:
                raise ValueError("suspicious and benign must be numbers of pictures")


@dataclass(frozen=True, kw_only=True)
class TriedRule:
    """How the rule `suspicious_class` did on pictures of suspicious classes that were kept from learning."""

    pictures: int
    passed: int  # of them, those at which it did not ask for a look
    benign_passed: int | None = None  # pictures of benign classes that passed, too; None where there were none

    @classmethod
    def from_json(cls, record: object) -> "TriedRule":
        """Read the same object; a `ValueError` where it is none."""
        values = check_keys(record, {"pictures", "passed", "benign_passed"}, what="the rule for suspicious classes")
        counts = [count for name, count in values.items() if count is not None or name != "benign_passed"]
        if not all(type(count) is int and 0 <= count <= MAX_PICTURES for count in counts):
            raise ValueError("the rule for suspicious classes does not count pictures")
        if not values["passed"] <= values["pictures"] >= 1:
            raise ValueError("the rule for suspicious classes passed more pictures than there were")
        return cls(**values)

    def to_json(self) -> dict[str, int | None]:
        """Write the object `suspicious_tried` of a score."""
        return {"pictures": self.pictures, "passed": self.passed, "benign_passed": self.benign_passed}


def rows_that_ask(
    probabilities: NDArray[np.floating],
    predicted: NDArray[np.integer],
    suspicious: Sequence[bool] | NDArray[np.bool_],
    threshold: float | None,
) -> NDArray[np.bool_]:
    """Tell which rows (B,) the rule refers: a suspicious class is named, or such classes have enough together.

    Args:
        threshold: as it was chosen; None where it could not be. Others as of `suspicious_values`.
    """
    if not any(suspicious):
        return np.zeros(len(predicted), dtype=bool)
    return np.asarray(suspicious_values(probabilities, predicted, suspicious) >= threshold_in_force(threshold))


def suspicious_values(
    probabilities: NDArray[np.floating],
    predicted: NDArray[np.integer],
    suspicious: Sequence[bool] | NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Compute what a threshold is compared with, of each row (B,): 1 where a suspicious class is named, else the sum.

    Args:
        probabilities: of the classes, a row (B, K) for each picture.
        predicted: (B,), the class that is named; `NO_CLASS` where none is.
        suspicious: of each class, whether it is not known to be benign.
    """
    asks = np.asarray(suspicious, dtype=bool)
    named = (predicted != NO_CLASS) & asks[predicted]
    return np.where(named, 1.0, probabilities[:, asks].sum(axis=1, dtype=np.float64))


def threshold_in_force(chosen: float | None) -> float:
    """Give the summed probability at or above which suspicious classes refer."""
    return DEFAULT_SUSPICIOUS_FROM if chosen is None else min(chosen, MOST_SUSPICIOUS_FROM)

"""What the gate found about personal values. Source: docs/design.md 7, personal values."""

from dataclasses import dataclass
from typing import Any

LEAST_HELD = 20  # pictures of each class


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """What the gate found."""

    bundle: float  # balanced accuracy of the bundle's values
    personal: float  # of the personal ones
    held: int  # pictures it was measured on
    least_of_a_class: int  # of the class with the fewest
    bundle_unnoticed: int  # pictures that the bundle's values predict wrongly and do not refer
    personal_unnoticed: int  # that the personal ones do

    @property
    def passed(self) -> bool:
        """Whether the personal values may be used and shared."""
        return self.least_of_a_class >= LEAST_HELD and self.personal >= self.bundle

    def to_json(self) -> dict[str, Any]:
        """Give the `gate` object of a report."""
        return {
            "passed": self.passed,
            "bundle_balanced_accuracy": self.bundle,
            "personal_balanced_accuracy": self.personal,
            "held_back": self.held,
            "least_of_a_class": self.least_of_a_class,
            "bundle_wrong_not_referred": self.bundle_unnoticed,
            "personal_wrong_not_referred": self.personal_unnoticed,
        }

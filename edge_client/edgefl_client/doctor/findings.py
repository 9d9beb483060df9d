"""What a check of `edgefl doctor` found: a value, so that a check can be tested without the command.

A finding never holds a secret or the name of a picture.
"""

from dataclasses import dataclass

DAY_MS = 86_400_000
SOON_DAYS = 14  # what ends within this is told


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str  # its name
    state: str  # `ok`, `warn` or `fail`
    found: str  # what is there
    advice: str | None = None  # what to do; None where nothing is
    detail: str | None = None  # more of what is there, for whoever looks for a fault

"""Bounds of settings: one sentence says which value is out of range and what is allowed."""

from collections.abc import Mapping

from edgefl_protocol.rules.bounds import Range
from edgefl_trainer.errors import SettingError


def check_bounds(settings: object, **checks: tuple[bool, str]) -> None:
    """Refuse, by a `SettingError`, settings of which one is out of range.

    `checks` tells by the name of the value whether it is in range, and what is allowed.
    """
    for name, (holds, allowed) in checks.items():
        if not holds:
            raise SettingError(f"{name} is {getattr(settings, name)}; allowed: {allowed}.")


def check_ranges(settings: object, ranges: Mapping[str, Range]) -> None:
    """Refuse, by a `SettingError`, settings of which one is out of its range; `ranges` may name others', too."""
    own = {name: bound for name, bound in ranges.items() if hasattr(settings, name)}
    check_bounds(settings, **{name: (bound.holds(getattr(settings, name)), str(bound)) for name, bound in own.items()})

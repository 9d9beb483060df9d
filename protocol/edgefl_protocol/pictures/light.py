"""How a picture is lit, and whether a model learned from pictures that are lit so.

A model may hang on brightness and colour of the light: cancers were seen to pass as benign in light a little too blue,
green or dark (docs/decisions/0057). Light is estimated as shades of grey do (`imaging.light_of`) and
told by three numbers, which a lamp, a white balance or an exposure moves:

    brightness       root mean square of the channels' Minkowski means, 0 to 255
    red_by_green     ratio of two channels' means: high where the light is reddish
    blue_by_green    the same: high where it is bluish

A `LightRange` is what nearly all pictures of a site lie in; a bundle's card carries that of the pictures it learned
from. A model that corrects the colour of every picture (`imaging.correct_colour`) has a range of brightness alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from edgefl_protocol.pictures.imaging import Colour, Pixels, light_of
from edgefl_protocol.strict_json import check_keys

OUTSIDE = 0.005  # share of a site's pictures left outside at each end of a range
LEAST_PICTURES = 100  # below which no range is told: its ends would be single pictures
_LEAST = 1.0  # a mean of a channel that is black

Ends = tuple[float, float]  # lowest and highest

# what a picture is called that lies below, or above, each range
SIDES = {
    "brightness": ("darker", "brighter"),
    "red_by_green": ("greener", "redder"),
    "blue_by_green": ("yellower", "bluer"),
}


@dataclass(frozen=True, kw_only=True)
class Light:
    """The light of one picture."""

    brightness: float  # 1 to 255
    red_by_green: float  # above 0
    blue_by_green: float  # above 0


@dataclass(frozen=True, kw_only=True)
class LightRange:
    """Between which values the light of nearly all pictures of a site lies; None where that is not compared."""

    brightness: Ends
    red_by_green: Ends | None = None
    blue_by_green: Ends | None = None

    def __post_init__(self) -> None:
        for name, ends in self._compared():
            numbers = isinstance(ends, tuple) and len(ends) == 2 and all(type(one) is float for one in ends)
            if not numbers or not 0.0 < ends[0] <= ends[1] < math.inf:
                raise ValueError(f"{name} must be two numbers above 0, the lower one first")

    def unlike(self, light: Light) -> str | None:
        """Say how a picture differs most from the range, by a word of `SIDES`; None where it lies within."""
        found: dict[str, float] = {}
        for name, (low, high) in self._compared():
            value, width = math.log(getattr(light, name)), max(math.log(high / low), 1e-6)
            found[SIDES[name][0]] = (math.log(low) - value) / width
            found[SIDES[name][1]] = (value - math.log(high)) / width
        most = max(found, key=found.__getitem__)
        return most if found[most] > 0 else None

    def with_range(self, other: "LightRange | None") -> "LightRange":
        """Widen to what lies in either range, or between them; what is compared stays."""
        if other is None:
            return self
        widened: dict[str, Ends] = {}
        for name, (low, high) in self._compared():
            ends = getattr(other, name)
            widened[name] = (low, high) if ends is None else (min(low, ends[0]), max(high, ends[1]))
        return LightRange(**widened)

    def to_json(self) -> dict[str, list[float]]:
        """Write the range as JSON values, without what is not compared."""
        return {name: list(ends) for name, ends in self._compared()}

    @classmethod
    def from_json(cls, record: object) -> "LightRange":
        """Read what `to_json` wrote; a `ValueError` for anything else."""
        names = {one.name for one in fields(cls)}
        given = check_keys(record, {"brightness"}, names - {"brightness"}, what="the range of light")
        return cls(**{name: _ends(value) for name, value in given.items()})

    def _compared(self) -> list[tuple[str, Ends]]:
        ends = ((one.name, getattr(self, one.name)) for one in fields(self))
        return [(name, pair) for name, pair in ends if pair is not None]


def measure_light(image: Pixels) -> Light:
    """Measure the light of an upright picture, (H, W, 3)."""
    red, green, blue = np.maximum(light_of(image), _LEAST)
    brightness = math.sqrt((red**2 + green**2 + blue**2) / 3)
    return Light(brightness=brightness, red_by_green=float(red / green), blue_by_green=float(blue / green))


def range_of(lights: Sequence[Light], colour: Colour = "none", *, least: int = LEAST_PICTURES) -> LightRange | None:
    """Find the range that leaves 0.5 % of a site's pictures outside at each end; None of fewer pictures than `least`.

    Args:
        lights: of the pictures that the site's model learned from, as the network takes them.
        colour: what was done with the colour of their light. Shades of grey keep the brightness.
    """
    if len(lights) < least:
        return None
    compared = SIDES if colour == "none" else ("brightness",)
    return LightRange(**{name: _range([getattr(one, name) for one in lights]) for name in compared})


def _range(values: list[float]) -> Ends:
    low, high = np.quantile(values, (OUTSIDE, 1 - OUTSIDE))
    return float(low), float(high)


def _ends(value: object) -> Ends:
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) in (int, float) for one in value):
        raise ValueError("a range of light must be two numbers")
    return float(value[0]), float(value[1])

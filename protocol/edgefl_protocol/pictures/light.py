"""How a picture is lit, and whether a model learned from pictures that are lit so.

A model may hang on brightness and colour of the light: cancers were seen to pass as benign in light a little too blue,
green or dark (docs/decisions/0057), and with darker corners. Four numbers, which a lamp, a white balance, an exposure
or a lens moves:

    brightness       75th percentile of the luminance of pixels that are lit and not clipped, 1 to 255: mostly skin,
                     and a few white pixels, such as a glint or burnt-in text, move nothing. Where no such pixel is
                     left, it is 255 of a picture that is mostly clipped, and 1 of a dark one
    red_by_green     ratio of two channels' Minkowski means (`imaging.light_of`): high where the light is reddish
    blue_by_green    the same: high where it is bluish
    corners          median luminance of the corners by the 75th percentile of the middle: low where a lens, a lamp or
                     the tube of a dermatoscope leaves the corners dark

They are measured on the picture as the model's `Preprocess.colour` leaves it, so a run and a device compare alike. A
`LightRange` is what nearly all pictures of a site lie in; a bundle's card carries that of the pictures it learned from.
A model that removes the colour of the light (`imaging.correct_colour`) has no range of the two ratios.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.imaging import Colour, Pixels, light_of
from edgefl_protocol.strict_json import check_keys

OUTSIDE = 0.005  # share of a site's pictures left outside at each end of a range
DARKER_OUTSIDE = 0.025  # the same of the darkest ones: slightly too dark is when most cancers were seen to pass
DARKER_CORNERS_OUTSIDE = 0.05  # the same of those with the darkest corners, which hide cancers (docs/decisions/0062)
LEAST_PICTURES = 100  # below which no range is told: its ends would be single pictures
OWN_OUTSIDE, LEAST_OWN = 0.05, 20  # the same of the few pictures that a device learns from
# The same of pictures that questions are asked about. They are mostly grey, often with a level more of one channel,
# so ends of a ratio are this much wider.
LEAST_ASKED, ASKED_WIDER = 40, 1.02
LIT_FROM = 25.0  # luminance, 0 to 255
CLIPPED_FROM = 250  # of every channel
MIDDLE_TO, CORNERS_FROM = 0.5, 0.7  # squared distance from the middle, 1 in a corner
LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601, of red, green and blue
_LEAST = 1.0  # brightness of a picture without light, and a mean of a channel that is black
_MOST = 255.0

Ends = tuple[float, float]  # lowest and highest

# what a picture is called that lies below, or above, each range
SIDES = {
    "brightness": ("darker", "brighter"),
    "red_by_green": ("greener", "redder"),
    "blue_by_green": ("yellower", "bluer"),
    "corners": ("darker in its corners",),  # they are brighter where a lesion fills the picture: no fault of its light
}
_COLOURS = ("red_by_green", "blue_by_green")


@dataclass(frozen=True, kw_only=True)
class Light:
    """The light of one picture."""

    brightness: float  # 1 to 255
    red_by_green: float  # above 0
    blue_by_green: float  # above 0
    corners: float  # above 0; 1 where they are as bright as the middle


@dataclass(frozen=True, kw_only=True)
class LightRange:
    """Between which values the light of nearly all pictures of a site lies; None where that is not compared."""

    brightness: Ends
    red_by_green: Ends | None = None
    blue_by_green: Ends | None = None
    corners: Ends | None = None

    def __post_init__(self) -> None:
        for name, ends in self._compared():
            numbers = isinstance(ends, tuple) and len(ends) == 2 and all(type(one) is float for one in ends)
            least = _LEAST if name == "brightness" else _LEAST / _MOST
            if not numbers or not least <= ends[0] <= ends[1] <= _MOST:
                raise ValueError(f"{name} must be two numbers from {least:.3g} to {_MOST:g}, the lower one first")

    def unlike(self, light: Light) -> str | None:
        """Say how a picture differs most from the range, by a word of `SIDES`; None where it lies within."""
        found: dict[str, float] = {}
        for name, (low, high) in self._compared():
            value, width = math.log(getattr(light, name)), max(math.log(high / low), 1e-6)
            beyond = (math.log(low) - value, value - math.log(high))
            found |= {side: far / width for side, far in zip(SIDES[name], beyond, strict=False)}
        most = max(found, key=found.__getitem__)
        return self._colour_word(most, light) if found[most] > 0 else None

    def _colour_word(self, side: str, light: Light) -> str:
        """Name a cast by both ratios: little red beside much blue is blue light, beside little blue it is green."""
        if self.red_by_green is None or self.blue_by_green is None or side not in ("greener", "yellower"):
            return side
        little_red = light.red_by_green < math.sqrt(math.prod(self.red_by_green))
        little_blue = light.blue_by_green < math.sqrt(math.prod(self.blue_by_green))
        if side == "greener":
            return "greener" if little_blue else "bluer"
        return "greener" if little_red else "yellower"

    def as_compared_by(self, other: "LightRange") -> "LightRange":
        """Keep what another range compares, too."""
        compared = {name for name, _ in other._compared()}
        return LightRange(**{name: ends for name, ends in self._compared() if name in compared})

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
    luminance = image.astype(np.float32) @ LUMINANCE
    clipped = (image >= CLIPPED_FROM).all(axis=2)
    skin = luminance[(luminance >= LIT_FROM) & ~clipped]
    without = _MOST if clipped.mean() > 0.5 else _LEAST
    red, green, blue = np.maximum(light_of(image), _LEAST)
    return Light(
        brightness=min(float(np.quantile(skin, 0.75)), _MOST) if skin.size else without,
        red_by_green=float(red / green),
        blue_by_green=float(blue / green),
        corners=_corners(luminance),
    )


def range_of(lights: Sequence[Light], colour: Colour = "none") -> LightRange | None:
    """Find the range that leaves 0.5 % of a site's pictures outside at each end.

    Of the darkest it leaves 2.5 % outside, of those with the darkest corners 5 %. None of fewer than 100.

    Args:
        lights: of the pictures that the site's model learned from, as `colour` left them.
    """
    if len(lights) < LEAST_PICTURES:
        return None
    below = {"brightness": DARKER_OUTSIDE, "corners": DARKER_CORNERS_OUTSIDE}
    return _range_of(lights, _compared_under(colour), OUTSIDE, below)


def own_range_of(lights: Sequence[Light], colour: Colour = "none") -> LightRange | None:
    """Find the range of what a device learned from: 5 % outside at each end, so one odd picture widens nothing.

    None of fewer than 20 pictures.

    Args:
        lights: of these pictures, as `colour` left them.
    """
    return None if len(lights) < LEAST_OWN else _range_of(lights, _compared_under(colour), OWN_OUTSIDE)


def asked_range_of(lights: Sequence[Light], colour: Colour = "none") -> LightRange | None:
    """Find the range of pictures that questions are asked about: radiographs are grey, photographs are not.

    It leaves 0.5 % of them outside at each end, and is 2 % wider. None of fewer than 40. Corners are not compared.
    """
    if len(lights) < LEAST_ASKED:
        return None
    found = _range_of(lights, ("brightness", *(_COLOURS if colour == "none" else ())), OUTSIDE)
    wider = {
        name: (
            max(low / ASKED_WIDER, _LEAST if name == "brightness" else _LEAST / _MOST),
            min(high * ASKED_WIDER, _MOST),
        )
        for name, (low, high) in found._compared()
    }
    return LightRange(**wider)


def _compared_under(colour: Colour) -> list[str]:
    """What is left to compare: without the colour of the light both ratios are 1, but for rounding."""
    return [name for name in SIDES if colour == "none" or name not in _COLOURS]


def _corners(luminance: NDArray[np.float32]) -> float:
    """Compare the corners with the middle; 1 of a picture so small that it has none."""
    y, x = (2 * (np.arange(side) + 0.5) / side - 1 for side in luminance.shape)
    distance = (y[:, None] ** 2 + x**2) / 2
    corners, middle = luminance[distance > CORNERS_FROM], luminance[distance < MIDDLE_TO]
    if not corners.size:
        return 1.0
    return float(max(float(np.median(corners)), _LEAST) / max(float(np.quantile(middle, 0.75)), _LEAST))


def _range_of(
    lights: Sequence[Light], compared: Iterable[str], outside: float, below: Mapping[str, float] | None = None
) -> LightRange:
    found: dict[str, Ends] = {}
    for name in compared:
        lowest = (below or {}).get(name, outside)
        low, high = np.quantile([getattr(one, name) for one in lights], (lowest, 1 - outside))
        found[name] = (float(low), float(high))
    return LightRange(**found)


def _ends(value: object) -> Ends:
    if not isinstance(value, list) or len(value) != 2 or not all(type(one) in (int, float) for one in value):
        raise ValueError("a range of light must be two numbers")
    try:
        return float(value[0]), float(value[1])
    except OverflowError as error:
        raise ValueError("a range of light must be two numbers") from error

"""The picture gate: is this a sharp, well-lit picture of skin? Measured on the picture alone.

A model gives numbers for anything, and its own uncertainty was seen to be lower for foreign pictures than for skin
(docs/results), so these rules stand in front of it. Pure functions of the upright RGB picture; trainer and device call
the same ones, so both give the same reasons.

Scale: sides longer than 84 px are shrunk to 84 (bicubic, antialiased; no side is ever enlarged), the size the rules
were calibrated at. A rule therefore says the same of an 84-px picture and of a 12-megapixel photograph of the same
scene; blur finer than about 1/84 of the picture's side is not seen. Luminance Y = 0.299 R + 0.587 G + 0.114 B
(ITU-R BT.601), 0 to 255. A pixel is lit from Y = 25; the black ring of a dermatoscope is not.

1. `blur`: sharpness below 4.6. Sharpness is the variance of the Laplacian of Y (4-neighbour kernel) over 1 plus that of
   the same picture blurred with a 5 x 5 mean, both over lit pixels: a sharp picture loses much by blurring, a
   blurred one little, whatever its contrast. The idea is Crete-Roffet et al. 2007 ("The blur effect"); the variance of
   the Laplacian alone (Pech-Pacheco et al. 2000) also falls with contrast, and pale lesions have little of it.
2. `exposure`: too dark where the 95th percentile of Y over lit pixels is below 36, or where less than 5 % of the pixels
   are lit; too bright where more than 10 % of the pixels have all three channels at 250 or above, or where the mean of
   Y over lit pixels is above 225.
3. `not_skin`: fewer than 45 % of the lit pixels have a colour of skin: 0.94 <= R/G <= 2.3, 0.74 <= G/B <= 2.3, and
   channels more than 2 levels apart. Ratios do not change with the strength of the light, so dark and light skin lie in
   one range; what is grey (radiology, text), green or blue lies outside. Things of the colour of skin (wood, cork)
   pass: this is a rule against mistakes, not a proof.
4. `dark_corners`: something stands around the picture, though it is not too dark: the ring of a dermatoscope, or a
   frame of any colour. More than 10 % of the pixels are not lit, or are a vignette, or one of its sides is even. What
   is not lit counts as one colour. A model that did not learn from such pictures calls what is in a frame by the
   frame.

   Vignette: pixels reached straight from a side over pixels within 3 levels, in each channel, of its two corners,
   where these are lit, alike and 25 levels away from the picture's middle: a round one.
   Even: 95 % of the outermost pixels are within 4 levels, or 3 % of a darker colour, of their median. No light on skin
   is so even. Or they are within 20, as of a narrow or a compressed frame, and the lines behind that are so too end in
   a step of 25 levels. No step on skin is so straight.

   Sides are looked at once more at 252 px: at 84 a frame of one pixel in 200 is mixed with the skin beside it.

   A model that learned from black corners says how much (`usual_unlit`): that share counts for what is not lit, and an
   even side that is not lit asks for nothing.

5. `shape`: one side is more than three times the other. The model reads a square, so it would see such a picture
   squeezed, or its middle alone.

6. `transparent`: more than 10 % of the picture is the white that was laid under its transparent parts: so is a picture
   of which a tenth is wholly transparent, or all of it by a tenth. Who decodes the file tells how much that is.

How often each rule refers real photographs by mistake, and what it catches: docs/reference/picture-gate.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgefl_protocol.pictures.imaging import Colour, correct_colour
from edgefl_protocol.pictures.light import (
    CLIPPED_FROM,
    LIT_FROM,
    LUMINANCE,
    Light,
    LightRange,
    asked_range_of,
    measure_light,
    range_of,
)

Pixels = NDArray[np.uint8]  # (H, W, 3), RGB
Plane = NDArray[np.float32]  # (h, w)
Colours = NDArray[np.float32]  # (…, 3), RGB, 0 to 255

SCALE_PX = 84
FINE_PX = 252  # at which sides are looked at once more
LEAST_SHARPNESS = 4.6
LEAST_BRIGHT = 36.0  # luminance, 95th percentile of the lit pixels
LEAST_LIT = 0.05  # share of the pixels
MOST_CLIPPED = 0.10  # share of the pixels
MOST_MEAN = 225.0  # luminance, mean of the lit pixels
MOST_WHITE = 0.10  # share of the picture, laid under what was transparent: as much as may be clipped
MOST_OBLONG = 3.0  # longer side by the shorter; no camera takes such pictures
LEAST_SKIN = 0.45  # share of the lit pixels
MOST_UNLIT = 0.10  # share of the pixels
MOST_BLACK_CORNER = 0.04  # the same of one corner: under a black box over a name cancers passed
CORNERS_WITHIN = 3.0  # levels of each channel
EVEN_WITHIN = 4.0  # levels of each channel
EVEN_SHARE = 0.03  # of the largest channel, where that is less: dark skin varies by fewer levels
NEARLY_WITHIN = 20.0  # levels of each channel, where a step follows
LEAST_STEP = 25.0  # levels of one channel
LEAST_EVEN = 0.95  # share of a line's pixels
GREY_WITHIN = 2  # levels between the largest and the smallest channel
RED_BY_GREEN = (0.94, 2.3)
GREEN_BY_BLUE = (0.74, 2.3)

_QUIET = 1.0  # added to the variance of the blurred picture: rounding and the noise of a flat picture leave about that
_FEW = 50  # lit pixels with four lit neighbours below which sharpness is not judged
_FEW_LINES = 8  # of a picture, below which no side is judged
_USUAL = 0.95  # share of a site's pictures that are unlit as usual


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What the gate measured on one picture."""

    height_px: int  # of the picture as it came
    width_px: int  # of the picture as it came
    # variance of the Laplacian over that of the blurred picture; None where too little is lit to judge
    sharpness: float | None
    lit: float  # share of the pixels that are lit
    bright: float  # 95th percentile of the luminance of lit pixels; 0 where none is lit
    mean: float  # mean luminance of lit pixels; 0 where none is lit
    clipped: float  # share of the pixels with every channel at the top
    skin: float  # share of the lit pixels with a colour of skin; 0 where none is lit
    vignette: float  # share of the pixels that are lit, of one colour with two corners, and joined to them
    black_corner: float  # share of the pixels that no light pixel parts from both sides of a corner; of the largest
    dark_side: bool  # whether a side of the picture is unlit from end to end
    even_side: bool  # whether a side that is lit is of one colour
    light: Light  # brightness and colour of the light, at the scale of the rules

    @property
    def exposure(self) -> str | None:
        """Which side of exposure is wrong: `dark`, `bright`, or None; dark where both rules hold, as of a lone lamp."""
        if self.bright < LEAST_BRIGHT or self.lit < LEAST_LIT:
            return "dark"
        return "bright" if self.clipped > MOST_CLIPPED or self.mean > MOST_MEAN else None

    def reasons(self, least_px: int, unlit_above: float = MOST_UNLIT, white: float = 0.0) -> tuple[str, ...]:
        """List the gate's reasons to refer a picture, in the order of `referral.REASON_WORDS`; empty where it passes.

        Args:
            least_px: of the model (`Preprocess.least_px`); with fewer pixels in either direction a picture is small.
            unlit_above: share of unlit pixels above which a picture is referred, of the model in use.
            white: share of the picture that is the white laid under what was transparent.
        """
        whole = faults_of_any_picture((self.height_px, self.width_px), least_px, white)
        found = {
            "blur": self.sharpness is not None and self.sharpness < LEAST_SHARPNESS,
            "exposure": self.exposure is not None,
            "size": "size" in whole,
            "shape": "shape" in whole,
            "not_skin": self.skin < LEAST_SKIN,
            "dark_corners": self.lit >= LEAST_LIT
            and (
                1 - self.lit > unlit_above
                or self.vignette > MOST_UNLIT
                or self.even_side
                or ((self.dark_side or self.black_corner > MOST_BLACK_CORNER) and unlit_above <= MOST_UNLIT)
            ),
            "transparent": "transparent" in whole,
        }
        return tuple(reason for reason, holds in found.items() if holds)


def faults_of_any_picture(shape: tuple[int, ...], least_px: int, white: float) -> tuple[str, ...]:
    """List the reasons `size`, `shape` and `transparent`, which ask for no skin: they hold of a radiograph, too.

    Args:
        shape: of the picture, (H, W, …).
        least_px: of the model, as for `Quality.reasons`; so is `white`.
    """
    shorter, longer = sorted(shape[:2])
    found = {"size": shorter < least_px, "shape": longer > MOST_OBLONG * shorter, "transparent": white > MOST_WHITE}
    return tuple(reason for reason, holds in found.items() if holds)


def measure_quality(image: Pixels, colour: Colour = "none") -> Quality:
    """Measure an upright picture, (H, W, 3); its light as `colour` leaves it."""
    height_px, width_px = image.shape[:2]
    small = _at_scale(image)
    luminance: Plane = small.astype(np.float32) @ LUMINANCE  # (h, w)
    lit = luminance >= LIT_FROM
    bright_part = luminance[lit]
    shown = _with_one_black(small)
    even = [*_even_sides(shown), *_even_sides(_with_one_black(_finer(image)))]
    return Quality(
        height_px=height_px,
        width_px=width_px,
        sharpness=_sharpness(luminance, lit),
        lit=float(lit.mean()),
        bright=_percentile_95(bright_part) if bright_part.size else 0.0,
        mean=float(bright_part.mean()) if bright_part.size else 0.0,
        clipped=float((small >= CLIPPED_FROM).all(axis=2).mean()),
        skin=_skin_share(small[lit]),
        vignette=float((lit & _corner_region(shown)).mean()),
        black_corner=_black_corner(~lit),
        dark_side=any(colour.max() <= LIT_FROM for colour in even),
        even_side=any(colour.max() > LIT_FROM for colour in even),
        light=measure_light(correct_colour(small, colour)),
    )


def _black_corner(unlit: NDArray[np.bool_]) -> float:
    """Measure the largest black corner: pixels reached straight from both its sides over unlit ones, as in a box."""
    corners = (unlit, unlit[::-1], unlit[:, ::-1], unlit[::-1, ::-1])
    return max(float((np.logical_and.accumulate(c, 0) & np.logical_and.accumulate(c, 1)).mean()) for c in corners)


def usual_unlit(images: Iterable[Pixels]) -> float:
    """Return above which share of unlit pixels a picture is unlike a site's: that of 95 % of them, at least 10 %.

    Args:
        images: the pictures that the site's model learned from; of none it is 10 %.
    """
    shares = [float(np.mean(_at_scale(one).astype(np.float32) @ LUMINANCE < LIT_FROM)) for one in images]
    return max(MOST_UNLIT, float(np.quantile(shares, _USUAL)) if shares else 0.0)


def light_at_scale(image: Pixels, colour: Colour = "none") -> Light:
    """Measure the light of an upright picture, (H, W, 3), at the scale of the gate and as `colour` leaves it."""
    return measure_light(correct_colour(_at_scale(image), colour))


def usual_light(images: Iterable[Pixels], colour: Colour = "none", *, asked: bool = False) -> LightRange | None:
    """Find in what light nearly all pictures of a site are, at the scale of the gate; see `light.range_of`.

    Args:
        images: the pictures that the site's model learned from, as `colour` left them.
        asked: whether questions are asked about them (`light.asked_range_of`).
    """
    lights = [light_at_scale(one) for one in images]
    return asked_range_of(lights, colour) if asked else range_of(lights, colour)


def _at_scale(image: Pixels, most_px: int = SCALE_PX) -> Pixels:
    height, width = min(image.shape[0], most_px), min(image.shape[1], most_px)
    if (height, width) == image.shape[:2]:
        return image
    # The gap of 3 first averages whole blocks of very large photographs: eight times faster, and within two levels.
    return np.asarray(
        Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0), dtype=np.uint8
    )


def _from_sides(picture: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """The picture as seen from its top, bottom, left and right: lines first, the outermost one at 0."""
    turned = picture.swapaxes(0, 1)
    return picture, picture[::-1], turned, turned[::-1]


def _finer(image: Pixels) -> Pixels:
    """The picture at `FINE_PX`, of every n-th pixel where it has many: much faster, and a frame stays even."""
    step = max(1, min(image.shape[:2]) // (3 * FINE_PX))
    return _at_scale(np.ascontiguousarray(image[::step, ::step]), FINE_PX)


def _with_one_black(picture: Pixels) -> Colours:
    """The picture with one colour wherever it is not lit, at the edge of what is: (h, w, 3)."""
    unlit = picture.astype(np.float32) @ LUMINANCE < LIT_FROM
    return np.where(unlit[..., None], np.float32(LIT_FROM), np.maximum(picture, np.float32(LIT_FROM)))


def _even_sides(shown: Colours) -> list[Colours]:
    """The colours of the sides that are even, of (h, w, 3)."""
    return [side for side in map(_even_colour, _from_sides(shown)) if side is not None]


def _even_colour(lines: Colours) -> Colours | None:
    """The colour of a side that is even, (3,); None for any other. Lines, (n, m, 3), are counted from that side."""
    if min(lines.shape[:2]) < _FEW_LINES:
        return None
    colour = _median(lines[0])
    if _share_within(lines[0], colour, min(EVEN_WITHIN, EVEN_SHARE * float(colour.max()))) >= LEAST_EVEN:
        return colour
    width = 0
    while width < len(lines) - 1 and _share_within(lines[width], colour, NEARLY_WITHIN) >= LEAST_EVEN:
        width += 1
    behind = _median(lines[min(width + 1, len(lines) - 1)])  # the line between may hold some of both
    return colour if width and np.abs(behind - colour).max() >= LEAST_STEP else None


def _corner_region(shown: Colours) -> NDArray[np.bool_]:
    """Which pixels are reached straight from a side over the colour of its two corners, (h, w).

    The corners are alike, and a step away from the middle of the picture.
    """
    height, width = shown.shape[:2]
    middle = _median(shown[height // 4 : height - height // 4, width // 4 : width - width // 4].reshape(-1, 3))
    region = np.zeros((height, width), np.bool_)
    for lines, found in zip(_from_sides(shown), _from_sides(region), strict=True):
        first, last = lines[0, 0], lines[0, -1]
        colour = (first + last) / 2
        if np.abs(first - last).max() <= CORNERS_WITHIN and np.abs(middle - colour).max() >= LEAST_STEP:
            near = np.abs(lines - colour).max(axis=2) <= CORNERS_WITHIN
            found |= np.logical_and.accumulate(near, axis=0)
    return region


def _median(colours: Colours) -> Colours:
    """Of each channel of (m, 3); the upper one of two."""
    return np.asarray(np.sort(colours, axis=0)[len(colours) // 2])


def _share_within(colours: Colours, colour: Colours, levels: float) -> float:
    return float((np.abs(colours - colour).max(axis=1) <= levels).mean())


def _percentile_95(values: Plane) -> float:
    """As `np.percentile`, whose first call loads numpy's masked arrays: a sixtieth of a device's first score."""
    ordered = np.sort(values)
    place = 0.95 * (len(ordered) - 1)
    return float(np.interp(place, np.arange(len(ordered)), ordered))


def _sharpness(luminance: Plane, lit: NDArray[np.bool_]) -> float | None:
    inner = lit[1:-1, 1:-1] & lit[:-2, 1:-1] & lit[2:, 1:-1] & lit[1:-1, :-2] & lit[1:-1, 2:]
    if np.count_nonzero(inner) < _FEW:
        return None
    own = _laplacian(luminance)[inner].var()
    blurred = _laplacian(_mean_of_25(luminance))[inner].var()
    return float(own / (blurred + _QUIET))


def _laplacian(plane: Plane) -> Plane:
    """4 f(x, y) minus the four neighbours, for inner pixels: (h - 2, w - 2)."""
    around = plane[:-2, 1:-1] + plane[2:, 1:-1] + plane[1:-1, :-2] + plane[1:-1, 2:]
    return np.asarray(4 * plane[1:-1, 1:-1] - around, dtype=np.float32)


def _mean_of_25(plane: Plane) -> Plane:
    """Mean over 5 x 5 pixels, the edge pixels repeated outwards."""
    padded = np.pad(plane, 2, mode="edge")
    height, width = plane.shape
    rows = np.sum([padded[:, shift : shift + width] for shift in range(5)], axis=0)  # (h + 4, w)
    return np.asarray(np.sum([rows[shift : shift + height] for shift in range(5)], axis=0) / 25, dtype=np.float32)


def _skin_share(colours: NDArray[np.uint8]) -> float:
    """Share of (n, 3) colours that skin may have; 0 of none."""
    if not len(colours):
        return 0.0
    grey = np.ptp(colours, axis=1) <= GREY_WITHIN
    red, green, blue = colours.astype(np.float32).T
    by_green = (red >= RED_BY_GREEN[0] * green) & (red <= RED_BY_GREEN[1] * green)
    by_blue = (green >= GREEN_BY_BLUE[0] * blue) & (green <= GREEN_BY_BLUE[1] * blue)
    return float((by_green & by_blue & ~grey).mean())

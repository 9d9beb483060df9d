"""The gate before the model: is this a sharp, well-lit picture of skin? Measured on the picture alone.

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
4. `dark_corners`: more than 10 % of the pixels are not lit, though the picture is not too dark: the ring of a
   dermatoscope, or a black frame. A model that learned from such pictures says how much it learned from, and its share
   counts instead (`usual_unlit`). A model that did not calls what is in the ring by the ring.

How often each rule refers real photographs by mistake, and what it catches: docs/reference/gate.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]  # (H, W, 3), RGB
Plane = NDArray[np.float32]  # (h, w)

SCALE_PX = 84
LIT_FROM = 25.0  # luminance
LEAST_SHARPNESS = 4.6
LEAST_BRIGHT = 36.0  # luminance, 95th percentile of the lit pixels
LEAST_LIT = 0.05  # share of the pixels
CLIPPED_FROM = 250  # of every channel
MOST_CLIPPED = 0.10  # share of the pixels
MOST_MEAN = 225.0  # luminance, mean of the lit pixels
LEAST_SKIN = 0.45  # share of the lit pixels
MOST_UNLIT = 0.10  # share of the pixels
GREY_WITHIN = 2  # levels between the largest and the smallest channel
RED_BY_GREEN = (0.94, 2.3)
GREEN_BY_BLUE = (0.74, 2.3)

_LUMINANCE = np.array([0.299, 0.587, 0.114], dtype=np.float32)
_QUIET = 1.0  # added to the variance of the blurred picture: rounding and the noise of a flat picture leave about that
_FEW = 50  # lit pixels with four lit neighbours below which sharpness is not judged
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

    @property
    def exposure(self) -> str | None:
        """Which side of exposure is wrong: `dark`, `bright`, or None; dark where both rules hold, as of a lone lamp."""
        if self.bright < LEAST_BRIGHT or self.lit < LEAST_LIT:
            return "dark"
        return "bright" if self.clipped > MOST_CLIPPED or self.mean > MOST_MEAN else None

    def reasons(self, network_px: int, unlit_above: float = MOST_UNLIT) -> tuple[str, ...]:
        """List the gate's reasons to refer a picture, in the order of `referral.REASON_WORDS`; empty where it passes.

        Args:
            network_px: side of the network's input; a picture with fewer pixels in either direction is too small.
            unlit_above: share of unlit pixels above which a picture is referred, of the model in use.
        """
        found = {
            "blur": self.sharpness is not None and self.sharpness < LEAST_SHARPNESS,
            "exposure": self.exposure is not None,
            "size": min(self.height_px, self.width_px) < network_px,
            "not_skin": self.skin < LEAST_SKIN,
            "dark_corners": self.lit >= LEAST_LIT and 1 - self.lit > unlit_above,
        }
        return tuple(reason for reason, holds in found.items() if holds)


def measure_quality(image: Pixels) -> Quality:
    """Measure an upright picture, (H, W, 3)."""
    height_px, width_px = image.shape[:2]
    small = _at_scale(image)
    luminance: Plane = small.astype(np.float32) @ _LUMINANCE  # (h, w)
    lit = luminance >= LIT_FROM
    bright_part = luminance[lit]
    return Quality(
        height_px=height_px,
        width_px=width_px,
        sharpness=_sharpness(luminance, lit),
        lit=float(lit.mean()),
        bright=_percentile_95(bright_part) if bright_part.size else 0.0,
        mean=float(bright_part.mean()) if bright_part.size else 0.0,
        clipped=float((small >= CLIPPED_FROM).all(axis=2).mean()),
        skin=_skin_share(small[lit]),
    )


def usual_unlit(images: Iterable[Pixels]) -> float:
    """Return above which share of unlit pixels a picture is unlike a site's: that of 95 % of them, at least 10 %.

    Args:
        images: the pictures that the site's model learned from; of none it is 10 %.
    """
    shares = [float(np.mean(_at_scale(one).astype(np.float32) @ _LUMINANCE < LIT_FROM)) for one in images]
    return max(MOST_UNLIT, float(np.quantile(shares, _USUAL)) if shares else 0.0)


def _at_scale(image: Pixels) -> Pixels:
    height, width = min(image.shape[0], SCALE_PX), min(image.shape[1], SCALE_PX)
    if (height, width) == image.shape[:2]:
        return image
    # The gap of 3 first averages whole blocks of very large photographs: eight times faster, and within two levels.
    return np.asarray(
        Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0), dtype=np.uint8
    )


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

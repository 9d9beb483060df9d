"""Colour of a lesion as light that skin sends back: pigment and blood absorb, veil and keratin scatter.

A lesion's colour is a ratio to the skin it lies on, so the same lesion fits every skin tone and light. Its mean is set
to a tone drawn without regard to the class: what the class shows is structure, never mean colour.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.lesions.canvas import Field, Rng

Rgb = tuple[float, float, float]  # ratio to the skin, RGB

MELANIN = np.array([0.62, 1.0, 1.28], np.float32)  # absorption of one unit of pigment
BLOOD = np.array([0.22, 1.05, 0.88], np.float32)
_GREY = np.array([1.0, 0.6, 0.1], np.float32)  # how much more than blue each channel loses in a greyish lesion
VEIL: Rgb = (0.50, 0.66, 0.92)  # blue-white veil
BLUE_GREY: Rgb = (0.34, 0.42, 0.58)
KERATIN: Rgb = (1.22, 1.26, 1.18)  # milia-like cysts, white and yellowish
SCAR: Rgb = (1.05, 1.12, 1.16)  # regression
PLUG: Rgb = (0.26, 0.17, 0.12)  # comedo-like opening

MAX_RATIO = 1.45


@dataclass
class Paint:
    """What a lesion is made of, place by place."""

    pigment: Field  # melanin, units of absorption
    blood: Field | None = None  # haemoglobin, units of absorption
    coats: list[tuple[Rgb, Field]] = field(default_factory=list)  # opaque layers in order: colour and share (0..1)

    def coat(self, colour: Rgb, share: Field) -> None:
        """Lay a colour over what is there."""
        self.coats.append((colour, share))

    def ratio(self) -> NDArray[np.float32]:
        """Colour as a ratio to the skin, (3, n, n)."""
        ratio = np.multiply.outer(MELANIN, -self.pigment)
        if self.blood is not None:
            ratio -= np.multiply.outer(BLOOD, self.blood)
        np.exp(ratio, out=ratio)
        for colour, share in self.coats:
            for channel, value in zip(ratio, colour, strict=True):
                channel += share * (np.float32(value) - channel)
        return ratio


def mean_tone(rng: Rng) -> NDArray[np.float32]:
    """Draw the mean ratio a lesion is set to, (3,): light to dark brown with some red or grey, whatever its class."""
    pigment, blood = rng.uniform(0.32, 0.85), rng.uniform(0.0, 0.35)
    grey = rng.uniform(0.0, 0.12)
    tone: NDArray[np.float32] = np.exp(-pigment * MELANIN - blood * BLOOD) * (1 - grey * _GREY)
    return tone


def set_mean(ratio: NDArray[np.float32], cover: Field, tone: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each channel of `ratio` (3, n, n) so that the mean over the lesion is `tone` (3,).

    Twice, because light is cut at `MAX_RATIO`. `cover` is the share of lesion at each place, 0..1.
    """
    weight = (cover / cover.sum()).ravel()
    for _ in range(2):
        mean = ratio.reshape(3, -1) @ weight
        ratio = np.clip(ratio * (tone / mean)[:, None, None], 0.03, MAX_RATIO)
    return ratio

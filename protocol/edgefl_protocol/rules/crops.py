"""Boxes of random crops, drawn by one piece for servers and devices: both learn on the same crops of the same draws.

Source: torchvision's RandomResizedCrop, for a whole batch at once.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

RATIO: Final = (3 / 4, 4 / 3)  # of a crop's sides
_TRIES = 10


def crop_boxes(rng: np.random.Generator, count: int, side: int, smallest: float) -> NDArray[np.int64]:
    """Draw boxes (count, 4) of top, left, height and width in pixels.

    Area uniform in (smallest, 1), logarithm of the ratio of sides uniform in (3:4, 4:3), the first of ten draws that
    fits, else the whole image; then the place, uniform. `side` is that of the square images, in pixels.
    """
    area = rng.uniform(smallest, 1.0, (count, _TRIES)) * side**2
    ratio = np.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1]), (count, _TRIES)))
    sides = np.stack([np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))], axis=-1)  # height, width
    fits = np.logical_and(sides > 0, sides <= side).all(axis=-1)  # (count, tries)
    first = sides[np.arange(count), fits.argmax(axis=1)]
    chosen = np.where(np.logical_or.reduce(fits, axis=1)[:, None], first, side).astype(np.int64)
    return np.concatenate([rng.integers(0, side - chosen, endpoint=True), chosen], axis=1)

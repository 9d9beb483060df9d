"""Which of some pictures a run has learned from, so that no figure on them passes for one on new pictures.

Guarantee: pictures are compared by their decoded pixels, so another name, folder or site hides none. A photo that was
saved anew is another picture here, and so is one that the network of `--backbone run:DIR` learned from.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.federation import Federation

LEARNED = ("train", "tune", "unlabelled")  # tune rows choose rounds and calibrate


def learned_among(own: Federation, images: NDArray[np.uint8]) -> int:
    """Count the pictures (B, px, px, 3) that a run over `own` learned from or was tuned on."""
    sites = [site for name, site in own.sites.items() if name not in own.held_out]
    rows = [int(row) for site in sites for kind in LEARNED for row in site.rows(kind)]
    known = {_digest(own.images[place]) for place in np.unique(own.places(rows))}
    return sum(_digest(image) in known for image in images)


def _digest(image: NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()

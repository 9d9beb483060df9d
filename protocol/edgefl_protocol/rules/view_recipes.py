"""Ranges and probabilities of random views for learning without labels, in the order of the steps.

    crop      a part of the area between `smallest_crop` and all of it, sides 3:4 to 4:3 (`crops`)
    colours   with `JITTERED`: brightness, contrast, saturation and hue, in an order drawn for the batch
    grey      with `GREYED`
    blur      with `BLURRED`: Gaussian of `SIGMA` pixels
    mirror    with `MIRRORED`, left and right

Sources: MoCo v2 (arXiv 2003.04297) and its public code; SimCLR (arXiv 2002.05709) appendix A; docs/methods.md, FedCLF.
"""

from collections.abc import Mapping
from typing import Final, Literal

Recipe = Literal["moco-v2", "simclr", "rotation"]
"""`moco-v2`: crop of 20 to 100 % of the area, colours, grey, blur, mirror. `simclr`: crop from 8 %, colours twice as
strong, otherwise the same. `rotation`: crop and mirror only."""

SMALLEST_CROP: Final[Mapping[Recipe, float]] = {"moco-v2": 0.2, "simclr": 0.08, "rotation": 0.2}  # share of the area
COLOURS: Final[Mapping[Recipe, tuple[float, float, float, float]]] = {
    "moco-v2": (0.4, 0.4, 0.4, 0.1),  # brightness, contrast and saturation about 1; hue in turns, either way
    "simclr": (0.8, 0.8, 0.8, 0.2),
}
JITTERED, GREYED, BLURRED, MIRRORED = 0.8, 0.2, 0.5, 0.5  # probabilities
SIGMA: Final = (0.1, 2.0)  # px


def blur_kernel(view_px: int) -> int:
    """Compute the side of the blur's kernel: a tenth of the view, odd (SimCLR, appendix A); 7 at 64 px."""
    return max(3, 2 * (view_px // 20) + 1)

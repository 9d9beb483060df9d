"""The backbones that come with EdgeFL: files in `backbones/` of a checkout, inside the package of an installed wheel.

    --backbone derm-vit-tiny-84     photographs of skin lesions, learned without labels
    --backbone drawn-lesions-84     drawn lesions, for the demo

A run that names no network, and needs one that was learned before, takes the one of photographs, see `usual_backbone`.
Each has a card beside it that says what it was made from, what it is worth and under which licence it comes.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve()
PLACES = (HERE.parents[1] / "backbones", HERE.parents[3] / "backbones")  # a wheel's, a checkout's


@cache
def shipped_backbones() -> dict[str, Path]:
    """Name to file, in name order; nothing where neither place exists."""
    folder = next((place for place in PLACES if place.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.safetensors"))}


USUAL: Mapping[int, str] = {84: "derm-vit-tiny-84"}  # side of the images in pixels → the network of photographs


def usual_backbone(image_px: int) -> str | None:
    """Name the shipped network for photographs of this size, 0 standing for the network's own; None: none fits."""
    return USUAL.get(image_px or min(USUAL))

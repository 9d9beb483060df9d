"""The backbones that come with EdgeFL: files in `backbones/` of a checkout, inside the package of a wheel.

    --backbone derm-vit-tiny-84     photographs of skin lesions, learned without labels; not in the wheel
    --backbone derm-vit-taught-84   the same, then taught by a network of ImageNet; not in the wheel
    --backbone drawn-lesions-84     drawn lesions, for the demo

The wheel holds what is under its own licence, Apache-2.0. The others are found in the folder that `EDGEFL_BACKBONES`
names, where somebody has put them. Each has a card that says what it was made from, what it is worth and under which
licence it comes. A run that names no network, and needs one that was learned before, takes the one of photographs, see
`usual_backbone`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve()
PLACES = (HERE.parents[1] / "backbones", HERE.parents[3] / "backbones")  # a wheel's, a checkout's
ENVIRONMENT = "EDGEFL_BACKBONES"
# shipped in the repository alone, for their licence is another
APART = dict.fromkeys(("derm-vit-tiny-84", "derm-vit-taught-84"), "CC BY-NC 4.0")


def shipped_backbones() -> dict[str, Path]:
    """Map each name to its file, in name order; a file of ours goes before one of the same name elsewhere."""
    own = next((place for place in PLACES if place.is_dir()), None)
    folders = [Path(given).expanduser()] if (given := os.environ.get(ENVIRONMENT)) else []
    found = {path.stem: path for folder in (*folders, *([own] if own else [])) for path in folder.glob("*.safetensors")}
    return dict(sorted(found.items()))


def where_to_get(name: str) -> str | None:
    """Say how to come by a backbone that the wheel leaves out; None for any other name."""
    if name not in APART:
        return None
    return (
        f"the backbone {name} is not in the wheel because of its licence, {APART[name]}: copy "
        f"backbones/{name}.safetensors from EdgeFL's repository and name its folder with {ENVIRONMENT}=DIR."
    )


USUAL: Mapping[int, str] = {84: "derm-vit-tiny-84"}  # side of the images in pixels → the network of photographs


def usual_backbone(image_px: int) -> str | None:
    """Name the shipped network for photographs of this size, 0 standing for the network's own; None: none fits."""
    return USUAL.get(image_px or min(USUAL))

"""A drawn manifest of two sites, of 60 pictures each: 40 to learn from, 20 to report on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

Draw = Callable[[np.random.Generator, str, bool], np.ndarray]  # site, whether it is a nevus → pixels (H, W, 3)


def write_two_sites(folder: Path, draw: Draw) -> Path:
    """Draw the pictures of sites `a` and `b`, nevi and melanomas, and write `index.csv` beside them."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    lines = ["image,file,label,center,lesion_id,split"]
    for i in range(120):
        site, nevus = "ab"[i % 2], bool(rng.random() < 0.5)
        pixels = draw(rng, site, nevus).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        split = "val" if i % 6 < 2 else "train"
        lines.append(f"{i},images/{i}.png,{'NV' if nevus else 'MEL'},{site},lesion{i},{split}")
    (folder / "index.csv").write_text("\n".join(lines) + "\n")
    return folder

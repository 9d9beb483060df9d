"""Two sheets of the same layout for the owner: the features that would leave, and the pictures they were made of.

* `would-leave.png` is drawn from the payload's own values: a line of 128 squares a feature, one square of one colour a
  number. It shows everything that a receiver gets of these rows and nothing else: no pixel and no name of a picture.
* `stays-here.png` holds each row's picture as the network saw it, and its file's name, at the same height. It never
  leaves the device.

Of more than 1,024 rows the first are drawn; the sheet's head says so.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from edgefl_client.scoring.heatmap import colours, text_font
from edgefl_client.sharing.contact_sheet import LEAVES, STAYS, save_sheets

MOST_ROWS = 1024
_SQUARE, _ROW, _LEFT, _HEAD, _GAP = 5, 24, 104, 64, 12  # px
_INK, _QUIET, _PAPER = (24, 24, 28), (95, 95, 105), (255, 255, 255)


def draw_feature_sheets(
    folder: Path,
    rows: NDArray[np.float16],
    names: Sequence[str],
    pictures: Iterable[NDArray[np.uint8]],
    sha256: str,
    size: int,
) -> dict[str, str]:
    """Write both sheets, readable by their owner only.

    Args:
        folder: made where it is missing.
        rows: (n, 128) as they would leave.
        names: of the files of the first rows, which stay.
        pictures: (S, S, 3) of the first rows, in order, which stay.
        sha256: of the payload's bytes.
        size: number of these bytes.

    Returns:
        Paths of the sheets: `leaves` and `stays`.

    Raises:
        StorageError: a sheet cannot be written.
        OSError: the folder cannot be made.
    """
    shown = rows[:MOST_ROWS]
    largest = max(float(np.abs(rows).max()), 1e-6)
    drawn = "" if len(shown) == len(rows) else f" The first {len(shown):,} are drawn."
    width = _LEFT + rows.shape[1] * _SQUARE + _GAP
    leaves, stays = (Image.new("RGB", (width, _HEAD + len(shown) * _ROW), _PAPER) for _ in (LEAVES, STAYS))
    _head(leaves, f"Would leave: {len(rows):,} features, {size:,} bytes.{drawn}", f"SHA-256 {sha256}")
    _head(stays, "Stays here: the pictures, as the network saw them", "Beside each: file")
    small = text_font(12)
    scale = f"dark blue {-largest:.2f}, yellow {largest:.2f}"
    ImageDraw.Draw(leaves).text((width - 220, 12), scale, font=small, fill=_QUIET)
    for row, (values, name, pixels) in enumerate(zip(shown, names, pictures, strict=True)):
        top = _HEAD + row * _ROW
        ImageDraw.Draw(leaves).text((_GAP, top + 4), f"features[{row}]", font=small, fill=_QUIET)
        leaves.paste(_stripe(values, largest), (_LEFT, top))
        stays.paste(Image.fromarray(pixels).resize((_ROW - 2, _ROW - 2), Image.Resampling.BICUBIC), (_LEFT, top))
        shown_name = name.encode("utf-8", "replace").decode()[:80]
        ImageDraw.Draw(stays).text((_LEFT + _ROW + 8, top + 4), shown_name, font=small, fill=_QUIET)
    return save_sheets(folder, leaves, stays)


def _head(sheet: Image.Image, title: str, below: str) -> None:
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 8), title, font=text_font(18), fill=_INK)
    draw.text((_GAP, 36), below, font=text_font(13), fill=_QUIET)


def _stripe(values: NDArray[np.float16], largest: float) -> Image.Image:
    """One square of one colour a number, from minus to plus the largest of the payload."""
    shares = (values.astype(np.float32)[None] / np.float32(largest) + 1) / 2  # (1, 128)
    image = Image.fromarray(np.round(colours(np.clip(shares, 0.0, 1.0))).astype(np.uint8))
    return image.resize((values.size * _SQUARE, _ROW - 2), Image.Resampling.NEAREST)

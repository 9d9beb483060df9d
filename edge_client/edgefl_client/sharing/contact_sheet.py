"""Two sheets of the same layout for the owner: the maps that would leave, and the pictures they were made of.

* `would-leave.png` is drawn from the payload's own values, a patch as one square of one colour, so it shows everything
  that a receiver gets and nothing else: no pixel and no name of a picture.
* `stays-here.png` holds the pictures as the network saw them, at the same places of the same size: laid beside the
  other, patch lies beside patch. It never leaves the device.

One row is one class, the most certain picture first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from edgefl_client.scoring.heatmap import colours, png_bytes, text_font
from edgefl_protocol.durable import write_atomic

LEAVES, STAYS = "would-leave.png", "stays-here.png"
CELL_PX = 192
_GAP, _CAPTION, _HEAD = 12, 22, 64  # px
_INK, _QUIET, _PAPER, _EDGE = (24, 24, 28), (95, 95, 105), (255, 255, 255), (190, 190, 196)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A map that would leave, and what it was made of.

    Attributes:
        array: name of the payload's array.
        row: of that array.
        label: name of the class.
        values: (N,) as they would leave.
        name: of the picture's file, which stays.
        vacuity: of the picture.
        pixels: (S, S, 3), the picture as the network saw it, which stays.
    """

    array: str
    row: int
    label: str
    values: NDArray[np.float16]
    name: str
    vacuity: float
    pixels: NDArray[np.uint8]


def draw_sheets(folder: Path, shared: Sequence[Shared], sha256: str, size: int) -> dict[str, str]:
    """Write both sheets, readable by their owner only.

    Args:
        folder: made where it is missing.
        shared: the maps, those of a class one after the other.
        sha256: of the payload's bytes.
        size: number of these bytes.

    Returns:
        Paths of the sheets: `leaves` and `stays`.

    Raises:
        StorageError: a sheet cannot be written.
        OSError: the folder cannot be made.
    """
    head = [
        f"Would leave: {len(shared)} attention maps, {size:,} bytes. Dark blue is 0, yellow is 1.",
        f"SHA-256 {sha256}",
    ]
    maps = [(_map_cell(one.values), f"{one.array}[{one.row}]  {_range(one.values)}") for one in shared]
    leaves = _sheet([one.label for one in shared], maps, head)
    photos = [(_photo_cell(one.pixels), f"{one.vacuity:.3f}  {one.name}") for one in shared]
    stays = _sheet(
        [one.label for one in shared], photos,
        ["Stays here: the pictures, as the network saw them", "Under each: vacuity, file"],
    )  # fmt: skip
    return save_sheets(folder, leaves, stays)


def save_sheets(folder: Path, leaves: Image.Image, stays: Image.Image) -> dict[str, str]:
    """Write both sheets, readable by their owner only, into a folder that is made where it is missing.

    Returns:
        Paths of the sheets: `leaves` and `stays`.

    Raises:
        StorageError: a sheet cannot be written.
        OSError: the folder cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, sheet in ((LEAVES, leaves), (STAYS, stays)):
        write_atomic(folder / name, png_bytes(sheet), mode=0o600)
    return {"leaves": str(folder / LEAVES), "stays": str(folder / STAYS)}


def _map_cell(values: NDArray[np.float16]) -> Image.Image:
    """One square of one colour a patch; the scale runs from 0 to 1 for every map."""
    side = round(values.size**0.5)
    grid = values.astype(np.float32).reshape((side, side) if side * side == values.size else (1, -1))
    image = Image.fromarray(np.round(colours(np.clip(grid, 0.0, 1.0))).astype(np.uint8))
    return image.resize((CELL_PX, CELL_PX), Image.Resampling.NEAREST)


def _range(values: NDArray[np.float16]) -> str:
    return f"{float(values.min()):.2f} to {float(values.max()):.2f}"


def _photo_cell(pixels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(pixels).resize((CELL_PX, CELL_PX), Image.Resampling.BICUBIC)


def _sheet(labels: Sequence[str], cells: Sequence[tuple[Image.Image, str]], head: Sequence[str]) -> Image.Image:
    """Cells in rows, a row per label; the layout depends on the labels alone."""
    rows = list(dict.fromkeys(labels))
    wide = max(labels.count(label) for label in rows)
    row_px = _CAPTION + CELL_PX + _CAPTION + _GAP
    width = max(_GAP + wide * (CELL_PX + _GAP), 640)
    sheet = Image.new("RGB", (width, _HEAD + len(rows) * row_px), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font, small = text_font(18), text_font(13)
    draw.text((_GAP, 8), head[0], font=font, fill=_INK)
    draw.text((_GAP, 36), head[1], font=small, fill=_QUIET)
    used = dict.fromkeys(rows, 0)
    for label, (cell, caption) in zip(labels, cells, strict=True):
        top = _HEAD + rows.index(label) * row_px
        left = _GAP + used[label] * (CELL_PX + _GAP)
        if used[label] == 0:
            draw.text((_GAP, top), label, font=small, fill=_INK)
        used[label] += 1
        sheet.paste(cell, (left, top + _CAPTION))
        draw.rectangle((left, top + _CAPTION, left + CELL_PX - 1, top + _CAPTION + CELL_PX - 1), outline=_EDGE)
        draw.text((left, top + _CAPTION + CELL_PX + 3), _fitted(caption, small), font=small, fill=_QUIET)
    return sheet


def _fitted(text: str, font: ImageFont.FreeTypeFont) -> str:
    """The text, or as much of it as stands under a cell."""
    shown = text.encode("utf-8", "replace").decode()
    if font.getlength(shown) <= CELL_PX:
        return shown
    while font.getlength(f"{shown}…") > CELL_PX:
        shown = shown[:-1]
    return f"{shown}…"

"""Two sheets of the same layout for the owner: the maps or features that would leave, and the pictures behind them.

* `would-leave.png` is drawn from the payload's own values: a map as one square of one colour a patch, a feature as a
  line of 128 squares. It shows everything that a receiver gets and nothing else: no pixel and no name of a picture.
* `stays-here.png` holds the pictures as the network saw them, each at the place of its map or line: laid beside the
  other, patch lies beside patch. It never leaves the device.

Of maps, one row is one class, the most certain picture first; a mean of several pictures stands at the first of these.
Of more than 1,024 features the first are drawn; the sheet's head says so.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from edgefl_client.scoring.drawing.caption import text_font
from edgefl_client.scoring.drawing.heatmap import colours, png_bytes
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.sentences import counted

LEAVES, STAYS = "would-leave.png", "stays-here.png"
CELL_PX = 192  # of a map and of its picture
MOST_ROWS = 1024  # features that are drawn
_GAP, _CAPTION, _HEAD = 12, 22, 64  # px
_SQUARE, _LINE, _LEFT = 5, 24, 104  # px, of features
_INK, _QUIET, _PAPER, _EDGE = (24, 24, 28), (95, 95, 105), (255, 255, 255), (190, 190, 196)
_STAYS_HERE = "Stays here: the pictures, as the network saw them"


@dataclass(frozen=True, kw_only=True)
class SharedMap:
    """A map that would leave, and a picture that it was made of."""

    array: str  # name of the payload's array
    row: int  # of that array
    label: str  # name of the class
    values: NDArray[np.float16]  # (N,) as they would leave
    name: str  # of the picture's file, which stays
    vacuity: float  # of the picture
    pixels: NDArray[np.uint8]  # (S, S, 3), the picture as the network saw it, which stays


def draw_maps(folder: Path, shared: Sequence[SharedMap], sha256: str, size: int) -> dict[str, str]:
    """Draw both sheets of rollout maps, readable by their owner only.

    Args:
        shared: the maps, those of a class one after the other; pictures of one mean name the same row.

    Returns:
        Paths of the sheets: `leaves` and `stays`.
    """
    labels = [one.label for one in shared]
    rows = [(one.array, one.row) for one in shared]
    head = f"Would leave: {counted(len(set(rows)), 'attention map')}, {size:,} bytes. Dark blue is 0, yellow is 1."
    again = Image.new("RGB", (CELL_PX, CELL_PX), _PAPER), "in the mean before it"
    maps = [
        again if row in rows[:place] else (_map_cell(one.values), f"{one.array}[{one.row}]  {_range(one.values)}")
        for place, (row, one) in enumerate(zip(rows, shared, strict=True))
    ]
    leaves = _cells(labels, maps, head, f"SHA-256 {sha256}")
    photos = [(_photo(one.pixels, CELL_PX), f"{one.vacuity:.3f}  {one.name}") for one in shared]
    return _save(folder, leaves, _cells(labels, photos, _STAYS_HERE, "Under each: vacuity, file"))


def draw_features(
    folder: Path,
    rows: NDArray[np.float16],
    names: Sequence[str],
    pictures: Iterable[NDArray[np.uint8]],
    sha256: str,
    size: int,
) -> dict[str, str]:
    """Draw both sheets of features, readable by their owner only; results and errors as of `draw_maps`.

    Args:
        rows: (n, 128) as they would leave.
        names: of the files of the first rows, which stay.
        pictures: (S, S, 3) of the first rows, in order, which stay.
    """
    shown = rows[:MOST_ROWS]
    largest = max(float(np.abs(rows).max()), 1e-6)
    drawn = "" if len(shown) == len(rows) else f" The first {len(shown):,} are drawn."
    width, height = _LEFT + rows.shape[1] * _SQUARE + _GAP, _HEAD + len(shown) * _LINE
    head = f"Would leave: {counted(len(rows), 'feature')}, {size:,} bytes.{drawn}"
    leaves = _headed(width, height, head, f"SHA-256 {sha256}")
    stays = _headed(width, height, _STAYS_HERE, "Beside each: file")
    left, right, small = ImageDraw.Draw(leaves), ImageDraw.Draw(stays), text_font(12)
    left.text((width - 220, 12), f"dark blue {-largest:.2f}, yellow {largest:.2f}", font=small, fill=_QUIET)
    for row, (values, name, pixels) in enumerate(zip(shown, names, pictures, strict=True)):
        top = _HEAD + row * _LINE
        left.text((_GAP, top + 4), f"features[{row}]", font=small, fill=_QUIET)
        leaves.paste(_line(values, largest), (_LEFT, top))
        stays.paste(_photo(pixels, _LINE - 2), (_LEFT, top))
        right.text((_LEFT + _LINE + 8, top + 4), _printable(name)[:80], font=small, fill=_QUIET)
    return _save(folder, leaves, stays)


def _save(folder: Path, leaves: Image.Image, stays: Image.Image) -> dict[str, str]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, sheet in ((LEAVES, leaves), (STAYS, stays)):
        write_atomic(folder / name, png_bytes(sheet), mode=0o600)
    return {"leaves": str(folder / LEAVES), "stays": str(folder / STAYS)}


def _headed(width: int, height: int, title: str, below: str) -> Image.Image:
    """An empty sheet with its two lines of text at the top."""
    sheet = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 8), title, font=text_font(18), fill=_INK)
    draw.text((_GAP, 36), below, font=text_font(13), fill=_QUIET)
    return sheet


def _cells(labels: Sequence[str], cells: Sequence[tuple[Image.Image, str]], title: str, below: str) -> Image.Image:
    """Cells in rows, a row per label; the layout depends on the labels alone."""
    rows = list(dict.fromkeys(labels))
    wide = max(labels.count(label) for label in rows)
    row_px = _CAPTION + CELL_PX + _CAPTION + _GAP
    sheet = _headed(max(_GAP + wide * (CELL_PX + _GAP), 640), _HEAD + len(rows) * row_px, title, below)
    draw, small = ImageDraw.Draw(sheet), text_font(13)
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


def _map_cell(values: NDArray[np.float16]) -> Image.Image:
    """One square of one colour a patch; the scale runs from 0 to 1 for every map."""
    side = round(values.size**0.5)
    grid = values.astype(np.float32).reshape((side, side) if side * side == values.size else (1, -1))
    return _coloured(grid, (CELL_PX, CELL_PX))


def _line(values: NDArray[np.float16], largest: float) -> Image.Image:
    """One square of one colour a number, from minus to plus the largest of the payload."""
    shares = (values.astype(np.float32)[None] / np.float32(largest) + 1) / 2  # (1, 128)
    return _coloured(shares, (values.size * _SQUARE, _LINE - 2))


def _coloured(grid: NDArray[np.floating[Any]], size: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(np.round(colours(np.clip(grid, 0.0, 1.0))).astype(np.uint8))
    return image.resize(size, Image.Resampling.NEAREST)


def _photo(pixels: NDArray[np.uint8], side: int) -> Image.Image:
    return Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)


def _range(values: NDArray[np.float16]) -> str:
    return f"{float(values.min()):.2f} to {float(values.max()):.2f}"


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _fitted(text: str, font: ImageFont.FreeTypeFont) -> str:
    """The text, or as much of it as stands under a cell."""
    shown = _printable(text)
    if font.getlength(shown) <= CELL_PX:
        return shown
    while font.getlength(f"{shown}…") > CELL_PX:
        shown = shown[:-1]
    return f"{shown}…"

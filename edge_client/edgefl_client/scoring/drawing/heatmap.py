"""The heat map: the photo untouched, and beside it what its answer rests on, drawn so that a dermatologist can read it.

What the drawing keeps to:

* The photo lies at the top left in its own aspect ratio, as it was taken. A photo smaller than 448 px on its longer
  side is enlarged by a whole number, so photo pixel (x, y) is picture pixel (f·x, f·y) with f written in the caption.
  One larger than 1,600 px is reduced to that, which the caption says: time and memory stay bounded whatever the camera.
  The same photo with the map stands to its right, `gap_px` of white between them.
* The map is stretched with bilinear interpolation, `align_corners` off, as in training (docs/methods.md, section
  1.4). After a `squash` fit it covers the photo exactly; after a `crop` fit it covers the centred square the network
  saw, and that square is framed.
* The picture can be printed in grey: over any one colour of skin, more is brighter, never only of another hue. Outlined
  in white on black are the strongest cells: at most the quarter whose hiding was measured when the bundle was made, and
  of it those that are half as strong as the strongest (`rules.hidden_regions`). The caption counts them.
* The colours of each map end at its own strongest part. The caption says how much hiding that part lowers the answer's
  probability, or that the colours do not tell.
* The caption (`score_picture`, `answer_picture`) ends with how true the map was found, and that this is for research
  only.
* The last line names the photo's file and its digest, the model, its version and the kind of values, so that a print
  can be told.
* Where no map is shown, it is level, or no part matters much to the answer, the photo stands alone, and the caption
  says why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from edgefl_client.scoring.drawing.caption import (
    BODY,
    INK,
    QUIET,
    SMALL,
    WARN,
    CaptionLine,
    drawable,
    text_font,
    wrapped_lines,
)
from edgefl_client.scoring.explanation import Explanation
from edgefl_protocol.pictures.score import ModelInfo
from edgefl_protocol.rules.hidden_regions import LEAST_SPREAD, grid_side, ground, outlined_cells

Photo = NDArray[np.uint8]  # (H, W, 3)
Field = NDArray[np.float32]  # (H, W), one value per pixel

ENLARGE_BELOW_PX = 448
REDUCE_ABOVE_PX = 1600
BAND_ROWS = 64  # coloured at a time
PNG_LEVEL = 4  # a third of the time of zlib's usual 6, and a tenth more bytes
CAPTION_WIDTH_PX = 900  # narrowest picture in which a headline of two classes stands on a line or two
ALPHA = 0.6  # of the colour over the photo, the same everywhere: else brightness would not grow with attention
LONGEST_NAME = 40  # characters of a photo's name; of a longer one the middle is left out
PHOTO_WORDS, MAP_WORDS, HIDING_WORDS = "The photo as it is", "Where the model looked", "What the answer hangs on"

# Nine stops of viridis (CC0): dark blue to yellow, brightness rising throughout, readable without colour vision.
_STOPS = (
    (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
    (170, 220, 50), (253, 231, 37),
)  # fmt: skip
_LIGHT_SKIN, _DARK_SKIN = (232, 190, 172), (96, 62, 48)
_PAPER = (255, 255, 255)


@dataclass(frozen=True)
class Placed:
    """A map stretched over a photo."""

    values: Field  # the map at photo resolution; 0 outside `box`
    box: tuple[int, int, int, int]  # left, top, right, bottom of the part the network saw, in photo pixels
    low: float  # map value at the clear end of the colour scale
    marked: NDArray[np.bool_]  # the pixels of the outlined cells
    outlined: tuple[int, int]  # how many cells are outlined, of how many
    edge: str | None  # where at the edge of what the network saw the strongest cell lies; None further in
    high: float  # map value at the strong end: its largest

    @property
    def framed(self) -> bool:
        """Whether the network saw a part of the photo only, which the drawing frames."""
        left, top, right, bottom = self.box
        return (right - left, bottom - top) != self.values.shape[::-1]


def place_map(shown: Field, height_px: int, width_px: int, fit: str) -> Placed:
    """Stretch a patch map back over the photo it was computed from.

    Args:
        shown: (N,) with N a square number, row-major, at most 1.
        fit: `squash` or `crop`, as the bundle prepared the photo.

    Raises:
        ValueError: N is not a square number, or the fit is unknown.
    """
    side = grid_side(shown.size)
    if fit == "squash":
        box = (0, 0, width_px, height_px)
    elif fit == "crop":
        short = min(width_px, height_px)
        left, top = (width_px - short) // 2, (height_px - short) // 2
        box = (left, top, left + short, top + short)
    else:
        raise ValueError(f"fit is {fit!r}; allowed: 'squash', 'crop'")
    left, top, right, bottom = box
    grid = Image.fromarray(np.ascontiguousarray(shown.reshape(side, side), dtype=np.float32))
    # Pillow's bilinear filter takes pixel centres at half steps, which is `align_corners` off, as long as it enlarges.
    inner = grid.resize((right - left, bottom - top), Image.Resampling.BILINEAR)
    values = np.zeros((height_px, width_px), dtype=np.float32)
    values[top:bottom, left:right] = np.asarray(inner)
    cells = outlined_cells(shown)
    rows, columns = (np.arange(length) * side // length for length in (bottom - top, right - left))
    marked = np.zeros(values.shape, dtype=np.bool_)
    marked[top:bottom, left:right] = cells.reshape(side, side)[np.ix_(rows, columns)]
    low = ground(shown)
    high = max(float(shown.max()), low + LEAST_SPREAD)  # a level map stays pale
    outlined, edge = (int(cells.sum()), shown.size), _edge(int(shown.argmax()), side)
    return Placed(values, box, low=low, high=high, marked=marked, outlined=outlined, edge=edge)


def _edge(cell: int, side: int) -> str | None:
    """Name the edge or corner in whose outer quarter a cell of a grid lies, as a person sees it; None further in."""
    row, column = divmod(cell, side)
    outer = max(1, side // 4)
    up_or_down = "upper" if row < outer else "lower" if row >= side - outer else ""
    across = "left" if column < outer else "right" if column >= side - outer else ""
    if up_or_down and across:
        return f"in the {up_or_down} {across} corner"
    return f"at the {up_or_down or across} edge" if up_or_down or across else None


def colours(levels: Field) -> NDArray[np.float32]:
    """Colour levels in [0, 1]: (…, 3) in 0 to 255."""
    stops = np.asarray(_STOPS, dtype=np.float32)
    at = np.linspace(0.0, 1.0, len(_STOPS))
    return np.stack([np.interp(levels, at, stops[:, band]) for band in range(3)], axis=-1).astype(np.float32)


def tint(photo: Photo, levels: Field) -> Photo:
    """Lay colour over the photo: over pixels of one colour, the brighter the higher the level."""
    drawn = np.empty_like(photo)
    for top in range(0, len(photo), BAND_ROWS):
        rows = slice(top, top + BAND_ROWS)
        drawn[rows] = np.round(photo[rows] * (1 - ALPHA) + colours(levels[rows]) * ALPHA)
    return drawn


def overlay(photo: Photo, placed: Placed, line_px: int) -> Photo:
    """Lay the coloured map and its outline over the photo (H, W, 3).

    The white line is `line_px` wide, its black rim as wide again on either side.
    """
    left, top, right, bottom = placed.box
    levels = np.clip((placed.values - placed.low) / (placed.high - placed.low), 0.0, 1.0)
    drawn = photo.copy()
    drawn[top:bottom, left:right] = tint(photo[top:bottom, left:right], levels[top:bottom, left:right])
    _outline(drawn, placed.marked, line_px)
    return drawn if placed.box == (0, 0, *photo.shape[1::-1]) else _framed(drawn, placed.box, line_px)


def _framed(drawn: Photo, box: tuple[int, int, int, int], line_px: int) -> Photo:
    """Frame what the network saw."""
    left, top, right, bottom = box
    picture = Image.fromarray(drawn)
    draw = ImageDraw.Draw(picture)
    draw.rectangle((left, top, right - 1, bottom - 1), outline=(0, 0, 0), width=3 * line_px)
    inner = (left + line_px, top + line_px, right - 1 - line_px, bottom - 1 - line_px)
    draw.rectangle(inner, outline=_PAPER, width=line_px)
    return np.asarray(picture)


def _outline(drawn: Photo, region: NDArray[np.bool_], line_px: int) -> None:
    """Draw the border of a region, white with a black rim, so that it shows on any skin; whole at the photo's edge."""
    rim = 3 * line_px // 2
    inside = np.zeros_like(region)
    inside[rim:-rim, rim:-rim] = region[rim:-rim, rim:-rim]  # nearer to the edge, half of the line would be cut off
    edge = inside & _widened(~inside, 1)
    drawn[_widened(edge, rim)] = 0
    drawn[_widened(edge, line_px // 2)] = _PAPER


def _widened(region: NDArray[np.bool_], by_px: int) -> NDArray[np.bool_]:
    """Widen a region by so many pixels to all eight sides."""
    for _ in range(2):  # rows, then columns
        wider = region.copy()
        for step in range(1, by_px + 1):
            wider[step:] |= region[:-step]
            wider[:-step] |= region[step:]
        region = wider.T
    return region


def shown_photo(photo: Photo) -> tuple[Photo, str]:
    """Bring a photo (H, W, 3) to the size it is drawn at; gives the caption's words for that, if it changes."""
    height_px, width_px = photo.shape[:2]
    longer = max(height_px, width_px)
    if longer > REDUCE_ABOVE_PX:
        scale = REDUCE_ABOVE_PX / longer
        size = (max(1, round(width_px * scale)), max(1, round(height_px * scale)))
        return np.asarray(Image.fromarray(photo).resize(size, Image.Resampling.BICUBIC)), " Photo reduced."
    factor = -(-ENLARGE_BELOW_PX // longer)
    if factor <= 1:
        return photo, ""
    size = (width_px * factor, height_px * factor)
    enlarged = np.asarray(Image.fromarray(photo).resize(size, Image.Resampling.BICUBIC))
    return enlarged, f" Photo enlarged {factor} times."


def gap_px(width_px: int, height_px: int) -> int:
    """Width of the white between the photo and the one with the map, both of this size."""
    return max(8, round(max(width_px, height_px) / 40))


def draw_picture(
    photo: Photo,
    fit: str,
    explanation: Explanation,
    caption: "Callable[[Placed | None, str], Sequence[CaptionLine]]",
) -> Image.Image:
    """Draw the finished picture: the photo, the photo with map where one is shown, legend and caption.

    Args:
        photo: (H, W, 3), upright.
        explanation: the map and how true it is, or why there is none.
        caption: makes the lines, given where the map lies and in words how the photo was enlarged or reduced.
    """
    shown, size_words = shown_photo(photo)
    height_px, width_px = shown.shape[:2]
    beside = width_px + gap_px(width_px, height_px)
    placed = None
    if explanation.values is not None:
        placed = place_map(explanation.values, height_px, width_px, fit)
    whole_px = max(beside + width_px if placed else width_px, CAPTION_WIDTH_PX)
    unit = max(14, min(whole_px // 52, 60))  # px, body text
    lines = drawable(caption(placed, size_words))
    panel = _panel(whole_px, beside, unit, placed, lines, _map_words(explanation))
    picture = Image.new("RGB", (whole_px, height_px + panel.height), _PAPER)
    picture.paste(Image.fromarray(shown), (0, 0))
    if placed is not None:
        line_px = max(2, round(max(height_px, width_px) / 400))
        picture.paste(Image.fromarray(overlay(shown, placed, line_px)), (beside, 0))
    picture.paste(panel, (0, height_px))
    return picture


def map_lines(
    placed: Placed | None, explanation: Explanation, fall: str | None, size_words: str, subject: str
) -> list[CaptionLine]:
    """Say how true the map is and what its colours are, or why there is none; and what the picture is for.

    Args:
        fall: how hiding the strongest part changes the probability, `from 74% to 31%`; None where nobody tried.
        size_words: how the photo was enlarged or reduced.
        subject: what a person would look at, such as `the lesion`; an outlined part need not be of it.
    """
    lines = [] if placed is None else [CaptionLine(_compared(fall), SMALL, INK)]
    lines.append(CaptionLine(explanation.sentence, SMALL, INK))
    note = "Research use only, not a diagnosis."
    if placed is not None:
        some, parts = placed.outlined
        lines.append(
            CaptionLine(
                f"Outlined here: {some} of {parts} parts, each at least half as strong as the strongest. An outlined "
                f"part may lie beside {subject}: the model judges by it all the same.",
                SMALL,
                INK,
            )
        )
        if placed.edge is not None:
            seen = "the white frame" if placed.framed else "the picture"
            # Only where parts were hidden is it known what the answer hangs on.
            hidden = explanation.without is not None
            what = "The answer hangs most on a part" if hidden else "The strongest part of the map is"
            lines.append(CaptionLine(f"{what} {placed.edge} of {seen}. Look at the photo itself.", BODY, WARN))
        note += f" The map shows {_map_words(explanation).lower()}, not where disease is."
        if placed.framed:
            size_words += " Nothing outside the white frame was looked at."
    lines.append(CaptionLine(note + size_words, SMALL, QUIET))
    return lines


def _compared(fall: str | None) -> str:
    """Say how much the strongest part matters: the scale of colours ends there, however little it is."""
    compare = "The colours compare parts of this picture"
    if fall is None:
        return f"{compare}; they do not say how much the answer changes."
    return f"{compare}: hiding the strongest part lowers the probability {fall}."


def origin(image: str | None, model: ModelInfo, digits: str | None, done: str) -> CaptionLine:
    """Say which photo, model and values a printed picture shows. No date: the same result gives the same bytes.

    Args:
        digits: first ones of the SHA-256 of the photo's file, which tell photos of one name apart; None without a file.
        done: `scored` or `answered`.
    """
    name = "-" if image is None else PurePath(image).name
    shown = "a photo without a name" if name == "-" else "".join(one if one.isprintable() else "?" for one in name)
    if len(shown) > LONGEST_NAME:
        shown = f"{shown[: LONGEST_NAME // 2]}...{shown[-LONGEST_NAME // 2 :]}"
    values = "the bundle's values" if model.state_kind == "bundle" else "personal values, learned on this device"
    file = "" if digits is None else f" ({digits})"
    by = f"{model.id.removeprefix('-/')} version {model.version} with {values}"
    return CaptionLine(f"{shown}{file}, {done} by {by}.", SMALL, QUIET)


def png_bytes(picture: Image.Image) -> bytes:
    """Encode a picture as PNG, without any of the photo's metadata."""
    out = BytesIO()
    picture.save(out, format="PNG", compress_level=PNG_LEVEL)
    return out.getvalue()


def _map_words(explanation: Explanation) -> str:
    return MAP_WORDS if explanation.without is None else HIDING_WORDS


def _panel(
    width_px: int, beside: int, unit: int, placed: Placed | None, lines: Sequence[CaptionLine], map_words: str
) -> Image.Image:
    """Draw what stands under the photos: what each is, legend and caption.

    Args:
        beside: where the photo with the map begins.
        unit: size of body text, in px.
        map_words: what the map shows.
    """
    margin = unit
    inner = width_px - 2 * margin
    fonts = {size: text_font(round(unit * size)) for size in {line.size for line in lines}}
    wrapped = [
        (part, fonts[size], ink) for text, size, ink in lines for part in wrapped_lines(text, fonts[size], inner)
    ]
    heights = [round(font.size * 1.4) for _, font, _ in wrapped]
    top, legend_px = round(unit * 2.4), round(unit * 3.4) if placed else 0
    panel = Image.new("RGB", (width_px, top + legend_px + sum(heights) + margin), _PAPER)
    draw = ImageDraw.Draw(panel)
    for left, words in ((margin, PHOTO_WORDS), (max(beside, margin), map_words))[: 2 if placed else 1]:
        draw.text((left, unit // 2), words, font=text_font(round(unit * 0.85)), fill=QUIET)
    if placed is not None:
        _legend(panel, (margin, top), inner, unit, placed)
    top += legend_px
    for (text, font, ink), step in zip(wrapped, heights, strict=True):
        draw.text((margin, top), text, font=font, fill=ink)
        if ink == WARN:  # a bar, for whoever sees no red
            draw.rectangle((margin // 3, top, margin // 3 + unit // 4, top + step - 1), fill=ink)
        top += step
    return panel


def _legend(panel: Image.Image, at: tuple[int, int], width_px: int, unit: int, placed: Placed) -> None:
    """Draw the colour scale on light and on dark skin, what its ends mean, and a sample of the outline."""
    draw = ImageDraw.Draw(panel)
    font = text_font(round(unit * 0.85))
    bar_px = round(width_px * 0.56)
    left, top = at
    levels = np.tile(np.linspace(0.0, 1.0, bar_px, dtype=np.float32), (unit, 1))
    skin = np.empty((unit, bar_px, 3), dtype=np.uint8)
    skin[: unit // 2], skin[unit // 2 :] = _LIGHT_SKIN, _DARK_SKIN
    panel.paste(Image.fromarray(tint(skin, levels)), (left, top))
    draw.rectangle((left, top, left + bar_px - 1, top + unit - 1), outline=INK)
    below = top + round(unit * 1.25)
    draw.text((left, below), "least", font=font, fill=QUIET)
    draw.text((left + bar_px, below), "most in this picture", font=font, fill=QUIET, anchor="ra")
    sample = left + bar_px + 2 * unit
    middle = top + unit // 2
    rim = max(3, unit // 4)
    draw.line((sample, middle, sample + 2 * unit, middle), fill=(0, 0, 0), width=rim)
    draw.line((sample, middle, sample + 2 * unit, middle), fill=_PAPER, width=max(1, rim // 3))
    words = "outlined: {} of {} parts".format(*placed.outlined)
    draw.text((sample + round(2.6 * unit), top), words, font=font, fill=INK)

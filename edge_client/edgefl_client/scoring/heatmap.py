"""The heat map: where on the photo the model looked, drawn so that a dermatologist can read it.

What the drawing keeps to:

* The photo lies at the top left in its own aspect ratio. A photo smaller than 448 px on its longer side is enlarged by
  a whole number, so photo pixel (x, y) is picture pixel (f·x, f·y) with f written in the caption. One larger than
  1,600 px is reduced to that, which the caption says: time and memory stay bounded whatever the camera.
* The map is stretched with bilinear interpolation, `align_corners` off, as in training (docs/methods.md, section
  1.4). After a `squash` fit it covers the photo exactly; after a `crop` fit it covers the centred square the network
  saw, and that square is framed.
* Colour grows with attention on a scale whose brightness grows too, so it reads on dark and on light skin and without
  colour vision; low attention leaves the photo clear. The strongest tenth of the seen area is outlined in white on
  black.
* The caption says class, probability, vacuity, the reasons to refer in words, and that this is for research only.
"""

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from edgefl_protocol.pictures.referral import REASON_WORDS
from edgefl_protocol.pictures.score import RolloutMap, Score

Photo = NDArray[np.uint8]  # (H, W, 3)
Field = NDArray[np.float32]  # (H, W), one value per pixel
_Line = tuple[str, ImageFont.FreeTypeFont, tuple[int, int, int]]  # text, font, ink

ENLARGE_BELOW_PX = 448
REDUCE_ABOVE_PX = 1600
BAND_ROWS = 64  # coloured at a time
CAPTION_WIDTH_PX = 448  # narrowest picture in which the caption still reads well
STRONGEST_SHARE = 0.10  # share of the seen area inside the outline
LEAST_RISE = 0.10  # of the map's range: what the outline encloses stands at least this far above the lowest place
LEAST_SPREAD = 0.10  # below this range of a max-normalised map nothing is outlined
ALPHA_HIGH = 0.5  # of the colour over the photo at the strongest place

# Nine stops of viridis (CC0): dark blue to yellow, brightness rising throughout, readable without colour vision.
_STOPS = (
    (68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
    (170, 220, 50), (253, 231, 37),
)  # fmt: skip
_LIGHT_SKIN, _DARK_SKIN = (232, 190, 172), (96, 62, 48)
_INK, _PAPER, _QUIET, _WARN = (24, 24, 28), (255, 255, 255), (95, 95, 105), (166, 33, 20)


@dataclass(frozen=True)
class Placed:
    """A map stretched over a photo."""

    values: Field  # the map at photo resolution; 0 outside `box`
    box: tuple[int, int, int, int]  # left, top, right, bottom of the part the network saw, in photo pixels
    low: float  # map value at the clear end of the colour scale
    high: float  # map value at the strong end


def place_map(rollout_map: RolloutMap, height_px: int, width_px: int, fit: str) -> Placed:
    """Stretch a patch map back over the photo it was computed from.

    Args:
        rollout_map: (N,) with N a square number, row-major.
        fit: `squash` or `crop`, as the bundle prepared the photo.

    Raises:
        ValueError: N is not a square number, or the fit is unknown.
    """
    side = round(rollout_map.size**0.5)
    if side * side != rollout_map.size:
        raise ValueError(f"a map of {rollout_map.size} tokens is no square grid")
    if fit == "squash":
        box = (0, 0, width_px, height_px)
    elif fit == "crop":
        short = min(width_px, height_px)
        left, top = (width_px - short) // 2, (height_px - short) // 2
        box = (left, top, left + short, top + short)
    else:
        raise ValueError(f"fit is {fit!r}; known are 'squash' and 'crop'")
    grid = Image.fromarray(np.ascontiguousarray(rollout_map.reshape(side, side), dtype=np.float32))
    # Pillow's bilinear filter takes pixel centres at half steps, which is `align_corners` off, as long as it enlarges.
    inner = grid.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BILINEAR)
    values = np.zeros((height_px, width_px), dtype=np.float32)
    values[box[1] : box[3], box[0] : box[2]] = np.asarray(inner)
    high = float(rollout_map.max())
    # At least LEAST_SPREAD apart, so that the noise of a level map is not blown up to full colour.
    return Placed(values, box, low=min(float(rollout_map.min()), high - LEAST_SPREAD), high=high)


def strongest_region(placed: Placed) -> NDArray[np.bool_] | None:
    """Mask (H, W) the strongest tenth of the seen area, less where less stands out; None for a level map."""
    left, top, right, bottom = placed.box
    inside = placed.values[top:bottom, left:right]
    low, spread = float(inside.min()), float(inside.max() - inside.min())
    if spread < LEAST_SPREAD:
        return None
    # Where a single patch stands out of an even ground, the tenth would reach into the ground and outline nothing.
    threshold = max(float(np.quantile(inside, 1 - STRONGEST_SHARE)), low + LEAST_RISE * spread)
    mask = np.zeros(placed.values.shape, dtype=np.bool_)
    mask[top:bottom, left:right] = inside >= threshold
    return mask


def colours(levels: Field) -> NDArray[np.float32]:
    """Colour levels in [0, 1]: (…, 3) in 0 to 255."""
    stops = np.asarray(_STOPS, dtype=np.float32)
    at = np.linspace(0.0, 1.0, len(_STOPS))
    return np.stack([np.interp(levels, at, stops[:, band]) for band in range(3)], axis=-1).astype(np.float32)


def tint(photo: Photo, levels: Field) -> Photo:
    """Lay colour over the photo that grows with the level; level 0 leaves it as it was."""
    drawn = np.empty_like(photo)
    for top in range(0, len(photo), BAND_ROWS):
        rows = slice(top, top + BAND_ROWS)
        alpha = (ALPHA_HIGH * levels[rows])[..., None]  # (rows, W, 1)
        drawn[rows] = np.round(photo[rows] * (1 - alpha) + colours(levels[rows]) * alpha)
    return drawn


def overlay(photo: Photo, placed: Placed, line_px: int) -> Photo:
    """Lay the coloured map and its outline over the photo (H, W, 3).

    The white line is `line_px` wide, its black rim as wide again on either side.
    """
    left, top, right, bottom = placed.box
    levels = np.clip((placed.values - placed.low) / (placed.high - placed.low), 0.0, 1.0)
    drawn = Image.fromarray(tint(photo, levels))
    region = strongest_region(placed)
    if region is not None:
        _outline(drawn, region, line_px)
    if (left, top, right, bottom) != (0, 0, drawn.width, drawn.height):
        ImageDraw.Draw(drawn).rectangle((left, top, right - 1, bottom - 1), outline=_PAPER, width=line_px)
    return np.asarray(drawn)


def _outline(drawn: Image.Image, region: NDArray[np.bool_], line_px: int) -> None:
    """Draw the border of a region, white with a black rim, so that it shows on any skin."""
    mask = Image.fromarray(region.astype(np.uint8) * 255)
    inner = mask.filter(ImageFilter.MinFilter(3))
    edge = np.asarray(mask) > np.asarray(inner)
    line = Image.fromarray(edge.astype(np.uint8) * 255)
    drawn.paste((0, 0, 0), (0, 0), _thicken(line, 3 * line_px))
    drawn.paste(_PAPER, (0, 0), _thicken(line, line_px))


def _thicken(line: Image.Image, width_px: int) -> Image.Image:
    for _ in range(width_px // 2):  # together as one filter of that width, whose cost grows with its square
        line = line.filter(ImageFilter.MaxFilter(3))
    return line


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


def draw_heatmap(photo: Photo, score: Score, fit: str, *, rule_set: bool = True) -> Image.Image:
    """Draw the finished picture: photo with map, legend and caption.

    Args:
        photo: (H, W, 3), upright.
        rule_set: whether a threshold for referring uncertain pictures is in force; without one, silence is no comfort.

    Raises:
        ValueError: the score has no attention map (a network without attention).
    """
    if score.map is None:
        raise ValueError("this model has no attention map")
    shown, size_words = shown_photo(photo)
    height_px, width_px = shown.shape[:2]
    placed = place_map(score.map, height_px, width_px, fit)
    line_px = max(2, round(max(height_px, width_px) / 400))
    drawn = Image.fromarray(overlay(shown, placed, line_px))
    unit = max(14, min(max(width_px, CAPTION_WIDTH_PX) // 34, 96))  # px, body text
    panel = _panel(
        max(width_px, CAPTION_WIDTH_PX), unit, placed, _caption(score, placed, unit, size_words, rule_set=rule_set)
    )
    picture = Image.new("RGB", (panel.width, height_px + panel.height), _PAPER)
    picture.paste(drawn, (0, 0))
    picture.paste(panel, (0, height_px))
    return picture


def png_bytes(picture: Image.Image) -> bytes:
    """Encode a picture as PNG, without any of the photo's metadata."""
    out = BytesIO()
    picture.save(out, format="PNG", optimize=False)
    return out.getvalue()


def _panel(width_px: int, unit: int, placed: Placed, lines: list[_Line]) -> Image.Image:
    """Draw legend and caption under the photo; `unit` is the size of body text in px."""
    margin = unit
    inner = width_px - 2 * margin
    wrapped = [(part, font, ink) for text, font, ink in lines for part in _wrap(text, font, inner)]
    heights = [round(font.size * 1.4) for _, font, _ in wrapped]
    legend_px = round(unit * 3.4)
    panel = Image.new("RGB", (width_px, margin + legend_px + sum(heights) + margin), _PAPER)
    _legend(panel, (margin, margin), inner, unit, placed)
    draw = ImageDraw.Draw(panel)
    top = margin + legend_px
    for (text, font, ink), step in zip(wrapped, heights, strict=True):
        draw.text((margin, top), text, font=font, fill=ink)
        top += step
    return panel


def _legend(panel: Image.Image, at: tuple[int, int], width_px: int, unit: int, placed: Placed) -> None:
    """Draw the colour scale on light and on dark skin, its end values, and a sample of the outline."""
    draw = ImageDraw.Draw(panel)
    font = text_font(round(unit * 0.85))
    bar_px = round(width_px * 0.56)
    left, top = at
    levels = np.tile(np.linspace(0.0, 1.0, bar_px, dtype=np.float32), (unit, 1))
    skin = np.empty((unit, bar_px, 3), dtype=np.uint8)
    skin[: unit // 2], skin[unit // 2 :] = _LIGHT_SKIN, _DARK_SKIN
    panel.paste(Image.fromarray(tint(skin, levels)), (left, top))
    draw.rectangle((left, top, left + bar_px - 1, top + unit - 1), outline=_INK)
    below = top + round(unit * 1.25)
    draw.text((left, below), f"less attention ({placed.low:.2f})", font=font, fill=_QUIET)
    draw.text((left + bar_px, below), f"most ({placed.high:.2f})", font=font, fill=_QUIET, anchor="ra")
    sample = left + bar_px + 2 * unit
    middle = top + unit // 2
    rim = max(3, unit // 4)
    draw.line((sample, middle, sample + 2 * unit, middle), fill=(0, 0, 0), width=rim)
    draw.line((sample, middle, sample + 2 * unit, middle), fill=_PAPER, width=max(1, rim // 3))
    words = "strongest region" if strongest_region(placed) is not None else "no strongest region"
    draw.text((sample + round(2.6 * unit), top), words, font=font, fill=_INK)


def _percent(probability: float) -> str:
    """Write a probability; nothing short of certainty is rounded to it."""
    return f"{probability:.0%}" if round(probability * 100) < 100 else ">99%"


def _caption(score: Score, placed: Placed, unit: int, size_words: str, *, rule_set: bool) -> list[_Line]:
    body, small = text_font(unit), text_font(round(unit * 0.85))
    if score.predicted is None:
        head = "No prediction"
    else:
        head = f"Prediction: {score.predicted}, probability {_percent(score.probabilities[score.predicted])}"
    lines = [(head, text_font(round(unit * 1.35)), _INK)]
    if score.vacuity is not None:
        lines.append((f"Vacuity {score.vacuity:.2f} (0: much evidence, 1: none)", body, _INK))
    if score.refer:
        why = "; ".join(REASON_WORDS[reason] for reason in score.refer_reasons)
        lines.append((f"Refer to a dermatologist: {why}.", body, _WARN))
    elif not rule_set:
        lines.append(("No rule is set for when an uncertain picture is to be referred.", body, _WARN))
    else:
        lines.append(("No reason to refer was found by the model's own rules.", body, _INK))
    if strongest_region(placed) is None:
        lines.append(("The model looked at no place in particular.", small, _QUIET))
    note = "Research use only, not a diagnosis. Colour shows where the model looked, not where disease is."
    note += size_words
    left, top, right, bottom = placed.box
    if (right - left, bottom - top) != placed.values.shape[::-1]:
        note += " Nothing outside the white frame was looked at."
    lines.append((note, small, _QUIET))
    return lines


def _wrap(text: str, font: ImageFont.FreeTypeFont, width_px: int) -> list[str]:
    lines: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width_px:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line]


def text_font(size_px: int) -> ImageFont.FreeTypeFont:
    """Load Pillow's own scalable font, so that no font file of the machine is needed.

    Args:
        size_px: height of a line, less its gap.

    Raises:
        OSError: this Pillow was built without fonts.
    """
    font = ImageFont.load_default(size_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise OSError("this Pillow was built without FreeType; install a Pillow with it to draw heat maps")
    return font

"""The text of a caption: lines that are wrapped to the picture, in a font that needs no file of the machine.

Guarantees: no line is wider than it may be, however long a word is; a character that the font lacks is never drawn as a
box: `?` stands for it, and the caption's last line says so.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from PIL import ImageFont

Ink = tuple[int, int, int]

INK, QUIET, WARN = (24, 24, 28), (95, 95, 105), (130, 14, 8)
HEAD, BODY, SMALL = 1.35, 1.0, 0.85  # size of text, in units of the body's
NOT_SHOWN = "A ? may stand for a character that this picture cannot show."
_MISSING = "\U0010ffff"  # no character: fonts draw their box for it
_PROBE_PX = 16


class CaptionLine(NamedTuple):
    """A line of a caption, wrapped where it is drawn."""

    text: str
    size: float
    ink: Ink


def drawable(lines: Sequence[CaptionLine]) -> list[CaptionLine]:
    """Write `?` for what the font lacks, and say so in one more line."""
    shown = [line._replace(text="".join(one if has_glyph(one) else "?" for one in line.text)) for line in lines]
    return shown if shown == list(lines) else [*shown, CaptionLine(NOT_SHOWN, SMALL, QUIET)]


@lru_cache(maxsize=4096)
def has_glyph(character: str) -> bool:
    """Tell whether the font can draw a character, other than as a box."""
    font = text_font(_PROBE_PX)
    drawn, box = font.getmask(character), font.getmask(_MISSING)
    return (drawn.size, bytes(drawn)) != (box.size, bytes(box))


def wrapped_lines(text: str, font: ImageFont.FreeTypeFont, width_px: int) -> list[str]:
    """Break a text between words, and within one that is wider than a line."""
    lines, line = list[str](), ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if font.getlength(longer) <= width_px:
            line = longer
            continue
        lines += [line] if line else []
        *full, line = _cut(word, font, width_px)
        lines += full
    return [*lines, line]


def _cut(word: str, font: ImageFont.FreeTypeFont, width_px: int) -> list[str]:
    parts, part = list[str](), ""
    for one in word:
        if part and font.getlength(part + one) > width_px:
            parts.append(part)
            part = ""
        part += one
    return [*parts, part]


@lru_cache(maxsize=32)
def text_font(size_px: int) -> ImageFont.FreeTypeFont:
    """Load Pillow's own scalable font, so that no font file of the machine is needed.

    Args:
        size_px: height of a line, less its gap.

    Raises:
        OSError: this Pillow was built without fonts.
    """
    font = ImageFont.load_default(size_px)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise OSError("heat maps need a Pillow with FreeType, and this one was built without; install another Pillow")
    return font

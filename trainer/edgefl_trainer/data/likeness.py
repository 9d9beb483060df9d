"""What the pictures were like that a run learns from, where its network reads no less than they have.

A device then makes a photograph like them before the network sees it (`pictures.preprocess`, docs/decisions/0073).
"""

from collections.abc import Sequence

from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.site_rows import Indices


def likeness_of(
    tables: Sequence[SourceRows], rows: Sequence[Row], learned: Indices, image_px: int
) -> TaughtPictures | None:
    """Look at the files of what is learned from.

    Args:
        rows: of all tables, one after the other.
        learned: which of them are learned from or tuned on.

    Returns:
        None where one has more pixels than the network reads, or where making a photograph so would change nothing.
    """
    wanted, parts, start = set(learned.tolist()), list[TaughtPictures](), 0
    for table in tables:
        mine = [rows[i] for i in range(start, start + len(table.rows)) if i in wanted]
        start += len(table.rows)
        found = table.pixels.likeness(mine, image_px) if mine else None
        if mine and found is None:
            return None
        parts += [found] if found is not None else []
    if not parts:
        return None
    side, qualities = max(part.side for part in parts), {part.jpeg_quality for part in parts}
    quality = qualities.pop() if len(qualities) == 1 else None
    return None if (side, quality) == (image_px, None) else TaughtPictures(side=side, jpeg_quality=quality)


def told_of_likeness(taught: TaughtPictures | None, image_px: int) -> list[str]:
    """Write a sentence where the pictures are enlarged."""
    if taught is None or taught.side == image_px:
        return []
    return [
        f"the pictures to learn from have at most {taught.side} pixels a side, and the network reads {image_px}: a "
        "device makes each photograph as small first, or it would show the network more than it learned from"
    ]

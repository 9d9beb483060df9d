"""What the pictures were like that a run learns from, where its network reads no less than they have.

A device then makes a photograph like them before the network sees it (`pictures.preprocess`, docs/decisions/0073). So
pictures that only judge are made like them, too: figures hold for what a device shows the network.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_protocol.sentences import listed
from edgefl_trainer.data.learned_from import LEARNED, rows_of
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.site_rows import SiteRows
from edgefl_trainer.data.sources.jpeg_quality import best_quality


def likeness_of(
    tables: Sequence[SourceRows],
    rows: Sequence[Row],
    sites: Mapping[str, SiteRows],
    held_out: Collection[str],
    image_px: int,
) -> tuple[TaughtPictures | None, list[str]]:
    """Look at the files of what is learned from, site by site.

    Args:
        rows: of all tables, one after the other.
        held_out: sites that never learn.

    Returns:
        What all of them are like, or None where one has more pixels than the network reads, or where making a
        photograph so would change nothing; and what a person should know of it.
    """
    learned = {name: {*rows_of([site], LEARNED).tolist()} for name, site in sites.items() if name not in held_out}
    found = {name: _of_site(tables, rows, wanted, image_px) for name, wanted in learned.items() if wanted}
    small = sorted(name for name, taught in found.items() if taught is not None and taught.side < image_px)
    kinds = [taught for taught in found.values() if taught is not None]
    if not kinds or len(kinds) < len(found):
        return None, _told_of_some(small, image_px)
    side, quality = max(taught.side for taught in kinds), best_quality(taught.jpeg_quality for taught in kinds)
    if side == image_px:
        return (None if quality is None else TaughtPictures(side=side, jpeg_quality=quality)), []
    told = (
        f"the pictures to learn from have at most {side} pixels a side, and the network reads {image_px}: a device "
        "makes each photograph as small first, or it would show the network more than it learned from"
    )
    return TaughtPictures(side=side, jpeg_quality=quality), [told]


def made_like(tables: Sequence[SourceRows], taught: TaughtPictures | None) -> list[SourceRows]:
    """Make the pictures of those tables like the taught ones that hold a larger one; the others are so already."""
    if taught is None:
        return list(tables)
    return [
        table
        if table.pixels.likeness(table.rows, taught.side) is not None
        else replace(table, pixels=table.pixels.made_like(taught))
        for table in tables
    ]


def _of_site(
    tables: Sequence[SourceRows], rows: Sequence[Row], wanted: set[int], image_px: int
) -> TaughtPictures | None:
    """What one site learns from is like; None where a picture has more pixels than the network reads, or none is."""
    parts, start = list[TaughtPictures](), 0
    for table in tables:
        mine = [rows[i] for i in range(start, start + len(table.rows)) if i in wanted]
        start += len(table.rows)
        found = table.pixels.likeness(mine, image_px) if mine else None
        if mine and found is None:
            return None
        parts += [found] if found is not None else []
    if not parts:
        return None
    quality = best_quality(part.jpeg_quality for part in parts)
    return TaughtPictures(side=max(part.side for part in parts), jpeg_quality=quality)


def _told_of_some(small: Sequence[str], image_px: int) -> list[str]:
    """Warn of sites whose pictures are small where others' are not: no one rule fits a device of either."""
    if not small:
        return []
    return [
        f"the pictures of {listed(small)} have fewer pixels than the {image_px} that the network reads, and those of "
        "other sites have more: a device shows a model of the first sharper photographs than it learned from. Give all "
        "sites pictures of one size, or a network that reads no more than the smallest"
    ]

"""What is learned from and judged on as well, so that no figure on it passes for one on something new.

Guarantee: pictures are compared by their decoded pixels, so another name, folder or site hides none. A photo that was
saved anew is another picture here, and so is one that the network of `--backbone run:DIR` learned from.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.rows import Row
from edgefl_trainer.data.site_rows import Indices, SiteRows

LEARNED = ("train", "tune", "unlabelled")  # tune rows choose rounds and calibrate

SourceRow = tuple[str, Row]  # name of its table, row
LesionKey = tuple[str, str | None, str]  # `table` or `site`, its name, the lesion


def rows_of(sites: Iterable[SiteRows], kinds: Sequence[str]) -> Indices:
    """Return the rows of some kinds at these sites, in order."""
    return np.array(sorted({int(row) for site in sites for kind in kinds for row in site.rows(kind)}), dtype=np.int64)


def pixel_digest(image: NDArray[np.uint8]) -> bytes:
    """Compute a digest that two pictures share where they have the same size and pixels."""
    digest = hashlib.sha256(str(image.shape).encode())
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


def lesions_of(rows: Iterable[SourceRow]) -> Callable[[str, Row], bool]:
    """Return what tells whether a row of a table shows a lesion of these rows.

    A lesion is known by its name, inside one table or at one site: two hospitals may number theirs alike.
    """
    known = {key for name, row in rows for key in lesion_keys(name, row)}
    return lambda name, row: not known.isdisjoint(lesion_keys(name, row))


def told_of_lesions(learned: Iterable[SourceRow], judged: Iterable[SourceRow]) -> list[str]:
    """Write how many lesions are judged on that are learned from, too.

    They are the lesions of `lesions_of`.
    """
    known = lesions_of(learned)
    is_known: dict[tuple[str, str], bool] = defaultdict(bool)
    for name, row in judged:
        is_known[name, row.lesion] |= known(name, row)
    again = sorted(lesion for (_, lesion), found in is_known.items() if found)
    if not again:
        return []
    return [
        f"{len(again)} of the {counted(len(is_known), 'lesion')} that are judged on {_are(again)} learned from or "
        f"tuned on, too, such as {again[0]}: the figures hold for new pictures, not for new lesions"
    ]


def told_of_pictures(learned: Mapping[bytes, str], judged: Sequence[tuple[bytes, str]], total: int) -> list[str]:
    """Write how many pictures are judged on whose pixels are learned from.

    Args:
        learned: digest → name of a picture.
        judged: digest and name of each picture that may be told; one that questions of both sides show may not.
        total: number of all pictures that are judged on.
    """
    again = sorted((name, learned[digest]) for digest, name in judged if digest in learned)
    if not again:
        return []
    name, other = again[0]
    return [
        f"{len(again)} of the {counted(total, 'picture')} that are judged on {_are(again)}, by the pixels, among "
        f"those that are learned from or tuned on, such as {name}, which is {other}: figures on them are too high"
    ]


def picture_name(row: Row) -> str:
    """Return what a person calls the picture of a row."""
    return row.image if row.question is None else row.source


def lesion_keys(table: str, row: Row) -> tuple[LesionKey, LesionKey]:
    """Return what a row's lesion is known by in its table, and at its site; rows that share one show one lesion."""
    return ("table", table, row.lesion), ("site", row.site, row.lesion)


def _are(found: Sized) -> str:
    return "is" if len(found) == 1 else "are"

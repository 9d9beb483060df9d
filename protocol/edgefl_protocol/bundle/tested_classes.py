"""Which classes of a model hardly any test picture showed, so that nobody knows how well it names them.

A card or a run tells of how many lesions each class was judged on (`recall_lesions`). One from before that tells of
which classes the recall has an interval: there is none below ten lesions either (docs/methods.md 8.4), nor where all
answers are right or all are wrong.
"""

from collections.abc import Mapping
from typing import Final

# Lesions of a class, below which a figure of it says too little. Of nine cancers all named as such, up to one in
# three may still be missed (Clopper and Pearson's 95 % interval ends at 34 %).
FEW_LESIONS: Final = 10


def untested_classes(figures: Mapping[str, object], classes: int) -> tuple[bool, ...] | None:
    """Tell for each class, in order, whether it was hardly tested; None where a site's figures do not say."""
    lesions, intervals = (_of_each(figures.get(name), classes) for name in ("recall_lesions", "recall_interval"))
    if lesions is not None:
        return tuple(type(count) is not int or count < FEW_LESIONS for count in lesions)
    return None if intervals is None else tuple(one is None for one in intervals)


def _of_each(found: object, classes: int) -> list[object] | None:
    return found if isinstance(found, list) and len(found) == classes else None

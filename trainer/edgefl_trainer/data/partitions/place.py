"""Rows of data at the sites and in the splits that a partition gives them.

Guarantee: the rows are those that were dealt, with the classes that they had then, or they are refused.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.partitions.partition import Partition
from edgefl_trainer.data.rows import Row
from edgefl_trainer.data.sited_rows import LEFT_OUT
from edgefl_trainer.data.tasks import class_name


def place_rows(rows: Sequence[Row], partition: Partition) -> list[Row]:
    """Give rows the sites and splits of a partition; tune rows are `train` here.

    Unlabelled images keep their site under `natural` and in `whole` sites; else they have none and can be spread. A
    `DataError` where the rows are not those that were dealt.
    """
    places = {
        image: (site, kind, class_name(label or ""))
        for site, kinds in partition.sites.items()
        for kind, entries in kinds.items()
        for image, label in entries
    }
    classes = tuple(map(class_name, partition.classes))  # a file that was made before may have another form of Unicode
    taken = unique_rows([row for row in rows if takes_part(row, partition.plan.scheme, classes)])
    missing = len(places.keys() - {row.image for row in taken})
    if missing:
        raise DataError(
            f"{missing} of {len(places)} images of the partition are not in the data: name the data that it was "
            "made from."
        )

    def placed(row: Row) -> Row:
        if row.split == "unlabelled":
            natural = partition.plan.scheme == "natural" or row.site in (partition.plan.whole or ())
            stays = natural and row.site in partition.sites
            return row if stays else replace(row, site=None)
        if not takes_part(row, partition.plan.scheme, classes):
            return replace(row, site=None, split=LEFT_OUT)
        site, kind, label = places.get(row.image, ("", "", None))
        if label != row.label:
            found = "is not in the partition" if label is None else f"has the class {label} in the partition"
            raise DataError(
                f"Image {row.image!r} ({row.label}) {found}: name the data that the partition was made from."
            )
        return replace(row, site=site, split="train" if kind == "tune" else kind)

    return [placed(row) for row in rows]


def takes_part(row: Row, scheme: str, classes: Sequence[str]) -> bool:
    """Tell whether a row is dealt: it has a label, and a site where the scheme starts from the data's sites."""
    sited = row.site is not None or scheme not in ("natural", "domain")
    return sited and row.split in ("train", "val", "test") and row.label in classes


def unique_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows; a `DataError` where an image is there twice."""
    names = Counter(row.image for row in rows)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise DataError(f"Image {twice!r} is in two of the data sources; a partition needs each name once.")
    return list(rows)

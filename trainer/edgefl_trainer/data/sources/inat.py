"""`inat:DIR[,split=user_120k][,min_train=16][,seed=0]`: iNaturalist 2017, shared out by the users who photographed.

`federated_train_user_120k.csv` (columns user_id, image_id, class, label) lies anywhere below DIR, beside the unpacked
pictures `train_val_images/GROUP/SPECIES/IMAGE_ID.jpg`. A user is a site; a fifth of each site's images, drawn by the
SPEC's own `seed`, are its test rows (the run's seed moves no test row anywhere); a site that keeps fewer than
`min_train` training images is dropped, as PEP-FedPT does (docs/methods.md 5). The class is the number in the split
file, as four digits. The central `test.csv` names no user and is not read. The files by place (`split=geo_1k`,
`federated_train_geo_1k.csv`) have the same columns.
Source: Hsu, Qi and Brown, "Federated Visual Classification with Real-World Data Distribution", ECCV 2020, and the
README of their split files; Van Horn et al., "The iNaturalist Species Classification and Detection Dataset", CVPR 2018.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from edgefl_trainer.data.dealing import choose_share
from edgefl_trainer.data.errors import DataError, SpecError
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.sources.files import file_pixels
from edgefl_trainer.data.sources.store import open_store, pictures_by_name
from edgefl_trainer.data.sources.tables import TableFile, read_table

CLASSES = 1203  # species of the split files, numbered from 0
TEST_SHARE = 0.2
OPTIONS = {"split": "user_120k", "min_train": "16", "seed": "0"}

_IMAGES = "train_val_images"
_COLUMNS = ("user_id", "image_id", "class", "label")
_NUMBER = re.compile(r"[0-9]{1,4}")
_SPLIT_NAME = re.compile(r"(user|geo)_[0-9]{1,6}k?")


def read_inat(path: Path, options: Mapping[str, str]) -> SourceRows:
    """Read one federated split file and the pictures it names, both at any depth of a folder (or zip).

    Rows are those of the sites that are large enough, in the order of the file.

    Args:
        options: `split`, the end of the file's name; `min_train`, the fewest training images a site must keep; `seed`
            of the test rows.

    Raises:
        DataError: The file or a picture is missing, a line is damaged, or no site is large enough.
    """
    split, least, seed = options["split"], options["min_train"], options["seed"]
    if not _SPLIT_NAME.fullmatch(split):
        raise SpecError(
            f"split={split} is not known for inat:; give the name of an official split, such as user_120k or geo_1k."
        )
    if not _NUMBER.fullmatch(least) or int(least) < 1:
        raise SpecError(f"min_train={least} is not allowed for inat:; give a whole number from 1 to 9999.")
    if not _NUMBER.fullmatch(seed):
        raise SpecError(f"seed={seed} is not allowed for inat:; give a whole number from 0 to 9999.")
    store = open_store(path)
    names = store.names()
    wanted = f"federated_train_{split}.csv"
    file = next((name for name in names if PurePosixPath(name).name == wanted), None)
    if file is None:
        raise DataError(f"{store.name} has no {wanted}; unpack the official split files there.")
    find_picture = pictures_by_name(store, lambda name: PurePosixPath(name).stem, _IMAGES)
    table = read_table(store, file, _COLUMNS)
    kind = split.partition("_")[0]
    rows = _deal([_row(record, line, table, kind) for line, record in table.records], int(seed))
    rows = _large_enough(rows, int(least), table.where)
    rows = [_located(row, find_picture, table.where, store.name) for row in rows]
    return SourceRows(f"inat:{path}", tuple(rows), file_pixels(store, rows))


def _row(record: Mapping[str, str], line: int, table: TableFile, kind: str) -> Row:
    where = f"{table.where} line {line}"
    user, image, number = record["user_id"], record["image_id"], record["class"]
    if not user or not image:
        raise DataError(f"{where} lacks its {'image_id' if user else 'user_id'}.")
    if not _NUMBER.fullmatch(number) or int(number) >= CLASSES:
        raise DataError(f"{where} ({image}) has the class {number!r}; allowed: 0 to {CLASSES - 1}.")
    return Row(
        image=image,
        source="",
        label=f"{int(number):04d}",
        site=f"{kind}-{user}",
        lesion=f"image:{image}",
        split="train",
        extra=(("label", record["label"]),),
    )


def _deal(rows: Sequence[Row], seed: int) -> list[Row]:
    """Draw the test rows of each site evenly, whatever their class: most users have one image of most species."""
    images: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        images[row.site or ""].append(row.lesion)
    test = {
        lesion
        for site, lesions in images.items()
        for lesion in choose_share(dict.fromkeys(lesions, ""), TEST_SHARE, f"inat:{site}", seed)
    }
    return [replace(row, split="test") if row.lesion in test else row for row in rows]


def _large_enough(rows: Sequence[Row], least: int, where: str) -> list[Row]:
    training: dict[str | None, int] = defaultdict(int)
    for row in rows:
        training[row.site] += row.split == "train"
    most = max(training.values(), default=0)
    if most < least:
        raise DataError(
            f"No site of {where} has {least} training images, and the largest has {most}; lower min_train={least}."
        )
    return [row for row in rows if training[row.site] >= least]


def _located(row: Row, find_picture: Callable[[str], str | None], where: str, store: str) -> Row:
    found = find_picture(row.image)
    if found is None:
        raise DataError(f"{where} names the image {row.image}, but {store} holds no {row.image}.jpg.")
    species = PurePosixPath(found).parent.name
    return replace(row, source=found, extra=(*row.extra, ("species", species)))

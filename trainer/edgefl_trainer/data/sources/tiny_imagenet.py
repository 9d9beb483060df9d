"""`tiny-imagenet:DIR`: Tiny-ImageNet, `tiny-imagenet-200.zip` packed or unpacked.

Training images are those that `train/WNID/WNID_boxes.txt` lists, so that a missing picture is noticed. The labelled
`val/` set, listed in `val/val_annotations.txt`, is the test set, as usual: the labels of the official `test/` were
never published, and its images are not read. A class is named by its WordNet number. The set has no sites.
Source: Le and Yang, "Tiny ImageNet Visual Recognition Challenge", CS 231N, 2015; docs/reference/data.md.
"""

from pathlib import Path

from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import Row, SourceRows
from edgefl_trainer.data.sources.files import file_pixels
from edgefl_trainer.data.sources.store import FileStore, check_relative, open_store
from edgefl_trainer.data.sources.tables import read_lines

_FOLDERS = ("", "tiny-imagenet-200/")
_BOX = 4  # corner numbers after the names; not used


def read_tiny_imagenet(path: Path) -> SourceRows:
    """Read training images class by class in the order of `wnids.txt`, then the test images.

    Args:
        path: The folder or zip with `wnids.txt`, `train/` and `val/`; or one that holds `tiny-imagenet-200/`.

    Raises:
        DataError: A list or picture is missing, a line is damaged, or a class is not in `wnids.txt`.
    """
    store = open_store(path)
    folder = next((folder for folder in _FOLDERS if store.has(f"{folder}wnids.txt")), None)
    if folder is None:
        raise DataError(f"{store.name} has no wnids.txt; name tiny-imagenet-200.zip or the folder unpacked from it.")
    classes = [line for _, line in read_lines(store, f"{folder}wnids.txt").lines]
    rows = [row for name in classes for row in _train_rows(store, folder, name)]
    rows += _test_rows(store, folder, frozenset(classes))
    return SourceRows(f"tiny-imagenet:{path}", tuple(rows), file_pixels(store, rows))


def _train_rows(store: FileStore, folder: str, label: str) -> list[Row]:
    check_relative(label, f"{folder}wnids.txt in {store.name}")
    found = read_lines(store, f"{folder}train/{label}/{label}_boxes.txt")
    rows = []
    for number, line in found.lines:
        name, *box = line.split("\t")
        if len(box) != _BOX:
            raise DataError(
                f"{found.where} line {number} has {len(box) + 1} fields; it must have five: a file name and a box."
            )
        rows.append(_row(name, f"{folder}train/{label}/images/{name}", label, "train"))
    return rows


def _test_rows(store: FileStore, folder: str, classes: frozenset[str]) -> list[Row]:
    found = read_lines(store, f"{folder}val/val_annotations.txt")
    rows = []
    for number, line in found.lines:
        name, *rest = line.split("\t")
        if len(rest) != 1 + _BOX:
            raise DataError(
                f"{found.where} line {number} has {len(rest) + 1} fields; it must have six: a file name, a class "
                "and a box."
            )
        if rest[0] not in classes:
            raise DataError(f"{found.where} line {number} has the class {rest[0]!r}, which wnids.txt does not list.")
        rows.append(_row(name, f"{folder}val/images/{name}", rest[0], "test"))
    return rows


def _row(name: str, source: str, label: str, split: str) -> Row:
    return Row(image=name, source=source, label=label, site=None, lesion=f"image:{name}", split=split)

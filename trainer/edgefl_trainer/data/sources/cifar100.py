"""`cifar100:DIR`: CIFAR-100 in its binary form, `cifar-100-binary.tar.gz` unpacked.

A record is 3,074 bytes: coarse label, fine label, 1,024 red, 1,024 green and 1,024 blue values of 32 x 32 pixels, row
by row. The label of an image is its fine class. The set has no sites. The Python form is a pickle, which can run code
when it is opened, and is never read. A file that was cut off between two records is found because every class has
equally many images in the official files.
Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and the set's page;
docs/reference/data.md.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.imaging import Fit, resize
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import Pixels, Row, SourceRows
from edgefl_trainer.data.sources.store import FileStore, open_store
from edgefl_trainer.data.sources.tables import read_lines

Records = NDArray[np.uint8]  # (n, RECORD_BYTES)

ARCHIVE = "cifar-100-binary.tar.gz"
SIDE_PX = 32
RECORD_BYTES = 2 + 3 * SIDE_PX * SIDE_PX
FINE = 100
COARSE = 20

_SPLITS = {"train": "train.bin", "test": "test.bin"}
_FOLDERS = ("", "cifar-100-binary/")
_PICKLES = ("train", "meta", "cifar-100-python/train", "cifar-100-python.tar.gz")
_MAX_BYTES = 60_000 * RECORD_BYTES  # of one file; the larger of the two holds 50,000 records


@dataclass(frozen=True, slots=True, eq=False)
class RecordPixels:
    """Pictures that are records of a few files; a row's source is `FILE/NUMBER`, counted from 0."""

    files: Mapping[str, Records]  # file name → its records, uint8 (n, 3074)
    identity: str  # digest of the files behind the rows
    has_masks: bool = False

    def load(self, rows: Sequence[Row], image_px: int, fit: Fit) -> Iterator[tuple[Pixels, None]]:
        """Yield the pictures of `rows` in order, uint8 (px, px, 3), and no mask (see `PixelSource.load`)."""
        for row in rows:
            file, _, number = row.source.rpartition("/")
            planes = self.files[file][int(number), 2:].reshape(3, SIDE_PX, SIDE_PX)
            image = np.ascontiguousarray(planes.transpose(1, 2, 0))
            yield (image if image_px == SIDE_PX else resize(image, image_px, fit)), None

    def likeness(self, rows: Sequence[Row], most_px: int) -> TaughtPictures | None:
        """See `PixelSource.likeness`."""
        return TaughtPictures(side=SIDE_PX) if most_px >= SIDE_PX else None

    def made_like(self, taught: TaughtPictures) -> "RecordPixels":
        """See `PixelSource.made_like`; records are smaller than any picture that a network read."""
        return self


def read_cifar100(path: Path) -> SourceRows:
    """Read one row for each record of the binary form, training records first.

    Args:
        path: The folder (or a zip of it) with `train.bin`, `test.bin`, `fine_label_names.txt` and
            `coarse_label_names.txt`; or the folder above it.

    Raises:
        DataError: A file is missing, is the Python form, is cut off, or holds a class that its list of names lacks.
    """
    if path.is_file() and path.name.endswith(".tar.gz"):
        raise DataError(f"{path} is packed; unpack {ARCHIVE} and name the folder that holds train.bin.")
    store = open_store(path)
    folder = _folder(store)
    fine = _names(store, f"{folder}fine_label_names.txt", FINE)
    coarse = _names(store, f"{folder}coarse_label_names.txt", COARSE)
    files = {f"{folder}{name}": _records(store, f"{folder}{name}", fine) for name in _SPLITS.values()}
    rows = tuple(
        _row(split, f"{folder}{name}", number, fine[record[1]], coarse[record[0]])
        for split, name in _SPLITS.items()
        for number, record in enumerate(files[f"{folder}{name}"][:, :2].tolist())
    )
    return SourceRows(f"cifar100:{path}", rows, RecordPixels(files, store.identity(list(files))))


def _folder(store: FileStore) -> str:
    for folder in _FOLDERS:
        if store.has(f"{folder}train.bin"):
            return folder
    if any(store.has(name) for name in _PICKLES):
        raise DataError(
            f"{store.name} holds CIFAR-100 in its Python form, a pickle, which can run code when it is opened; "
            f"unpack the binary form, {ARCHIVE}, instead."
        )
    raise DataError(f"{store.name} has no train.bin; unpack {ARCHIVE} there.")


def _names(store: FileStore, file: str, count: int) -> tuple[str, ...]:
    found = read_lines(store, file)
    names = tuple(line for _, line in found.lines)
    if len(names) != count or len(set(names)) != count:
        raise DataError(
            f"{found.where} has {len(set(names))} different class names; the official file has {count}, one on each "
            "line."
        )
    return names


def _records(store: FileStore, file: str, fine: Sequence[str]) -> Records:
    data = store.read(file, _MAX_BYTES)
    where = f"{file} in {store.name}"
    if not data or len(data) % RECORD_BYTES:
        raise DataError(
            f"{where} has {len(data):,} bytes, which is not a whole number of records of {RECORD_BYTES:,} bytes; "
            f"unpack {ARCHIVE} again."
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    for column, kind, count in ((0, "coarse", COARSE), (1, "fine", FINE)):
        wrong = np.flatnonzero(records[:, column] >= count)
        if len(wrong):
            raise DataError(
                f"{where} record {wrong[0]} has the {kind} class {records[wrong[0], column]}; allowed: 0 to "
                f"{count - 1}."
            )
    images = np.bincount(records[:, 1], minlength=FINE)
    if images.min() != images.max():
        few, many = fine[int(images.argmin())], fine[int(images.argmax())]
        raise DataError(
            f"{where} holds {images.min()} images of {few} but {images.max()} of {many}; the official file has "
            f"equally many of each class, so a part of this one is missing: unpack {ARCHIVE} again."
        )
    return records


def _row(split: str, file: str, number: int, label: str, superclass: str) -> Row:
    name = f"{split}-{number:05d}"
    return Row(
        image=name,
        source=f"{file}/{number}",
        label=label,
        site=None,
        lesion=f"image:{name}",
        split=split,
        extra=(("superclass", superclass),),
    )

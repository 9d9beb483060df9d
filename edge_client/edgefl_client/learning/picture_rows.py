"""The owner's pictures as learning sees them: the table or folder that names them, and what was read.

    read_labels, read_images    a CSV → one `LabelledImage` a row
    read_rows                   their files → `PreparedRows`: small squares in memory, a class and a lesion for each

Of a lesion only a hash of its name is kept, or of the prepared pixels where the table names no lesion. Rows of one
lesion, and rows of the same pixels, make one group, also through others (`joined`): so copies of one picture count as
one, whether the table names their lesion or not.
"""

import csv
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgefl_client.scoring.pictures import DEFAULT_FORMATS, PictureReader
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, REDUCE
from edgefl_protocol.pictures.light import Light
from edgefl_protocol.pictures.preprocess import Preprocess, prepare
from edgefl_protocol.pictures.quality import MOST_UNLIT, measure_quality
from edgefl_protocol.sentences import counted, of_file

MAX_LABELS_BYTES = 16 * 2**20
MAX_ROWS = 100_000
UNLABELLED = -1


class LabelsError(EdgeflError):
    """The table of labels cannot be used."""

    code = "bad_labels"


@dataclass(frozen=True, kw_only=True)
class LabelledImage:
    """A picture of the owner with the class that the table gives it."""

    path: Path
    label: int  # index of its class, or `UNLABELLED`
    lesion: str | None = None  # what the column `lesion_id` calls the lesion, or None


def read_labels(path: Path, classes: Sequence[str]) -> list[LabelledImage]:
    """Read a CSV with the columns `image` and `label`, and `lesion_id` where it is there; others are ignored.

    Args:
        path: the table; relative pictures are looked up beside it.
        classes: names of the classes, in index order.

    Raises:
        LabelsError: a column is missing, a label is no class of the model, or the table is empty or no text.
    """
    rows = _rows(path, {"image", "label"})
    index = {name: position for position, name in enumerate(classes)}
    found = []
    for number, row in enumerate(rows, start=2):
        image, label = _image(path, number, row), row["label"]
        if label not in index:
            raise LabelsError(
                f"{path}, line {number}: the label {str(label)[:60]!r} is not a class of this model; its classes "
                f"are {', '.join(classes)}",
                code="unknown_class",
            )
        lesion = row.get("lesion_id") or None
        found.append(LabelledImage(path=image, label=index[label], lesion=lesion))
    return found


def read_images(path: Path) -> list[LabelledImage]:
    """Read the column `image` of a CSV, for learning that looks at no label."""
    rows = _rows(path, {"image"})
    return [LabelledImage(path=_image(path, number, row), label=UNLABELLED) for number, row in enumerate(rows, start=2)]


def _rows(path: Path, columns: set[str]) -> list[dict[str, str]]:
    try:
        text = read_bounded(path, MAX_LABELS_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows, head = list(reader), reader.fieldnames
    except (UnicodeDecodeError, csv.Error) as error:
        named = f"columns {' and '.join(sorted(columns))}" if len(columns) > 1 else f"column {min(columns)}"
        raise LabelsError(f"{path} is not a CSV file in UTF-8; save it as one, with the {named}") from error
    missing = columns - set(columns if head is None else head)  # an empty file has no first line
    if missing:
        raise LabelsError(f"the first line of {path} has no column {' and no column '.join(sorted(missing))}; add it")
    if not rows or len(rows) > MAX_ROWS:
        raise LabelsError(f"{path} has {counted(len(rows), 'row')} of data; allowed: 1 to {MAX_ROWS}")
    return rows


def _image(path: Path, number: int, row: Mapping[str, str]) -> Path:
    if not row["image"]:
        raise LabelsError(f"{path}, line {number}: no image is named; fill it in or remove the line")
    return path.parent / row["image"]


@dataclass(frozen=True)
class PreparedRows:
    """Hold prepared pictures with their classes."""

    images: NDArray[np.uint8]  # (n, S, S, 3)
    labels: NDArray[np.int64]  # class index of each, -1 for none, (n,)
    groups: tuple[str, ...]  # 64 hex digits that all pictures of one lesion, and all copies of one, share, (n,)
    # positions of those that the picture gate refers: they teach, but nothing of them is shared
    unfit: frozenset[int] = frozenset()
    lights: tuple[Light, ...] = ()  # of the photographs, (n,)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: NDArray[np.bool_]) -> "PreparedRows":
        """Keep the rows where `chosen` (n,) holds, in order."""
        kept = np.flatnonzero(chosen).tolist()
        groups = tuple(self.groups[index] for index in kept)
        unfit = frozenset(position for position, index in enumerate(kept) if index in self.unfit)
        lights = tuple(self.lights[index] for index in kept) if self.lights else ()
        return PreparedRows(self.images[chosen], self.labels[chosen], groups, unfit, lights)

    @property
    def different(self) -> int:
        """Count the groups: pictures of one lesion, and copies of one picture, count once."""
        return len(set(self.groups))

    def digest(self) -> str:
        """Compute SHA-256 over pixels and classes in order: the same table gives the same."""
        whole = hashlib.sha256(self.labels.astype("<i8").tobytes())
        for image in self.images:
            whole.update(np.ascontiguousarray(image).data)
        return whole.hexdigest()


def read_rows(
    table: Sequence[LabelledImage],
    preprocess: Preprocess,
    formats: Sequence[str] = DEFAULT_FORMATS,
    report: Callable[[int], None] = lambda done: None,
    refused: Callable[[EdgeflError], None] | None = None,
    unlit_above: float = MOST_UNLIT,
) -> PreparedRows:
    """Decode and prepare pictures; they stay in memory as small squares.

    Args:
        report: called with the number of pictures read so far.
        refused: told of each picture that cannot be used, which is left out; None raises for the first of them.
        unlit_above: of the model's rules, see `Quality.reasons`.

    Raises:
        ImageError: a picture cannot be used; the sentence names its file.
    """
    side = preprocess.size
    images = np.empty((len(table), side, side, 3), np.uint8)
    labels, keys, pixels, lights = list[int](), list[str](), list[str](), list[Light]()
    unfit = set[int]()
    with PictureReader(formats) as reader:
        for done, row in enumerate(table, start=1):
            index = len(labels)
            try:
                photo = reader.decode(read_bounded(row.path, MAX_FILE_BYTES, REDUCE))
                images[index] = prepare(photo.pixels, preprocess)
            except EdgeflError as error:
                named = type(error)(of_file(row.path, error), error.code)
                if refused is None:
                    raise named from error
                refused(named)
                continue
            pixels.append(hashlib.sha256(images[index].tobytes()).hexdigest())
            keys.append(hashlib.sha256(row.lesion.encode()).hexdigest() if row.lesion else pixels[-1])
            labels.append(row.label)
            quality = measure_quality(photo.pixels, preprocess.colour)
            lights.append(quality.light)
            if quality.reasons(preprocess.least_px, unlit_above, photo.white):
                unfit.add(index)
            report(done)
    found = np.array(labels, np.int64)
    return PreparedRows(images[: len(labels)], found, joined(keys, pixels), frozenset(unfit), tuple(lights))


def joined(keys: Sequence[str], pixels: Sequence[str]) -> tuple[str, ...]:
    """Give each row the highest key of its group: rows with equal keys or pixels stand in one, also through others.

    Args:
        keys: of each row's lesion, or of its pixels where no lesion is named, (n,).
        pixels: hash of each row's picture, (n,).

    Returns:
        (n,). Where no picture stands under two keys these are the keys. A further row never lowers its group's.
    """
    above, first = {key: key for key in keys}, dict[str, str]()

    def highest(key: str) -> str:
        while above[key] != key:
            above[key] = key = above[above[key]]
        return key

    for key, picture in zip(keys, pixels, strict=True):
        low, high = sorted((highest(key), highest(first.setdefault(picture, key))))
        above[low] = high
    return tuple(highest(key) for key in keys)


def fit_rows(rows: PreparedRows) -> PreparedRows:
    """Keep the rows that the picture gate does not refer, in order."""
    return rows.take(np.array([index not in rows.unfit for index in range(len(rows))], np.bool_))

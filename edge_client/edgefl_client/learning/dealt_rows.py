"""The owner's pictures: prepared for the network, and dealt into those that teach and those that judge.

Of each class 15 %, at least 20, are held back for the gate. Who is held back is decided by the SHA-256 of the lesion's
name, or of the prepared pixels where the table names no lesion: all pictures of a lesion, and all copies of a picture,
stand on one side, and a picture keeps its side when others are added later, because the limit of each class is kept.
Pictures without labels all teach, but for those that the gate before the model refers: nobody has said what they show.
Source: docs/design.md, section 7 (gate: at least 20 a class) and section 5 (rows).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.label_table import LabelledImage
from edgefl_client.scoring.pictures import DEFAULT_FORMATS, PictureReader
from edgefl_client.scoring.verdict import LEAST_HELD
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.imaging import MAX_FILE_BYTES, Preprocess, prepare
from edgefl_protocol.pictures.quality import measure_quality

HELD_SHARE = 0.15
LEAST_LEARNED = 5  # of each class: as many maps as a class shares


@dataclass(frozen=True)
class Rows:
    """Prepared pictures with their classes.

    Attributes:
        images: (n, S, S, 3).
        labels: class index of each, -1 for none, (n,).
        groups: 64 hex digits that all pictures of one lesion share, (n,).
        unfit: positions of those that the gate before the model refers: they teach, but nothing of them is shared.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    groups: tuple[str, ...]
    unfit: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: NDArray[np.bool_]) -> "Rows":
        """The rows where `chosen` (n,) holds, in order."""
        kept = np.flatnonzero(chosen).tolist()
        groups = tuple(self.groups[index] for index in kept)
        unfit = frozenset(position for position, index in enumerate(kept) if index in self.unfit)
        return Rows(self.images[chosen], self.labels[chosen], groups, unfit)

    @property
    def different(self) -> int:
        """Number of groups: pictures of one lesion, or copies of one picture, count once."""
        return len(set(self.groups))

    def digest(self) -> str:
        """SHA-256 over pixels and classes in order: the same table gives the same."""
        whole = hashlib.sha256(self.labels.astype("<i8").tobytes())
        for image in self.images:
            whole.update(np.ascontiguousarray(image).data)
        return whole.hexdigest()


@dataclass(frozen=True)
class Dealt:
    """The owner's pictures in two parts; no lesion stands in both.

    Attributes:
        learn: those that teach.
        held: those that judge; none for a method that learns without labels.
        refused: how many more there are, which take no part at all.
    """

    learn: Rows
    held: Rows
    refused: int = 0

    @property
    def left_out(self) -> int:
        """Pictures of which nothing is shared."""
        return self.refused + len(self.learn.unfit)


def read_rows(
    table: Sequence[LabelledImage],
    preprocess: Preprocess,
    formats: Sequence[str] = DEFAULT_FORMATS,
    report: Callable[[int], None] = lambda done: None,
    refused: Callable[[EdgeflError], None] | None = None,
) -> Rows:
    """Decode and prepare pictures; they stay in memory as small squares.

    Args:
        table: what `read_labels` or `read_images` gave.
        preprocess: the bundle's.
        formats: kinds of files that are read (`pictures.FORMATS`).
        report: called with the number of pictures read so far.
        refused: told of each picture that cannot be used, which is left out; None for those that somebody named one
            by one.

    Raises:
        ImageError: a picture cannot be used; the sentence names its file.
        StorageError: a file cannot be read.
    """
    side = preprocess.size
    images = np.empty((len(table), side, side, 3), np.uint8)
    labels, groups, unfit = list[int](), list[str](), set[int]()
    with PictureReader(formats) as reader:
        for done, row in enumerate(table, start=1):
            index = len(labels)
            try:
                photo = reader.read(read_bounded(row.path, MAX_FILE_BYTES))
                images[index] = prepare(photo, preprocess)
            except EdgeflError as error:
                named = type(error)(f"{row.path}: {error}", error.code)
                if refused is None:
                    raise named from error
                refused(named)
                continue
            lesion = row.lesion.encode() if row.lesion else images[index].tobytes()
            groups.append(hashlib.sha256(lesion).hexdigest())
            labels.append(row.label)
            if measure_quality(photo).reasons(side):
                unfit.add(index)
            report(done)
    return Rows(images[: len(labels)], np.array(labels, np.int64), tuple(groups), frozenset(unfit))


def fit_rows(rows: Rows) -> Rows:
    """The rows that the gate before the model does not refer, in order."""
    return rows.take(np.array([index not in rows.unfit for index in range(len(rows))], np.bool_))


def hold_back(
    rows: Rows, classes: Sequence[str], limits: Mapping[str, str]
) -> tuple[NDArray[np.bool_], dict[str, str]]:
    """Deal the rows.

    Args:
        rows: all labelled pictures.
        classes: names, in index order.
        limits: class name to the highest group held back, from an earlier deal; empty at first.

    Returns:
        Which rows are held back, (n,), and the limits to keep.

    Raises:
        LearningError: fewer than two classes, or a class with too few pictures for both sides (`few_images`).
    """
    found = np.unique(rows.labels)
    if len(found) < 2:
        raise LearningError(
            f"the table shows one class, {classes[found[0]]}; learning to tell classes apart needs two", "few_images"
        )
    held, kept = np.zeros(len(rows), dtype=np.bool_), dict(limits)
    for label in found:
        members = np.flatnonzero(rows.labels == label)
        groups = sorted(rows.groups[index] for index in members)
        name = classes[label]
        wanted = max(LEAST_HELD, round(HELD_SHARE * len(members)))
        limit = kept.setdefault(name, groups[min(wanted, len(groups)) - 1])
        held[members] = [rows.groups[index] <= limit for index in members]
        judging = int(held[members].sum())
        if judging < LEAST_HELD or len(members) - judging < LEAST_LEARNED:
            raise LearningError(
                f"the class {name} has {judging} pictures to judge with and {len(members) - judging} to learn from; "
                f"needed are {LEAST_HELD} and {LEAST_LEARNED} of different lesions: label more of it, or leave "
                "the class out",
                "few_images",
            )
    return held, kept


def skewed_prior(labels: NDArray[np.int64], classes: int, floor: float, *, balanced: bool) -> NDArray[np.float32]:
    """Dirichlet prior W of the class frequencies that learning shows (docs/methods.md, prior).

    W_k = K/(K−1)·(1 − N_k/N), raised to `floor`, then rescaled to sum K.

    Args:
        labels: of the rows that teach, (n,).
        classes: K.
        floor: smallest value before rescaling.
        balanced: the classes are drawn equally often, so each that has a row counts alike.
    """
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    shown = (counts > 0).astype(np.float64) if balanced else counts
    prior = np.maximum(classes / (classes - 1) * (1 - shown / shown.sum()), floor)
    rescaled: NDArray[np.float32] = (prior * (classes / prior.sum())).astype(np.float32)
    return rescaled

"""What every data SPEC turns into: rows, and a way to get their pixels.

Guarantees: a row is plain values; its split is one of `SPLITS`; a run takes no table
that names an image twice.
Source: docs/design.md 5 (Data SPECs, Rows).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.pictures.imaging import Fit
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.errors import DataError

Pixels = NDArray[np.uint8]  # (px, px, 3) image or (px, px) mask, 0..255

UNDEALT = ""
"""Split of a row whose source names none: `dealing.deal_test` gives it `train` or `test`."""

SIDES = ("train", "val", "test")
"""Splits of rows with a label; `val` and `test` only report."""

SPLITS = (*SIDES, "unlabelled", UNDEALT)


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks about its picture."""

    text: str  # as asked
    closed: bool  # whether the data calls it closed: the answers to choose from are in the question
    kind: str  # what it asks for, as annotated


@dataclass(frozen=True, slots=True)
class Row:
    """One image of a data source, or one question about an image: then its lesion is the image."""

    image: str  # name, unique inside its table
    source: str  # where its pixels lie inside the table's pixel source (a path relative to the folder or zip)
    label: str | None  # class name or answer, or None
    site: str | None  # federation site, or None for an image of no site
    lesion: str  # images of one lesion share this and never stand in two splits
    split: str  # `train`, `val`, `test`, `unlabelled`, or empty where the source names none
    extra: tuple[tuple[str, str], ...] = ()  # further columns, as read
    question: Question | None = None

    @property
    def stratum(self) -> str:
        """What a choice of rows is even in: the class. The questions of an image have many answers, so nothing."""
        return str(self.label) if self.question is None else ""


class PixelSource(Protocol):
    """Where the rows of one table take their pixels from."""

    @property
    def identity(self) -> str:
        """Digest of the pixels behind the rows: equal identity and rows mean equal pictures."""
        ...

    @property
    def has_masks(self) -> bool:
        """Whether `load` yields a lesion mask with each image."""
        ...

    def load(self, rows: Sequence[Row], image_px: int, fit: Fit) -> Iterator[tuple[Pixels, Pixels | None]]:
        """Yield, in the order of `rows`, image (px, px, 3) and, with masks, mask (px, px) 0 = skin, 255 = lesion."""
        ...

    def likeness(self, rows: Sequence[Row], most_px: int) -> TaughtPictures | None:
        """Tell what these pictures are like; None where one of them has more than `most_px` pixels in a direction."""
        ...

    def made_like(self, taught: TaughtPictures) -> Self:
        """Return a source that makes its pictures like the taught ones, as a device does; drawn ones stay."""
        ...


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of one SPEC and where their pixels come from."""

    name: str  # the SPEC without its suffixes, for messages
    rows: tuple[Row, ...]  # in the order of the source
    pixels: PixelSource = field(repr=False)  # where the pixels come from
    warnings: tuple[str, ...] = ()  # sentences: what was taken otherwise than a person may think
    refused: tuple[str, ...] = ()  # sentences: why a run refuses these rows, which can be counted all the same

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(f"{self.name} holds no rows; a federation needs at least one image.")
        seen: set[str] = set()
        for row in self.rows:
            if row.image in seen and not self.refused:
                raise DataError(f"{self.name} names image {row.image!r} twice; image names must be unique.")
            seen.add(row.image)

    @property
    def asks(self) -> bool:
        """Whether its rows are questions."""
        return self.rows[0].question is not None

    def each_picture(self) -> list[Row]:
        """Return the first row that shows each picture."""
        first: dict[str, Row] = {}
        for row in self.rows:
            first.setdefault(row.source, row)
        return list(first.values())

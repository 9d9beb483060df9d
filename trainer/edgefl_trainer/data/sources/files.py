"""Pixels of rows whose images are files: decoded once, by the one image path of the project.

Guarantees: every picture goes through `edgefl_protocol.pictures.imaging`; a picture that has the wanted size already is
not resampled; an unreadable picture is named with its file and its image. Source: docs/design.md 2 ("One image path").
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import Fit, decode, resize
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import Pixels, Row
from edgefl_trainer.data.sources.store import FileStore

_BATCH = 256  # rows whose bytes are in memory at once
MOST_NAMED = 20  # missing files in one sentence
_THREADS = 4  # Pillow decodes outside the interpreter lock


@dataclass(frozen=True, slots=True)
class FilePixels:
    """Pictures in a folder or zip."""

    store: FileStore  # the folder or zip
    identity: str  # digest of the files behind the rows
    has_masks: bool = False
    missing: tuple[str, ...] = ()  # files of the rows that are not there
    note: str = ""  # a sentence on why these names were looked for

    def check_present(self, rows: int) -> None:
        """Refuse, by a `DataError`, rows of which a file is missing."""
        if not self.missing:
            return
        told = f"{self.missing[0]} is not in {self.store.name}"
        if len(self.missing) > 1:
            more = ", …" if len(self.missing) > MOST_NAMED else ""
            rest = ", ".join(self.missing[1:MOST_NAMED]) + more
            told = f"{len(self.missing)} of {rows} pictures are missing: {told}, nor are {rest}"
        raise DataError(f"{told}; add what is missing, or remove it from the list." + f" {self.note}" * bool(self.note))

    def load(self, rows: Sequence[Row], image_px: int, fit: Fit) -> Iterator[tuple[Pixels, None]]:
        """Decode the pictures of `rows` in order, uint8 (px, px, 3), and no mask (see `PixelSource.load`).

        A `DataError` where a file is missing or its picture cannot be read.
        """
        read = partial(_read_picture, self.store, image_px, fit)
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(rows), _BATCH):
                for image in pool.map(read, rows[start : start + _BATCH]):
                    yield image, None


def file_pixels(store: FileStore, rows: Sequence[Row]) -> FilePixels:
    """Make the pixel source of rows whose `source` is a file name in `store`; a `DataError` where one is missing."""
    pixels = pixels_with_gaps(store, rows)
    pixels.check_present(len(rows))
    return pixels


def pixels_with_gaps(store: FileStore, rows: Sequence[Row], note: str = "") -> FilePixels:
    """Make the same and name the files that are missing; whoever reads them checks (`FilePixels.check_present`)."""
    missing = tuple(dict.fromkeys(row.source for row in rows if not store.has(row.source)))
    gone = set(missing)
    there = [row.source for row in rows if row.source not in gone]
    return FilePixels(store, store.identity(there), missing=missing, note=note)


def _read_picture(store: FileStore, image_px: int, fit: Fit, row: Row) -> Pixels:
    data = store.read(row.source)
    try:
        image = decode(data)
        if image.shape == (image_px, image_px, 3):
            return image
        return resize(image, image_px, fit)
    except ImageError as error:
        reason = str(error).rstrip(".")
        raise DataError(f"Image {row.image!r} ({row.source} in {store.name}) cannot be used: {reason}.") from error

"""Pixels of rows whose images are files: decoded once, by the one image path of the project.

Guarantees: every picture goes through `edgefl_protocol.pictures.imaging`; a picture that has the wanted size already is
not resampled; an unreadable picture is named with its file and its image. Source: docs/design.md 2 ("One image path").
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from edgefl_protocol.errors import ImageError
from edgefl_protocol.pictures.imaging import Fit, decode, open_photo, resize
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import Pixels, Row
from edgefl_trainer.data.sources.jpeg_quality import best_quality, jpeg_quality
from edgefl_trainer.data.sources.store import FileStore

_BATCH = 256  # rows whose bytes are in memory at once
MOST_NAMED = 10  # missing or broken files in one sentence
_THREADS = 4  # Pillow decodes outside the interpreter lock


@dataclass(frozen=True, slots=True)
class FilePixels:
    """Pictures in a folder or zip."""

    store: FileStore  # the folder or zip
    identity: str  # digest of the files behind the rows
    has_masks: bool = False
    missing: tuple[str, ...] = ()  # files of the rows that are not there
    note: str = ""  # a sentence on why these names were looked for
    taught: TaughtPictures | None = None  # what every picture is made like

    def check_present(self, rows: int) -> None:
        """Refuse, by a `DataError`, rows of which a file is missing."""
        if not self.missing:
            return
        told = f"{self.missing[0]} is not in {self.store.name}"
        if len(self.missing) > 1:
            rest = ", ".join(self.missing[1:MOST_NAMED]) + _more(len(self.missing))
            told = f"{len(self.missing)} of {rows} pictures are missing: {told}, nor are {rest}"
        raise DataError(f"{told}; add what is missing, or remove it from the list." + f" {self.note}" * bool(self.note))

    def load(self, rows: Sequence[Row], image_px: int, fit: Fit) -> Iterator[tuple[Pixels, None]]:
        """Decode the pictures of `rows` in order, uint8 (px, px, 3), and no mask (see `PixelSource.load`).

        A `DataError` at the end where files are missing or pictures cannot be read: all of them are looked at.
        """
        read, broken = partial(_read_picture, self.store, image_px, fit, self.taught), list[str]()
        with ThreadPoolExecutor(_THREADS) as pool:
            for start in range(0, len(rows), _BATCH):
                for image in pool.map(read, rows[start : start + _BATCH]):
                    if isinstance(image, str):
                        broken.append(image)
                    elif not broken:
                        yield image, None
        if len(broken) == 1:
            raise DataError(f"{broken[0]}.")
        if broken:
            named = "; ".join(broken[:MOST_NAMED]) + _more(len(broken))
            raise DataError(f"{len(broken)} of {len(rows)} pictures cannot be read: {named}.")

    def likeness(self, rows: Sequence[Row], most_px: int) -> TaughtPictures | None:
        """Look at the heads of the files; see `PixelSource.likeness`. None where one is broken: `load` names it."""
        side, qualities = 0, list[int | None]()
        for source in dict.fromkeys(row.source for row in rows):
            try:
                image = open_photo(self.store.read(source))
            except (DataError, ImageError):
                return None
            side = max(side, *image.size)
            if side > most_px:
                return None
            qualities.append(jpeg_quality(image))
        return TaughtPictures(side=side, jpeg_quality=best_quality(qualities))

    def made_like(self, taught: TaughtPictures) -> "FilePixels":
        """See `PixelSource.made_like`."""
        return replace(self, taught=taught, identity=f"{self.identity} {taught}")

    def check_others(self, rows: Sequence[Row]) -> None:
        """Refuse, by a `DataError`, pictures among those that are there which cannot be read; it decodes them all."""
        gone = set(self.missing)
        for _ in self.load([row for row in rows if row.source not in gone], 1, "squash"):
            pass


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


def _more(count: int) -> str:
    return f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""


def _read_picture(store: FileStore, image_px: int, fit: Fit, taught: TaughtPictures | None, row: Row) -> Pixels | str:
    """Decode one picture, or say in a sentence without its full stop why it cannot be read."""
    try:
        image = decode(store.read(row.source))
        if taught is not None:
            image = taught.made_like(image, fit)
        if image.shape == (image_px, image_px, 3):
            return image
        return resize(image, image_px, fit)
    except DataError as error:
        return str(error).rstrip(".")
    except ImageError as error:
        reason = str(error).rstrip(".")
        return f"Image {row.image!r} ({row.source} in {store.name}) cannot be used: {reason}"

"""Decoded pictures on disk, once: `<folder>/<key>/images.npy` (and `masks.npy`), memory-mapped.

Guarantees: a cache entry is complete or absent (it is filled under a temporary name, fsynced, then renamed); its key is
a digest of the pixel source, the rows' files, the size, the fit, the colour, and what decodes: the number of the image
path and Pillow's version. So a changed source, and an update that decodes otherwise, make a new entry. Two processes
that fill the same entry do not disturb each other. No entry is ever deleted here.
"""

import hashlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import PIL
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from edgefl_protocol.durable import flush_to_disk
from edgefl_protocol.pictures.imaging import PREPROCESSING, Colour, Fit, correct_colour
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import Pixels, SourceRows

_ABANDONED_S = 2 * 24 * 3600  # no picture set takes that long to write

Pairs = Iterator[tuple[Pixels, Pixels | None]]  # image, mask


@dataclass(frozen=True, slots=True)
class CachedPictures:
    """Memory-mapped pictures, read-only."""

    images: NDArray[np.uint8]  # uint8 (n, px, px, 3)
    masks: NDArray[np.uint8] | None  # uint8 (n, px, px), 0 = skin, 255 = lesion; None where the source knows none


def default_cache_dir() -> Path:
    """Return the cache folder: `EDGEFL_CACHE`, else `~/.cache/edgefl`."""
    named = os.environ.get("EDGEFL_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "edgefl"


def cached_pictures(
    tables: Sequence[SourceRows], image_px: int, fit: Fit, cache_dir: Path, colour: Colour = "none"
) -> CachedPictures:
    """Return the pictures of all rows of all tables, in order and memory-mapped, decoded at most once.

    Masks are kept only where every table knows masks. A `DataError` where a picture cannot be read, or the cache folder
    cannot be written.
    """
    parts = [_one_table(table, image_px, fit, cache_dir, colour) for table in tables]
    if len(parts) == 1:
        return _open(parts[0])
    key = hashlib.sha256("\0".join(part.name for part in parts).encode()).hexdigest()
    masked = all(table.pixels.has_masks for table in tables)

    def join() -> Pairs:
        for part in map(_open, parts):
            masks = part.masks if part.masks is not None else repeat(None)
            yield from zip(part.images, masks, strict=False)

    return _open(_entry(cache_dir, key, sum(len(table.rows) for table in tables), image_px, masked, join))


def _one_table(table: SourceRows, image_px: int, fit: Fit, cache_dir: Path, colour: Colour) -> Path:
    decoder = f"{PREPROCESSING}\0{PIL.__version__}"  # equal bytes are promised for one of each (`preprocess.prepare`)
    digest = hashlib.sha256(f"{decoder}\0{table.pixels.identity}\0{image_px}\0{fit}\0{colour}".encode())
    for row in table.rows:
        digest.update(f"\0{row.source}".encode())

    def load() -> Pairs:
        from rich.console import Console
        from rich.progress import track

        console = Console(file=sys.stderr)
        for image, mask in track(
            table.pixels.load(table.rows, image_px, fit),
            description=f"Reading {len(table.rows):,} images at {image_px} px",
            total=len(table.rows),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # a log would get an empty line
        ):
            yield correct_colour(image, colour), mask

    return _entry(cache_dir, digest.hexdigest(), len(table.rows), image_px, table.pixels.has_masks, load)


def _entry(cache_dir: Path, key: str, n: int, image_px: int, masked: bool, load: Callable[[], Pairs]) -> Path:
    """The folder of one cache entry, written when absent."""
    entry = cache_dir / key
    if (entry / "images.npy").is_file():
        return entry
    partial = cache_dir / f".{key[:16]}.{secrets.token_hex(6)}.tmp"
    try:
        partial.mkdir(parents=True)
        _clear_abandoned(cache_dir)
        _write(partial, n, image_px, masked, load())
        _publish(partial, entry)
    except OSError as error:
        raise DataError(
            f"The image cache {cache_dir} cannot be written ({error.strerror}); free space there, or name another "
            "folder with EDGEFL_CACHE."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entry


def _write(folder: Path, n: int, image_px: int, masked: bool, pairs: Pairs) -> None:
    """Write pictures one after the other: a full disk is an `OSError` here, in a writable memory map it kills."""
    with (folder / "images.npy").open("wb") as images, ExitStack() as stack:
        masks = stack.enter_context((folder / "masks.npy").open("wb")) if masked else None
        _write_header(images, (n, image_px, image_px, 3))
        if masks is not None:
            _write_header(masks, (n, image_px, image_px))
        for image, mask in pairs:
            images.write(image.tobytes())
            if masks is not None and mask is not None:
                masks.write(mask.tobytes())


def _write_header(stream: BinaryIO, shape: tuple[int, ...]) -> None:
    write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})


def _clear_abandoned(cache_dir: Path) -> None:
    """Remove what processes that were killed while writing left behind two days ago or earlier."""
    for path in cache_dir.glob(".*.tmp"):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _publish(partial: Path, entry: Path) -> None:
    """Rename a finished folder into place; another process may have been faster with the same content."""
    for path in partial.iterdir():
        flush_to_disk(path)
    flush_to_disk(partial)
    try:
        partial.rename(entry)
    except OSError:
        if not (entry / "images.npy").is_file():
            raise
    flush_to_disk(entry.parent)


def _open(entry: Path) -> CachedPictures:
    masks = entry / "masks.npy"
    try:
        images = np.load(entry / "images.npy", mmap_mode="r")
        return CachedPictures(images, np.load(masks, mmap_mode="r") if masks.is_file() else None)
    except (OSError, ValueError) as error:
        raise DataError(f"The image cache entry {entry} is damaged; remove it and run again.") from error

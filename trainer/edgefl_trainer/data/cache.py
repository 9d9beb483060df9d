"""Decoded pictures on disk, once: `<folder>/<key>/images.npy` (and `masks.npy`), memory-mapped.

Guarantees: a cache entry is complete or absent (it is filled under a temporary name, fsynced, then renamed); its key is
a digest of the pixel source, the rows' files, the size, the fit and the format of this cache, so a changed source makes
a new entry; two processes that fill the same entry do not disturb each other. Nothing here ever deletes another entry.
"""

import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from edgefl_protocol.imaging import Fit
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import Table

_FORMAT = "1"  # raise it when the decoding of a picture changes


@dataclass(frozen=True, slots=True)
class Pictures:
    """Memory-mapped pictures, read-only.

    Attributes:
        images: uint8 (n, px, px, 3).
        masks: uint8 (n, px, px), 0 = skin, 255 = lesion; None where the source knows none.
    """

    images: NDArray[np.uint8]
    masks: NDArray[np.uint8] | None


def default_cache_dir() -> Path:
    """`EDGEFL_CACHE`, else `~/.cache/edgefl`."""
    named = os.environ.get("EDGEFL_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "edgefl"


def cached_pictures(tables: Sequence[Table], image_px: int, fit: Fit, cache_dir: Path) -> Pictures:
    """The pictures of all rows of all tables, in order, decoded at most once.

    Args:
        tables: One or more tables.
        image_px: Side of the square pictures, pixels.
        fit: `squash` or `crop`.
        cache_dir: Folder of the cache; made when absent.

    Returns:
        Memory-mapped pictures. `masks` only when every table knows masks.

    Raises:
        DataError: A picture cannot be read, or the cache folder cannot be written.
    """
    parts = [_one_table(table, image_px, fit, cache_dir) for table in tables]
    if len(parts) == 1:
        return _open(parts[0])
    key = hashlib.sha256("\0".join(part.name for part in parts).encode()).hexdigest()
    masked = all(table.pixels.has_masks for table in tables)

    def fill(images: NDArray[np.uint8], masks: NDArray[np.uint8] | None) -> None:
        start = 0
        for part in map(_open, parts):
            stop = start + len(part.images)
            images[start:stop] = part.images
            if masks is not None and part.masks is not None:
                masks[start:stop] = part.masks
            start = stop

    return _open(_entry(cache_dir, key, sum(len(table.rows) for table in tables), image_px, masked, fill))


Fill = Callable[[NDArray[np.uint8], NDArray[np.uint8] | None], None]


def _one_table(table: Table, image_px: int, fit: Fit, cache_dir: Path) -> Path:
    digest = hashlib.sha256(f"{_FORMAT}\0{table.pixels.identity}\0{image_px}\0{fit}".encode())
    for row in table.rows:
        digest.update(f"\0{row.source}".encode())

    def fill(images: NDArray[np.uint8], masks: NDArray[np.uint8] | None) -> None:
        from rich.console import Console
        from rich.progress import track

        loaded = table.pixels.load(table.rows, image_px, fit)
        shown = track(
            loaded,
            description=f"Reading {len(table.rows):,} images at {image_px} px",
            total=len(table.rows),
            console=Console(file=sys.stderr),
            transient=True,
        )
        for i, (image, mask) in enumerate(shown):
            images[i] = image
            if masks is not None and mask is not None:
                masks[i] = mask

    return _entry(cache_dir, digest.hexdigest(), len(table.rows), image_px, table.pixels.has_masks, fill)


def _entry(cache_dir: Path, key: str, n: int, image_px: int, masked: bool, fill: Fill) -> Path:
    """The folder of one cache entry, filled when absent."""
    entry = cache_dir / key
    if (entry / "images.npy").is_file():
        return entry
    partial = cache_dir / f".{key[:16]}.{secrets.token_hex(6)}.tmp"
    try:
        partial.mkdir(parents=True)
        images = open_memmap(partial / "images.npy", mode="w+", dtype=np.uint8, shape=(n, image_px, image_px, 3))
        masks = None
        if masked:
            masks = open_memmap(partial / "masks.npy", mode="w+", dtype=np.uint8, shape=(n, image_px, image_px))
        fill(images, masks)
        images.flush()
        if masks is not None:
            masks.flush()
        _publish(partial, entry)
    except OSError as error:
        raise DataError(
            f"The image cache {cache_dir} cannot be written ({error.strerror}); free space there or set EDGEFL_CACHE."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return entry


def _publish(partial: Path, entry: Path) -> None:
    """Rename a finished folder into place; another process may have been faster with the same content."""
    for path in partial.iterdir():
        _sync(path)
    _sync(partial)
    try:
        partial.rename(entry)
    except OSError:
        if not (entry / "images.npy").is_file():
            raise
    _sync(entry.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open(entry: Path) -> Pictures:
    masks = entry / "masks.npy"
    try:
        images = np.load(entry / "images.npy", mmap_mode="r")
        return Pictures(images, np.load(masks, mmap_mode="r") if masks.is_file() else None)
    except (OSError, ValueError) as error:
        raise DataError(f"The image cache entry {entry} is damaged; remove it and run again.") from error

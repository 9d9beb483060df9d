"""Payloads in a folder, one file each.

Guarantees: a file is flushed, and its name with it, before a call returns; a file is there whole, or not at all.
Source: docs/security.md, reliability.
"""

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from edgefl_coordinator.payloads.payloads import MAX_PAYLOAD_BYTES
from edgefl_protocol import durable


class DiskPayloads:
    """Payloads in a folder of the coordinator's home, which is its own."""

    shared = False

    def __init__(self, folder: Path) -> None:
        """Name the folder."""
        self.described = "payloads in the folder"
        self._folder = folder

    def claim(self, owner: str) -> None:
        """Do nothing: the folder lies in the coordinator's own."""

    def lead(self, known: Collection[str], fresh: str) -> None:
        """Do nothing: a copy of the coordinator's folder has files of its own."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file durably."""
        durable.write_atomic(self._folder / name, data, mode=0o600)

    def put_files(self, files: Mapping[str, Path]) -> None:
        """Link files that were flushed, and make their names durable together."""
        for name, path in files.items():
            target = self._folder / name
            try:
                target.hardlink_to(path)
            except OSError:  # on another disk, or one that knows no links
                durable.write_pieces(target, durable.read_pieces(path, MAX_PAYLOAD_BYTES), mode=0o600)
        durable.flush_to_disk(self._folder)

    def begin(self, name: str) -> None:
        """Make an empty file."""
        durable.create_empty(self._folder / name)

    def put_piece(self, name: str, offset: int, data: bytes) -> None:
        """Write into the file of an upload."""
        durable.write_at(self._folder / name, offset, data)

    def upload(self, name: str) -> Iterator[bytes]:
        """Read the file of an upload."""
        return self.pieces(name)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Read a file."""
        return durable.read_pieces(self._folder / name, MAX_PAYLOAD_BYTES)

    def reading(self, name: str, ahead: int) -> contextlib.AbstractContextManager[Callable[[int, int], bytes]]:
        """Open a file."""
        return durable.read_anywhere(self._folder / name, MAX_PAYLOAD_BYTES)

    def size(self, name: str) -> int:
        """Return the length of a file."""
        return durable.file_bytes(self._folder / name)

    def file_of(self, name: str, spare: Path) -> Path:
        """Return the payload's own file."""
        return self._folder / name

    def names(self, before_s: float | None = None) -> set[str]:
        """Return the names of the files, half-written ones among them."""
        return {path.name for path in self._folder.iterdir() if before_s is None or path.stat().st_ctime < before_s}

    def delete(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return the bytes free on the folder's disk."""
        return shutil.disk_usage(self._folder).free

"""Large work items, as encrypted files beside the outbox: the very bytes that travel as a blob.

An item is encrypted once, when it is put, under a random key of its own (`edgefl_protocol.envelopes.blob`), and is sent
as it lies: a retry after a crash sends the same blob, and neither the database nor memory holds it as a whole. The key
lies in the item's row, which is encrypted, so who deletes the row deletes the content. Files have mode 0600 in a folder
of mode 0700, are written atomically before the row that names them, and deleted after it; what a crash leaves over is
swept. Source: docs/security.md 2.2, replay window and idempotency.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from edgefl_protocol.durable import read_pieces, write_pieces
from edgefl_protocol.envelopes.blob import (
    BlobReference,
    new_blob_id,
    new_file_key,
    open_blob,
    open_chunks,
    seal_chunks,
    sealed_size,
)
from edgefl_protocol.errors import StorageError

FIRST_BYTES = 128 * 2**10  # read at a time
_STALE_S = 3600.0  # age of a temporary file that nobody is writing any more


class ItemFiles:
    """The files of one outbox; their folder is made when the first one comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, blob: str) -> Path:
        """Return where a blob lies."""
        return self._folder / blob

    def keep(self, payload: bytes) -> BlobReference:
        """Encrypt a payload into a file, durably, and give what is needed to send and to open it."""
        blob, key, hasher = new_blob_id(), new_file_key(), hashlib.sha256()

        def sealed() -> Iterator[bytes]:
            for chunk in seal_chunks([payload], key):
                hasher.update(chunk)
                yield chunk

        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {self._folder}: {error.strerror}; check the disk", "storage") from error
        write_pieces(self.path(blob), sealed(), mode=0o600)
        return BlobReference(blob=blob, size=sealed_size(len(payload)), sha256=hasher.hexdigest(), key=key)

    def read(self, reference: BlobReference) -> bytes:
        """Return the payload of a file.

        Raises:
            BlobError: it is damaged.
        """
        pieces = read_pieces(self.path(reference.blob), reference.size)
        return open_blob(pieces, reference, max(1, reference.plain_bytes))

    def chunks(self, reference: BlobReference) -> Iterator[bytes]:
        """Give the payload of a file a chunk at a time, each verified, the whole only at the end.

        Raises:
            BlobError: it is damaged.
        """
        return open_chunks(read_pieces(self.path(reference.blob), reference.size, FIRST_BYTES), reference.key)

    def drop(self, *blobs: str) -> None:
        """Delete files that no row names any more; one that cannot be deleted now is left to the sweep."""
        for blob in blobs:
            with contextlib.suppress(OSError):
                self.path(blob).unlink(missing_ok=True)

    def sweep(self, named: set[str]) -> None:
        """Delete what a crash left: files that no row names, and old temporary ones."""
        if not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                fresh = path.name.endswith(".tmp") and time.time() - path.stat().st_mtime < _STALE_S
                if path.name not in named and not fresh:
                    path.unlink()

"""What the store asks of the place where payloads lie, whichever it is.

Guarantees: what was put is durable when the call returns, and putting the same again changes nothing; a name is of one
content for ever, and begins with 32 hex digits of its SHA-256. Uploads, which members are still sending, lie beside
payloads and have names of the same kind. Source: docs/security.md, reliability; docs/decisions/0061.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

MAX_PAYLOAD_BYTES = 2**31


class Payloads(Protocol):
    """Holds payloads and uploads by name.

    A method raises `StorageError`: `missing`, `damaged` where bytes were cut or changed, `disk_full`, `unreachable`
    where a server does not answer, or another code. No text of one holds bytes of a payload.
    """

    described: str  # for the log
    shared: bool  # whether a copy of the coordinator's folder would reach it, too

    def claim(self, owner: str) -> None:
        """Make the place that of one coordinator for good; an `OperatorError` where it is another's."""

    def lead(self, known: Collection[str], fresh: str) -> None:
        """Note in the place who leads, once more; an `OperatorError` where what it noted last is none of `known`."""

    def put(self, name: str, data: bytes) -> None:
        """Keep a payload."""

    def put_files(self, files: Mapping[str, Path]) -> None:
        """Keep payloads that lie in files of this machine, without their bytes in memory; the files may stay."""

    def begin(self, name: str) -> None:
        """Make room for an upload."""

    def put_piece(self, name: str, offset: int, data: bytes) -> None:
        """Keep a piece of an upload; pieces may overlap, and one may come twice."""

    def upload(self, name: str) -> Iterator[bytes]:
        """Give the bytes of an upload up to the first that is lacking. Whoever sent it knows its digest."""

    def pieces(self, name: str) -> Iterator[bytes]:
        """Give a payload in pieces."""

    def reading(self, name: str, ahead: int) -> AbstractContextManager[Callable[[int, int], bytes]]:
        """Give a function of offset and length that reads a payload there, less at its end.

        `ahead` is how many bytes will be read one after another.
        """

    def size(self, name: str) -> int:
        """Return the length of a payload."""

    def file_of(self, name: str, spare: Path) -> Path:
        """Return a file that holds a payload: its own, or `spare`, into which it is written."""

    def names(self, before_s: float | None = None) -> set[str]:
        """Return the names of what lies here; with a Unix time, of what was not touched since."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove what is there; what cannot be removed now is left for a sweep."""

    def free_bytes(self) -> int:
        """Return how many bytes there is room for."""

"""What the route `blob` carries: pieces of blobs, up and down.

    BlobPut(blob, size, sha256, offset, data)   →  BlobPutReply(have, piece_bytes)
    BlobGet(blob, offset, length)               →  BlobGetReply(data)

Guarantees: as in `messages`, a value that came from `from_payload` was checked. Every answer to a `BlobPut` says how
much the coordinator holds durably, so a piece that comes twice, late or too early costs nothing: an empty piece asks.
A blob belongs to the member whose key signed the envelope; its id alone opens nothing. Source: docs/security.md 2.2.
"""

from dataclasses import dataclass
from typing import Self

from edgefl_protocol.envelopes.blob import BLOB_ID, SHA256, TAG_BYTES
from edgefl_protocol.fields import (
    bad_message,
    expect_names,
    octet_array,
    octets,
    own_scalars,
    scalar_payload,
    text,
    whole,
)
from edgefl_protocol.payload import Payload
from edgefl_protocol.strict_json import MAX_INT

MAX_PIECE_BYTES = 4 * 2**20  # of a blob in one envelope


@dataclass(frozen=True, kw_only=True)
class BlobPut:
    """A piece of a blob for the coordinator; the first one begins it."""

    blob: str  # its id, chosen at random by the sender
    size: int  # bytes of the whole blob
    sha256: str  # hex digest of the whole blob
    offset: int  # where the piece belongs
    data: bytes  # the piece; empty to begin, or to ask how much is there

    def __repr__(self) -> str:
        return f"BlobPut(blob={self.blob!r}, offset={self.offset}, {len(self.data)} bytes)"

    def to_payload(self) -> Payload:
        """Return the payload that carries this message."""
        scalars: dict[str, int | float | str] = {"blob": self.blob, "size": self.size, "sha256": self.sha256}
        data = octet_array(self.data, "data", MAX_PIECE_BYTES)
        return Payload({"data": data}, {**scalars, "offset": self.offset})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        expect_names(payload, "blob", frozenset({"blob", "size", "sha256", "offset"}), frozenset({"data"}))
        scalars = payload.scalars
        found = cls(
            blob=text(scalars["blob"], "blob", BLOB_ID),
            size=whole(scalars["size"], "size", TAG_BYTES, MAX_INT),
            sha256=text(scalars["sha256"], "sha256", SHA256),
            offset=whole(scalars["offset"], "offset", 0, MAX_INT),
            data=octets(payload, "data", MAX_PIECE_BYTES),
        )
        if found.offset + len(found.data) > found.size:
            raise bad_message("the piece reaches beyond the end of its blob")
        return found


@dataclass(frozen=True, kw_only=True)
class BlobPutReply:
    """What the coordinator holds of a blob."""

    have: int  # bytes from the beginning on that lie durably; the next piece begins there
    piece_bytes: int  # longest piece that it takes

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "blob's answer")
        return cls(
            have=whole(scalars["have"], "have", 0, MAX_INT),
            piece_bytes=whole(scalars["piece_bytes"], "piece_bytes", 1, MAX_INT),
        )


@dataclass(frozen=True, kw_only=True)
class BlobGet:
    """Asks for a piece of a blob that a reply named."""

    blob: str  # its id
    offset: int  # where the piece begins
    length: int  # bytes wanted; the last piece is shorter

    to_payload = scalar_payload

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        scalars = own_scalars(cls, payload, "blob")
        return cls(
            blob=text(scalars["blob"], "blob", BLOB_ID),
            offset=whole(scalars["offset"], "offset", 0, MAX_INT),
            length=whole(scalars["length"], "length", 1, MAX_PIECE_BYTES),
        )


@dataclass(frozen=True, kw_only=True)
class BlobGetReply:
    """A piece of a blob; nothing is believed of it before the whole blob is verified."""

    data: bytes

    def __repr__(self) -> str:
        return f"BlobGetReply({len(self.data)} bytes)"

    def to_payload(self) -> Payload:
        """Return the payload that carries this message."""
        return Payload({"data": octet_array(self.data, "data", MAX_PIECE_BYTES)}, {})

    @classmethod
    def from_payload(cls, payload: Payload) -> Self:
        """Return the checked message, or raise `PayloadError`."""
        expect_names(payload, "blob's piece", frozenset(), frozenset({"data"}))
        return cls(data=octets(payload, "data", MAX_PIECE_BYTES))


def read_blob_request(payload: Payload) -> BlobPut | BlobGet:
    """Return what a member asks of the route `blob`, or raise `PayloadError`."""
    return BlobGet.from_payload(payload) if "length" in payload.scalars else BlobPut.from_payload(payload)

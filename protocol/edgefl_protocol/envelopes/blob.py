"""Blobs: payloads above 1 MiB, encrypted in chunks, so that they stream, resume and prove themselves.

    chunk i = ChaCha20-Poly1305(file key, nonce = i as 11 bytes big-endian || last flag, 64 KiB of the payload)
    blob    = chunk 0 || chunk 1 || …        every chunk but the last is full; only an empty payload has an empty one

Guarantees: `open_blob` returns the payload whole or raises `BlobError`: length, SHA-256 and every chunk were verified;
a chunk left out, doubled, moved, cut or changed is refused. The file key is random, 256 bits, and of one blob only, so
a counter is a safe nonce. Sealing and opening hold one chunk at a time. The envelope that carries the
`BlobReference` says who sent it and for whom. Source: docs/security.md 2.2; the STREAM construction as age uses it
(Hoang, Reyhanitabar, Rogaway, Vizár 2015; C2SP age specification, "Payload"). Differs from age: no header and no
nonce of its own, because the key is never used twice.
"""

import hashlib
import io
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from edgefl_protocol.errors import BlobError
from edgefl_protocol.fields import bad_message, hex_bytes, text, whole
from edgefl_protocol.payload import Payload, Scalar
from edgefl_protocol.strict_json import MAX_INT

CHUNK_BYTES: Final = 64 << 10  # of payload
TAG_BYTES: Final = 16
KEY_BYTES: Final = 32
MAX_INLINE_BYTES: Final = (32 << 20) - (64 << 10)  # a longer payload does not fit one envelope
BLOB_ABOVE_BYTES: Final = 1 << 20  # a longer payload goes in pieces: a slow line cannot carry it within one request
MAX_BLOB_BYTES: Final = 1 << 30  # of payload; whoever reads it holds it in memory
_SEALED_CHUNK: Final = CHUNK_BYTES + TAG_BYTES
_COUNTER_BYTES: Final = 11
BLOB_ID: Final = re.compile(r"[0-9a-f]{32}")
SHA256: Final = re.compile(r"[0-9a-f]{64}")
NAMES: Final = frozenset({"blob", "blob_bytes", "blob_sha256", "blob_key"})


@dataclass(frozen=True, kw_only=True)
class BlobReference:
    """What an envelope says of a blob: where it lies and everything needed to verify and open it."""

    blob: str  # its id, 32 hexadecimal digits
    size: int  # bytes of the encrypted blob
    sha256: str  # hex digest of the encrypted blob
    key: bytes = field(repr=False)  # the file key, 32 bytes; never shown by `repr`

    @property
    def plain_bytes(self) -> int:
        """Length of the payload inside."""
        return opened_size(self.size)

    def to_scalars(self) -> dict[str, Scalar]:
        """Return the scalars that carry the reference."""
        return {"blob": self.blob, "blob_bytes": self.size, "blob_sha256": self.sha256, "blob_key": self.key.hex()}

    def to_payload(self) -> Payload:
        """Return the payload that is nothing but this reference."""
        return Payload({}, self.to_scalars())

    @classmethod
    def from_payload(cls, payload: Payload) -> Self | None:
        """Return the reference that a payload consists of, or None where it is a payload of its own.

        Raises:
            PayloadError: it names a blob and has not the form of a reference.
        """
        named = NAMES & frozenset(payload.scalars)
        if not named:
            return None
        if payload.arrays or frozenset(payload.scalars) != NAMES:
            raise bad_message("a payload that names a blob must hold the blob's reference and nothing else")
        scalars = payload.scalars
        found = cls(
            blob=text(scalars["blob"], "blob", BLOB_ID),
            size=whole(scalars["blob_bytes"], "blob_bytes", TAG_BYTES, MAX_INT),
            sha256=text(scalars["blob_sha256"], "blob_sha256", SHA256),
            key=hex_bytes(scalars["blob_key"], "blob_key", KEY_BYTES),
        )
        try:
            opened_size(found.size)
        except BlobError as error:
            raise bad_message(str(error)) from error
        return found


def new_blob_id() -> str:
    """Return a fresh id."""
    return secrets.token_hex(16)


def new_file_key() -> bytes:
    """Return a fresh key, for one blob only."""
    return secrets.token_bytes(KEY_BYTES)


def sealed_size(plain_bytes: int) -> int:
    """Return the length of the blob of a payload of so many bytes."""
    chunks = max(1, -(-plain_bytes // CHUNK_BYTES))
    return plain_bytes + chunks * TAG_BYTES


def opened_size(sealed_bytes: int) -> int:
    """Return the length of the payload in a blob of so many bytes.

    Raises:
        BlobError: no blob has this length.
    """
    chunks = max(1, -(-sealed_bytes // _SEALED_CHUNK))
    plain_bytes = sealed_bytes - chunks * TAG_BYTES
    if plain_bytes < 0 or sealed_size(plain_bytes) != sealed_bytes:
        raise BlobError(f"a blob cannot have {sealed_bytes} bytes: its last chunk would be cut short", "wrong_length")
    return plain_bytes


def seal_chunks(pieces: Iterable[bytes | memoryview], key: bytes) -> Iterator[bytes]:
    """Encrypt a payload that comes in pieces, one chunk after the other, under a file key never used before."""
    cipher = ChaCha20Poly1305(key)
    for number, (chunk, last) in enumerate(_regrouped(pieces, CHUNK_BYTES)):
        yield cipher.encrypt(_nonce(number, last=last), chunk, None)


def seal_range(read: Callable[[int, int], bytes], plain_bytes: int, key: bytes, offset: int, length: int) -> bytes:
    """Return bytes `offset` to `offset + length` of the blob of a payload, less where the blob ends before.

    Equal to the same bytes of `seal_chunks`, so a blob can be served in pieces and never lies anywhere as a whole.

    Args:
        read: gives the payload's bytes from an offset on, as many as asked for.
        plain_bytes: length of the payload; it must not change.

    Raises:
        BlobError: the payload is shorter than stated.
    """
    cipher, total = ChaCha20Poly1305(key), sealed_size(plain_bytes)
    end = min(offset + length, total)
    if not 0 <= offset < end:
        return b""
    first, chunks = offset // _SEALED_CHUNK, -(-total // _SEALED_CHUNK)
    found: list[bytes] = []
    for number in range(first, -(-end // _SEALED_CHUNK)):
        start = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, plain_bytes - start)
        chunk = read(start, size)
        if len(chunk) != size:
            raise BlobError(f"the payload ends before its {plain_bytes} bytes", "truncated")
        found.append(cipher.encrypt(_nonce(number, last=number == chunks - 1), chunk, None))
    base = first * _SEALED_CHUNK
    return memoryview(b"".join(found))[offset - base : end - base].tobytes()


def open_chunks(pieces: Iterable[bytes | memoryview], key: bytes) -> Iterator[bytes]:
    """Decrypt a blob that comes in pieces of any length; gives one chunk of the payload after the other.

    What was given is verified as a whole only when the iterator has ended: before, chunks may still be missing.

    Raises:
        BlobError: a chunk was changed, moved, cut, left out or added.
    """
    cipher = ChaCha20Poly1305(key)
    for number, (chunk, last) in enumerate(_regrouped(pieces, _SEALED_CHUNK)):
        if len(chunk) < TAG_BYTES or (number and len(chunk) == TAG_BYTES):
            raise BlobError(f"chunk {number} of the blob is cut short or empty", "truncated")
        try:
            yield cipher.decrypt(_nonce(number, last=last), chunk, None)
        except InvalidTag:
            raise BlobError(
                f"chunk {number} of the blob was changed, or one before it is missing", "bad_chunk"
            ) from None


def open_middle(sealed: bytes, first: int, plain_bytes: int, key: bytes) -> bytes:
    """Decrypt whole chunks of a blob, from number `first` on; `plain_bytes` is the length of the whole payload.

    A `BlobError` where one was changed, moved or cut.
    """
    last = max(1, -(-plain_bytes // CHUNK_BYTES)) - 1
    cipher, view = ChaCha20Poly1305(key), memoryview(sealed)
    try:
        return b"".join(
            cipher.decrypt(_nonce(number, last=number == last), view[start : start + _SEALED_CHUNK], None)
            for number, start in enumerate(range(0, len(sealed), _SEALED_CHUNK), first)
        )
    except InvalidTag:
        raise BlobError("a chunk of the blob was changed, or cut", "bad_chunk") from None


def open_blob(pieces: Iterable[bytes | memoryview], reference: BlobReference, max_bytes: int = MAX_BLOB_BYTES) -> bytes:
    """Verify a blob against its reference, from an authenticated envelope, and return the payload's bytes.

    A `BlobError` for another length or digest, or a chunk that does not open; nothing of it may be used.
    """
    if reference.plain_bytes > max_bytes:
        raise BlobError(f"the blob holds {reference.plain_bytes} bytes; at most {max_bytes} are allowed", "too_large")
    hasher, found, size = hashlib.sha256(), io.BytesIO(), 0

    def measured() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in pieces:
            size += len(piece)
            if size > reference.size:
                break
            hasher.update(piece)
            yield piece
        if size != reference.size:
            raise BlobError(
                f"the blob does not have the {reference.size} bytes that its reference states", "wrong_length"
            )

    for chunk in open_chunks(measured(), reference.key):
        found.write(chunk)
    if hasher.hexdigest() != reference.sha256:
        raise BlobError("the blob is not the one that its reference names", "wrong_digest")
    return found.getvalue()


def _nonce(number: int, *, last: bool) -> bytes:
    return number.to_bytes(_COUNTER_BYTES, "big") + (b"\x01" if last else b"\x00")


def _regrouped(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[tuple[bytes, bool]]:
    """Give the same bytes in pieces of `size`, the last one shorter where it has to be; tells which is the last."""
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            if len(held) == size:  # more follows, so this is not the last
                yield bytes(held), False
                held.clear()
            taken = size - len(held)
            held += view[:taken]
            view = view[taken:]
    yield bytes(held), True

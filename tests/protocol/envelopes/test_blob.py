"""Blobs: the STREAM construction against age's vectors and a reference of ten lines, and every way to damage one."""

import base64
import contextlib
import hashlib
import json
import tracemalloc
import zlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.envelopes.blob import (
    BlobReference,
    new_blob_id,
    new_file_key,
    open_blob,
    open_chunks,
    opened_size,
    seal_chunks,
    seal_range,
    sealed_size,
)
from edgefl_protocol.errors import BlobError, PayloadError
from edgefl_protocol.payload import Payload

CHUNK, TAG = 65536, 16
KEY = bytes(range(32))
VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "age_stream" / "vectors.json").read_text())
NOT_OURS = {"stream_no_nonce", "stream_short_nonce"}  # about the nonce of an age file


def reference_seal(plain: bytes, key: bytes) -> bytes:
    """C2SP age specification, "Payload": 64 KiB chunks, nonce = 11-byte big-endian counter and 1 on the last."""
    chunks = [plain[at : at + CHUNK] for at in range(0, len(plain), CHUNK)] or [b""]
    cipher, sealed = ChaCha20Poly1305(key), b""
    for counter, chunk in enumerate(chunks):
        last = counter == len(chunks) - 1
        sealed += cipher.encrypt(counter.to_bytes(11, "big") + bytes([last]), chunk, b"")
    return sealed


def named(sealed: bytes, key: bytes = KEY) -> BlobReference:
    return BlobReference(blob="0" * 32, size=len(sealed), sha256=hashlib.sha256(sealed).hexdigest(), key=key)


@pytest.mark.parametrize("name", sorted(set(VECTORS) - NOT_OURS))
def test_vectors_of_age(name: str) -> None:
    """docs/security.md 2.2: C2SP/CCTV's vectors of the STREAM payload, each with its expected outcome."""
    told = VECTORS[name]
    body = base64.b64decode(told["age"])
    body = zlib.decompress(body) if told.get("compressed") == "zlib" else body
    mac = body.index(b"\n--- ") + 1
    payload = body[body.index(b"\n", mac) + 1 :]
    file_key, nonce, sealed = bytes.fromhex(told["file key"]), payload[:16], payload[16:]
    key = HKDF(hashes.SHA256(), length=32, salt=nonce, info=b"payload").derive(file_key)
    if told["expect"] == "success":
        plain = b"".join(open_chunks([sealed], key))
        assert hashlib.sha256(plain).hexdigest() == told["payload"]
        assert b"".join(seal_chunks([plain], key)) == sealed
    else:
        assert told["expect"] == "payload failure"
        with pytest.raises(BlobError):
            b"".join(open_chunks([sealed], key))
        with pytest.raises(BlobError):
            open_blob([sealed], named(sealed, key))


def test_all_vectors_are_there() -> None:
    """A vector that is new in a later copy of them must be looked at."""
    assert len(VECTORS) == 28 and set(VECTORS) > NOT_OURS


@pytest.mark.parametrize("size", [0, 1, 15, 16, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1])
def test_there_and_back_in_any_pieces(size: int) -> None:
    plain = hashlib.shake_128(b"plain").digest(size)
    expected = reference_seal(plain, KEY)
    assert sealed_size(size) == len(expected)
    assert opened_size(len(expected)) == size
    for step in (1000, CHUNK, CHUNK + TAG, 10**6):
        pieces = [plain[at : at + step] for at in range(0, size, step)]
        assert b"".join(seal_chunks(pieces, KEY)) == expected
        sealed = [expected[at : at + step] for at in range(0, len(expected), step)]
        assert open_blob(sealed, named(expected)) == plain


@given(st.integers(0, 3 * CHUNK + 5), st.integers(0, 4 * CHUNK), st.integers(0, 3 * CHUNK))
def test_a_range_is_that_part_of_the_whole(size: int, offset: int, length: int) -> None:
    """Pieces that are sealed when asked for are those of the blob as a whole."""
    plain = hashlib.shake_128(b"x").digest(size)
    found = seal_range(lambda at, count: plain[at : at + count], size, KEY, offset, length)
    assert found == reference_seal(plain, KEY)[offset : offset + length]


def test_a_payload_that_shrank_is_no_blob() -> None:
    with pytest.raises(BlobError) as caught:
        seal_range(lambda at, count: bytes(count - 1), CHUNK, KEY, 0, 10)
    assert caught.value.code == "truncated"


PLAIN = hashlib.shake_128(b"three chunks and a bit").digest(3 * CHUNK + 100)
SEALED = reference_seal(PLAIN, KEY)
PIECES = [SEALED[at : at + CHUNK + TAG] for at in range(0, len(SEALED), CHUNK + TAG)]


def opens(sealed: bytes) -> list[str]:
    """The ways in which it opens: as a stream, as a blob whose reference somebody made to fit, as the true one."""
    ways = {
        "stream": lambda: b"".join(open_chunks([sealed], KEY)),
        "fitting": lambda: open_blob([sealed], named(sealed)),
        "true": lambda: open_blob([sealed], named(SEALED)),
    }
    found = []
    for way, opened in ways.items():
        with contextlib.suppress(BlobError):
            opened()
            found.append(way)
    return found


def test_what_was_not_touched_opens() -> None:
    assert opens(SEALED) == ["stream", "fitting", "true"]


@given(st.integers(0, len(SEALED) - 1))
def test_truncation(length: int) -> None:
    assert not opens(SEALED[:length])


@given(st.permutations(range(4)).filter(lambda order: order != [0, 1, 2, 3]))
def test_reordering(order: list[int]) -> None:
    assert not opens(b"".join(PIECES[number] for number in order))


@given(st.integers(0, 3), st.integers(0, 4))
def test_duplication(number: int, place: int) -> None:
    assert not opens(b"".join([*PIECES[:place], PIECES[number], *PIECES[place:]]))


@pytest.mark.parametrize("number", range(4))
def test_a_chunk_left_out(number: int) -> None:
    """The last one above all: what is left is a run of whole, valid chunks."""
    assert not opens(b"".join(PIECES[:number] + PIECES[number + 1 :]))


@given(st.integers(0, 8 * len(SEALED) - 1))
def test_a_flipped_bit(place: int) -> None:
    damaged = bytearray(SEALED)
    damaged[place // 8] ^= 1 << place % 8
    assert not opens(bytes(damaged))


@given(st.binary(min_size=1, max_size=100))
def test_something_behind_the_end(extra: bytes) -> None:
    assert not opens(SEALED + extra)


def test_an_empty_last_chunk_is_refused() -> None:
    """age: the last chunk must not be empty unless the whole payload is; the same payload has one form."""
    cipher = ChaCha20Poly1305(KEY)
    assert not opens(cipher.encrypt(bytes(12), bytes(CHUNK), b"") + cipher.encrypt(bytes(10) + b"\1\1", b"", b""))


def test_another_key_or_digest_or_bound() -> None:
    true = named(SEALED)
    for wrong, code in (
        (named(SEALED, bytes(32)), "bad_chunk"),
        (BlobReference(blob=true.blob, size=true.size, sha256="0" * 64, key=KEY), "wrong_digest"),
        (BlobReference(blob=true.blob, size=true.size + 1, sha256=true.sha256, key=KEY), "wrong_length"),
        (BlobReference(blob=true.blob, size=true.size - 1, sha256=true.sha256, key=KEY), "wrong_length"),
    ):
        with pytest.raises(BlobError) as caught:
            open_blob([SEALED], wrong)
        assert caught.value.code == code
    with pytest.raises(BlobError) as caught:
        open_blob([SEALED], true, max_bytes=len(PLAIN) - 1)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize("size", [0, 15, CHUNK + TAG + 1, CHUNK + 2 * TAG, 2 * (CHUNK + TAG) + TAG])
def test_lengths_that_no_blob_has(size: int) -> None:
    with pytest.raises(BlobError):
        opened_size(size)


def test_memory_does_not_grow_with_the_blob() -> None:
    """Sealing and opening hold a chunk or two, whatever the length: 32 MiB pass through less than 1 MiB."""
    piece = bytes(100_000)

    def passes(count: int) -> int:
        tracemalloc.start()
        total = sum(map(len, open_chunks(seal_chunks((piece for _ in range(count)), KEY), KEY)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == count * len(piece)
        return peak

    assert passes(336) < 2**20


def test_the_reference_travels_and_hides_its_key() -> None:
    """docs/security.md 2.2: {blob id, length, SHA-256, file key}; check 14: no key where it is printed."""
    reference = BlobReference(blob=new_blob_id(), size=len(SEALED), sha256="ab" * 32, key=new_file_key())
    assert BlobReference.from_payload(Payload.from_bytes(reference.to_payload().to_bytes())) == reference
    assert reference.plain_bytes == len(PLAIN)
    assert reference.key.hex() not in repr(reference) and str(reference.key) not in repr(reference)
    assert new_file_key() != new_file_key() and new_blob_id() != new_blob_id()


# fmt: off
OTHER_FORMS: list[dict[str, object]] = [
    {"blob": "0" * 31}, {"blob": "../../../../etc/passwd"}, {"blob": "A" * 32}, {"blob": 5}, {"blob_bytes": 15},
    {"blob_bytes": 2.5}, {"blob_bytes": CHUNK + TAG + 1}, {"blob_sha256": "0" * 63}, {"blob_key": "0" * 62},
    {"blob_key": "AB" * 32}, {"phase": "train"},
]
# fmt: on


@pytest.mark.parametrize("change", OTHER_FORMS)
def test_references_of_another_form(change: dict[str, object]) -> None:
    scalars = {**named(SEALED).to_scalars(), **change}
    with pytest.raises(PayloadError) as caught:
        BlobReference.from_payload(Payload({}, scalars))  # type: ignore[arg-type]
    assert caught.value.code == "bad_message"


def test_a_payload_without_a_blob_is_itself() -> None:
    assert BlobReference.from_payload(Payload({}, {"phase": "train"})) is None
    with pytest.raises(PayloadError):
        BlobReference.from_payload(Payload({}, {"blob": "0" * 32}))

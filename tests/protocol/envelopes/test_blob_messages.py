"""Messages of the route blob: exact names, types and bounds (docs/security.md 2.2), and replies that name a blob."""

import numpy as np
import pytest

from edgefl_protocol import Payload, PayloadError
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.messages.blob_messages import (
    MAX_PIECE_BYTES,
    BlobGet,
    BlobGetReply,
    BlobPut,
    BlobPutReply,
    read_blob_request,
)
from edgefl_protocol.messages.requests import RESERVED_SCALARS, ReplyRequest

PUT = BlobPut(blob="ab" * 16, size=1000, sha256="cd" * 32, offset=10, data=b"piece")
GET = BlobGet(blob="ab" * 16, offset=0, length=MAX_PIECE_BYTES)
REFERENCE = BlobReference(blob="ab" * 16, size=1016, sha256="cd" * 32, key=bytes(range(32)))
REPLY = ReplyRequest(idem="i" * 16, reply=REFERENCE)
MESSAGES = [
    PUT, BlobPut(blob="ab" * 16, size=16, sha256="cd" * 32, offset=0, data=b""), BlobPutReply(have=0, piece_bytes=1),
    GET, BlobGetReply(data=b"piece"), BlobGetReply(data=b""), REPLY,
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message) -> None:
    payload = Payload.from_bytes(message.to_payload().to_bytes())
    assert type(message).from_payload(payload) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_missing_and_extra_fields(message) -> None:
    payload = message.to_payload()
    wrong = [Payload(payload.arrays, {**payload.scalars, "extra": 1})]
    wrong += [Payload({**payload.arrays, "extra": np.zeros(1)}, payload.scalars)]
    wrong += [Payload({}, {key: value for key, value in payload.scalars.items() if key != gone})
              for gone in payload.scalars]  # fmt: skip
    for bad in wrong:
        with pytest.raises(PayloadError) as caught:
            type(message).from_payload(bad)
        assert caught.value.code == "bad_message"


# fmt: off
WRONG = [
    (PUT, "blob", "../x"), (PUT, "blob", "AB" * 16), (PUT, "size", 15), (PUT, "size", 2**53), (PUT, "sha256", "cd"),
    (PUT, "offset", -1), (PUT, "offset", 996), (PUT, "offset", 1.0), (PUT, "size", 14),
    (GET, "length", 0), (GET, "length", MAX_PIECE_BYTES + 1), (GET, "offset", -1), (GET, "blob", ""),
    (BlobPutReply(have=0, piece_bytes=1), "have", -1), (BlobPutReply(have=0, piece_bytes=1), "piece_bytes", 0),
    (REPLY, "idem", "short"), (REPLY, "blob_key", "00"), (REPLY, "blob_bytes", 15), (REPLY, "blob", "x"),
]
# fmt: on


@pytest.mark.parametrize(("message", "field", "value"), WRONG)
def test_wrong_values(message, field, value) -> None:
    payload = message.to_payload()
    with pytest.raises(PayloadError) as caught:
        type(message).from_payload(Payload(payload.arrays, {**payload.scalars, field: value}))
    assert caught.value.code == "bad_message"


def test_a_piece_is_bounded() -> None:
    """docs/security.md 2.2: pieces of at most 4 MiB; an array of another type or form is none."""
    scalars = BlobPut(blob="ab" * 16, size=2**30, sha256="cd" * 32, offset=0, data=b"").to_payload().scalars
    for array in (np.zeros(MAX_PIECE_BYTES + 1, np.uint8), np.zeros(4, np.int8), np.zeros((2, 2), np.uint8)):
        with pytest.raises(PayloadError):
            BlobPut.from_payload(Payload({"data": array}, scalars))
        with pytest.raises(PayloadError):
            BlobGetReply.from_payload(Payload({"data": array}, {}))


def test_one_route_two_questions() -> None:
    assert read_blob_request(PUT.to_payload()) == PUT
    assert read_blob_request(GET.to_payload()) == GET
    with pytest.raises(PayloadError):
        read_blob_request(Payload({}, {}))


def test_a_method_cannot_pass_off_a_blob() -> None:
    """The names of a reference are reserved: a method's own reply never reads as one, nor the other way round."""
    for name in ("blob", "blob_bytes", "blob_sha256", "blob_key"):
        assert name in RESERVED_SCALARS
        with pytest.raises(PayloadError):
            ReplyRequest(idem="i" * 16, reply=Payload({}, {name: "x"})).to_payload()
        with pytest.raises(PayloadError):
            ReplyRequest.from_payload(Payload({}, {"idem": "i" * 16, name: "x"}))


def test_secrets_and_pieces_stay_out_of_repr() -> None:
    """Check 14."""
    assert REFERENCE.key.hex() not in repr(REPLY) and str(REFERENCE.key) not in repr(REPLY)
    assert "piece" not in repr(BlobGetReply(data=b"piece")) and "b'piece'" not in repr(PUT)

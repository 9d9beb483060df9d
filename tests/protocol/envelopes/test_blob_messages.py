"""Messages of the route blob: the size of a piece (docs/security.md 2.2), and replies that name a blob.

Names, types and bounds of their fields: `test_messages`.
"""

import numpy as np
import pytest
from tests.protocol.test_messages import GET, PUT, REFERENCE, REPLY

from edgefl_protocol import Payload, PayloadError
from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES, BlobGetReply, BlobPut, read_blob_request
from edgefl_protocol.messages.requests import RESERVED_SCALARS, ReplyRequest


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

"""Route messages: exact keys, types and bounds (docs/security.md, envelope and routes; property by hypothesis)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol import Payload, PayloadError
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES, BlobGet, BlobGetReply, BlobPut, BlobPutReply
from edgefl_protocol.messages.key_messages import IndexReply, RotateReply, RotateRequest
from edgefl_protocol.messages.requests import (
    REFUSAL_STATUS,
    ROUTES,
    BroadcastRequest,
    BundleReply,
    BundleRequest,
    EmptyRequest,
    EnrolProofReply,
    EnrolProofRequest,
    EnrolReply,
    EnrolRequest,
    RecordReply,
    Refusal,
    ReplyReply,
    ReplyRequest,
    TaskReply,
)

TASK = TaskReply(
    method="fedevprompt", task="nevus", line="main", classes=("nevus", "other [benign]"), rounds=5, round=2,
    phase="train", state="open", deadline_ms=1_790_000_000_000, tokens=49, maps_per_class=5, quorum_min=2,
    quorum_target=4, max_reply_bytes=2**24, replied=True, train_rounds=4, epochs=2, seed=7,
    settings={"kd_weight": 1e-6, "select": "vacuity", "m": 5, "kd": True, "blocks": (5, 6)},
    travels=("features", "weights"), state_sha256="0" * 64,
    backbone={"name": "run:x", "image_px": 84, "self_supervised": True, "mean": (0.5, 0.25, 0.5), "sha256": "1" * 64},
)  # fmt: skip
ENROL = EnrolRequest(
    idem="i" * 16, token=b"t" * 32, name="clinic-a", role="site", signing_public=b"s" * 32, sealing_suite=2,
    sealing_public=b"p" * 1216,
)  # fmt: skip
PUT = BlobPut(blob="ab" * 16, size=1000, sha256="cd" * 32, offset=10, data=b"piece")
PUT_REPLY = BlobPutReply(have=0, piece_bytes=1)
GET = BlobGet(blob="ab" * 16, offset=0, length=MAX_PIECE_BYTES)
REFERENCE = BlobReference(blob="ab" * 16, size=1016, sha256="cd" * 32, key=bytes(range(32)))
REPLY = ReplyRequest(idem="i" * 16, reply=REFERENCE)
ROTATE_REPLY = RotateReply(old_until_ms=1_790_000_000_000, fingerprint="0123456789ABCDEFGHJK")
MESSAGES = [
    ENROL,
    EnrolReply(state="pending", nonce=b"n" * 32),
    EnrolProofRequest(idem="i" * 16, nonce=b"n" * 32),
    EnrolProofReply(state="approved", fingerprint="0123456789ABCDEFGHJK"),
    EmptyRequest(),
    TASK,
    BroadcastRequest(round=3),
    ReplyRequest(idem="i" * 16, reply=Payload({"maps.0": np.ones((1, 4), np.float16)}, {"site_sha256": "0" * 64})),
    ReplyReply(accepted=True, first_answer_ms=1_790_000_000_000),
    RecordReply(record=b"body.signature"),
    BundleRequest(line="main", task="nevus", version=7),
    BundleReply(bundle=bytes(range(256))),
    Refusal(code="seq_behind", message="continue above that", highest=9),
    Refusal(code="pending", message="not yet"),
    PUT,
    BlobPut(blob="ab" * 16, size=16, sha256="cd" * 32, offset=0, data=b""),
    PUT_REPLY,
    GET,
    BlobGetReply(data=b"piece"),
    BlobGetReply(data=b""),
    REPLY,
    RotateRequest(idem="i" * 16, record=b"body.signature"),
    ROTATE_REPLY,
    IndexReply(index=b"body.signature", revoked=b"other.signature"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message) -> None:
    """Equal after the wire, byte for byte."""
    payload = Payload.from_bytes(message.to_payload().to_bytes())
    assert type(message).from_payload(payload) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_missing_and_extra_fields(message) -> None:
    """Exactly the documented names; a method's reply in the message alone is free beside `idem`."""
    payload = message.to_payload()
    wrong = [
        Payload({name: array for name, array in payload.arrays.items() if name != gone}, payload.scalars)
        for gone in payload.arrays
    ] + [
        Payload(payload.arrays, {name: value for name, value in payload.scalars.items() if name != gone})
        for gone in payload.scalars
        if gone not in ("error", "highest")
    ]
    if isinstance(message, ReplyRequest) and isinstance(message.reply, Payload):
        wrong = [Payload(payload.arrays, {})]
    else:
        wrong.append(Payload(payload.arrays, {**payload.scalars, "extra": 1}))
        wrong.append(Payload({**payload.arrays, "extra": np.zeros(1)}, payload.scalars))
    for bad in wrong:
        with pytest.raises(PayloadError) as caught:
            type(message).from_payload(bad)
        assert caught.value.code == "bad_message"


# fmt: off
WRONG = [
    (ENROL, "token", "ab"), (ENROL, "token", "AB" * 32), (ENROL, "token", 5), (ENROL, "role", "root"),
    (ENROL, "name", "../x"), (ENROL, "name", ""), (ENROL, "name", "a" * 65), (ENROL, "idem", "short"),
    (ENROL, "sealing_suite", 3), (ENROL, "sealing_suite", 1), (ENROL, "sealing_suite", "2"),
    (ENROL, "signing_public", "ab" * 33),
    (TASK, "classes", "[]"), (TASK, "classes", '["a","a"]'), (TASK, "classes", '[["a"]]'), (TASK, "classes", "{}"),
    (TASK, "classes", '["a", NaN]'), (TASK, "classes", "[" * 60_000), (TASK, "classes", '["\\u0000", "b"]'),
    (TASK, "settings", "[]"), (TASK, "settings", '{"a": 1, "a": 2}'), (TASK, "settings", '{"a": {}}'),
    (TASK, "settings", '{"a": null}'), (TASK, "settings", '{"a": 1e999}'), (TASK, "settings", '{"a b": 1}'),
    (TASK, "settings", '{"a": [[1]]}'), (TASK, "settings", '{"a": ["b"]}'), (TASK, "settings", '{"a": "\\n"}'),
    (TASK, "settings", '{"a": [true]}'), (TASK, "backbone", "[]"), (TASK, "travels", '["a b"]'),
    (TASK, "travels", str(["a"] * 17).replace("'", '"')), (TASK, "epochs", -1), (TASK, "train_rounds", 1.5),
    (TASK, "seed", "0"), (TASK, "state_sha256", "0" * 63),
    (TASK, "round", -1), (TASK, "round", 2.0), (TASK, "rounds", 0), (TASK, "state", "ajar"), (TASK, "replied", 2),
    (TASK, "stuck", "line\nbreak"), (TASK, "stuck", "\x1b[2J"), (TASK, "stuck", "a" * 1001), (TASK, "stuck", 1),
    (TASK, "quorum_min", 0), (TASK, "phase", "cool"),
    (BroadcastRequest(round=1), "round", 0), (BroadcastRequest(round=1), "round", 2**31 + 1),
    (EnrolProofReply(state="pending", fingerprint="0" * 20), "fingerprint", "O" * 20),
    (Refusal(code="pending", message="x"), "error", "Not A Code"),
    (Refusal(code="pending", message="x"), "message", "line\nbreak"),
    (Refusal(code="pending", message="x"), "message", "a" * 501),
    (PUT, "blob", "../x"), (PUT, "blob", "AB" * 16), (PUT, "size", 15), (PUT, "size", 2**53), (PUT, "sha256", "cd"),
    (PUT, "offset", -1), (PUT, "offset", 996), (PUT, "offset", 1.0), (PUT, "size", 14),
    (GET, "length", 0), (GET, "length", MAX_PIECE_BYTES + 1), (GET, "offset", -1), (GET, "blob", ""),
    (PUT_REPLY, "have", -1), (PUT_REPLY, "piece_bytes", 0),
    (REPLY, "idem", "short"), (REPLY, "blob_key", "00"), (REPLY, "blob_bytes", 15), (REPLY, "blob", "x"),
    (RotateRequest(idem="i" * 16, record=b"x"), "idem", "short"),
    (ROTATE_REPLY, "old_until_ms", -1), (ROTATE_REPLY, "fingerprint", "O" * 20),
]
# fmt: on


@pytest.mark.parametrize(("message", "field", "value"), WRONG)
def test_wrong_values(message, field, value) -> None:
    payload = message.to_payload()
    with pytest.raises(PayloadError) as caught:
        type(message).from_payload(Payload(payload.arrays, {**payload.scalars, field: value}))
    assert caught.value.code == "bad_message"
    assert len(str(value)) < 8 or str(value) not in str(caught.value)  # what was sent may be secret


def test_a_task_of_an_older_coordinator_and_for_an_older_member() -> None:
    """docs/design.md 5: `stuck` came later: it may be missing, and is not sent where there is nothing to say."""
    assert "stuck" not in TASK.to_payload().scalars
    assert TaskReply.from_payload(TASK.to_payload()).stuck == ""
    told = replace(TASK, stuck="round 2 is stuck since then: so; the operator runs: this").to_payload()
    assert TaskReply.from_payload(told).stuck.endswith("runs: this") and not TaskReply.from_payload(told).refusal


def test_a_refused_reply_is_told_where_older_members_read_it() -> None:
    """A field more would be refused by them: the sentence stands before why the round is stuck, and is told apart."""
    refusal = f"the reply of round {TASK.round} was refused: it lies far off; it is judged again"
    for stuck in ("", f"; round {TASK.round} is stuck since then: so"):
        told = replace(TASK, stuck=refusal + stuck)
        assert set(told.to_payload().scalars) == {*TASK.to_payload().scalars, "stuck"}
        assert TaskReply.from_payload(told.to_payload()).refusal == refusal


@pytest.mark.parametrize("array", [np.zeros(3, np.int8), np.zeros((1, 3), np.uint8), np.zeros(2**16 + 1, np.uint8)])
def test_wrong_octets(array) -> None:
    with pytest.raises(PayloadError):
        RecordReply.from_payload(Payload({"record": array}, {}))


def test_reserved_names() -> None:
    """A method cannot pass off a refusal or another work item as its reply."""
    for name in ("idem", "error", "message"):
        with pytest.raises(PayloadError):
            ReplyRequest(idem="i" * 16, reply=Payload({}, {name: "x"})).to_payload()
    with pytest.raises(PayloadError):
        ReplyRequest.from_payload(Payload({}, {"idem": "i" * 16, "error": "x"}))


def test_no_refusal_in_an_answer() -> None:
    assert Refusal.from_payload(Payload({}, {"accepted": 1})) is None


def test_secrets_stay_out_of_repr() -> None:
    """Check 14: neither the token nor the bundle shows up where a message is printed."""
    assert ENROL.token.hex() not in repr(ENROL) and str(ENROL.token) not in repr(ENROL)


def test_every_refusal_has_a_status() -> None:
    assert all(400 <= status < 600 for status in REFUSAL_STATUS.values())
    assert Refusal(code="from_the_future", message="x").status == 400


def test_routes() -> None:
    """docs/security.md 2.2: paths are distinct, `cty` is kebab-case of at most 32 characters."""
    assert len({route.path for route in ROUTES.values()}) == len(ROUTES)
    assert all(route.path.startswith("/v1/") and len(cty) <= 32 for cty, route in ROUTES.items())


scalars = st.dictionaries(
    st.sampled_from([*TaskReply.__dataclass_fields__, *EnrolRequest.__dataclass_fields__, "error", "message"]),
    st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=80)),
    max_size=16,
)


@given(scalars, st.sampled_from([type(message) for message in MESSAGES]))
def test_anything_else_is_one_typed_error(found, kind) -> None:
    """Whatever arrives: a checked value, which says the same when it is sent again, or a PayloadError."""
    try:
        message = kind.from_payload(Payload({}, found))
    except PayloadError as error:
        assert error.code and str(error)
        return
    assert message is None or kind.from_payload(message.to_payload()) == message  # None: not a refusal at all


def test_a_task_says_what_its_replies_are_made_of() -> None:
    """docs/design.md 7: maps have patches and a most per class; features are named among what travels."""
    assert TASK.takes_maps and TASK.takes_features
    assert not replace(TASK, tokens=0).takes_maps and not replace(TASK, maps_per_class=0).takes_maps
    assert not replace(TASK, travels=("maps",)).takes_features

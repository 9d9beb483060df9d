"""A member's change of keys, and the list of revoked keys. Source: docs/security.md 2.6.4 and 2.6.5."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import Payload, PayloadError, SigningKey, generate_sealing_key
from edgefl_protocol.errors import RecordError
from edgefl_protocol.messages.key_messages import IndexReply, RotateReply, RotateRequest
from edgefl_protocol.records.record_form import make_several
from edgefl_protocol.records.revocation import (
    MAX_REVOKED,
    REVOKED_VALID_MS,
    make_revoked,
    unverified_revoked,
    verify_revoked,
)
from edgefl_protocol.records.rotation import make_rotation, verify_rotation

NOW = 1_790_000_000_000
OLD, NEW, OTHER = (SigningKey(bytes([number]) * 32) for number in (1, 2, 3))
BOX = generate_sealing_key(2)
ROTATION = make_rotation(OLD, NEW, BOX.public_key, "skin", NOW)
LIST = make_revoked(OLD, "skin", 3, [OTHER.key_id, NEW.key_id], NOW, NOW + REVOKED_VALID_MS)


def code_of(action) -> str:
    with pytest.raises(RecordError) as caught:
        action()
    return caught.value.code


def test_a_change_of_keys_is_signed_by_both() -> None:
    """docs/security.md check 23: new signing key signed by old and by itself."""
    found = verify_rotation(ROTATION, "skin")
    assert (found.old, found.new, found.sealing) == (OLD.public_key, NEW.public_key, BOX.public_key)
    body = json.loads(base64.urlsafe_b64decode(ROTATION.split(b".")[0] + b"=="))
    for signers in ([OLD], [NEW], [OLD, OTHER], [NEW, OTHER], [OTHER]):
        record = make_several(signers, "eflm1/rotate", body)
        assert code_of(lambda record=record: verify_rotation(record, "skin")) == "bad_signature"
    assert code_of(lambda: verify_rotation(make_several([OLD, NEW], "eflf1/root", body), "skin")) == "bad_signature"
    assert code_of(lambda: verify_rotation(ROTATION, "eye")) == "wrong_federation"


def test_a_key_never_follows_itself() -> None:
    with pytest.raises(RecordError, match="old one"):
        make_rotation(OLD, OLD, BOX.public_key, "skin", NOW)


@pytest.mark.parametrize("field", ["old", "new", "sealing"])
def test_low_order_keys_do_not_rotate_in(field) -> None:
    """docs/security.md check 9: also at rotation."""
    body = json.loads(base64.urlsafe_b64decode(ROTATION.split(b".")[0] + b"=="))
    bad = {"old": "00" * 32, "new": "01" + "00" * 31, "sealing": (BOX.public[:-32] + bytes(32)).hex()}
    record = make_several([OLD, NEW], "eflm1/rotate", {**body, field: bad[field]})
    with pytest.raises(RecordError, match="unusable"):
        verify_rotation(record, "skin")


@settings(max_examples=200)
@given(st.sampled_from(["rotation", "list"]), st.data())
def test_a_changed_character_is_refused(kind, data) -> None:
    """Tamper property: any changed character raises."""
    good = ROTATION if kind == "rotation" else LIST
    record = bytearray(good)
    place = data.draw(st.integers(0, len(record) - 1))
    record[place] = data.draw(st.integers(0, 255).filter(lambda value: value != good[place]))
    with pytest.raises(RecordError):
        if kind == "rotation":
            verify_rotation(bytes(record), "skin")
        else:
            verify_revoked(bytes(record), OLD.public_key, "skin", NOW)


def test_a_list_of_revoked_keys() -> None:
    """docs/security.md check 24: signed, numbered, at most 24 hours old; each edge."""
    found = verify_revoked(LIST, OLD.public_key, "skin", NOW + REVOKED_VALID_MS, 3)
    assert (found.version, found.key_ids) == (3, {OTHER.key_id, NEW.key_id})
    assert unverified_revoked(LIST) == found

    def verify(record=LIST, key=OLD, federation="skin", now_ms=NOW, seen=0):
        return verify_revoked(record, key.public_key, federation, now_ms, seen)

    assert code_of(lambda: verify(key=NEW)) == "bad_signature"
    assert code_of(lambda: verify(federation="eye")) == "wrong_federation"
    assert code_of(lambda: verify(now_ms=NOW + REVOKED_VALID_MS + 1)) == "expired"
    assert code_of(lambda: verify(seen=4)) == "rolled_back"
    assert code_of(lambda: verify(now_ms=NOW - 700_000)) == "from_future"
    long_lived = make_revoked(OLD, "skin", 3, [], NOW, NOW + REVOKED_VALID_MS + 1)
    assert code_of(lambda: verify(long_lived)) == "bad_lifetime"


def test_what_has_not_its_form_is_not_signed() -> None:
    many = [f"{number:064x}" for number in range(MAX_REVOKED + 1)]
    assert len(make_revoked(OLD, "skin", 1, many[:-1], NOW, NOW + 1)) <= 64 << 10
    for key_ids in (many, ["x" * 64], ["0" * 63]):
        with pytest.raises(RecordError):
            make_revoked(OLD, "skin", 1, key_ids, NOW, NOW + 1)
    with pytest.raises(RecordError):
        make_revoked(OLD, "skin", 0, [], NOW, NOW + 1)


MESSAGES = [
    RotateRequest(idem="i" * 16, record=ROTATION),
    RotateReply(old_until_ms=NOW, fingerprint="7QK2M0F4V8R1XJ3TZB5C"),
    IndexReply(index=b"a.b", revoked=LIST),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_messages_come_back_and_take_no_more(message) -> None:
    payload = Payload.from_bytes(message.to_payload().to_bytes())
    assert type(message).from_payload(payload) == message
    for wrong in (Payload(), Payload(payload.arrays, {**payload.scalars, "more": 1})):
        with pytest.raises(PayloadError) as caught:
            type(message).from_payload(wrong)
        assert caught.value.code == "bad_message"

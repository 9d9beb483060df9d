"""Invites. Source: docs/security.md 2.6, step 1; check 21 in part."""

import base64
import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol.errors import InviteError
from edgefl_protocol.pae import pae
from edgefl_protocol.records.invite import Invite, decode_invite, encode_invite

NOW = 1_790_000_000_000
HOUR = 3_600_000
INVITE = Invite(
    url="https://fl.example.org:8443/skin",
    federation="skin",
    coordinator_key_id="a" * 64,
    root_key_id="b" * 64,
    tls_sha256=None,
    token=bytes(range(32)),
    name="Kiel-dermatoscope.2",
    role="device",
    expires_ms=NOW + 72 * HOUR,
)
TEXT = encode_invite(INVITE, NOW)


def pack(record):
    """Return an invite around a record of our choice, with a checksum that holds."""
    text = record if isinstance(record, bytes) else json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    checksum = hashlib.sha256(pae(b"efl1/invite", text)).digest()[:4]
    return "efl1-" + base64.urlsafe_b64encode(text + checksum).rstrip(b"=").decode()


def fields():
    text = TEXT[5:]
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))[:-4])


@pytest.mark.parametrize("role", ["site", "device"])
@pytest.mark.parametrize("pin", [None, "c" * 64])
def test_an_invite_comes_back(role, pin):
    invite = replace(INVITE, role=role, root_key_id=pin, tls_sha256=pin)
    assert decode_invite(encode_invite(invite, NOW), NOW) == invite


def test_an_invite_is_one_string_for_a_terminal_or_a_letter():
    assert TEXT.startswith("efl1-") and TEXT.isascii() and len(TEXT) < 800 and not set(TEXT) & set(" \n+/=")
    wrapped = "\n  ".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60)) + "\n"
    assert decode_invite(wrapped, NOW) == INVITE


def test_the_token_is_never_shown():
    """docs/security.md check 14, in part."""
    assert INVITE.token.hex() not in repr(INVITE) and repr(INVITE.token) not in repr(INVITE)
    assert INVITE.token_sha256 == hashlib.sha256(INVITE.token).hexdigest()


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(TEXT) - 1), st.characters(codec="utf-8"))
def test_a_mistyped_character_is_noticed(place, character):
    """The checksum: a changed character is refused before anything is contacted (up to 1 in 2^32)."""
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    if changed == TEXT:
        return
    with pytest.raises(InviteError):
        decode_invite(changed, NOW)


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 20, 100, len(TEXT) - 1])
def test_a_cut_or_doubled_invite_is_noticed(cut):
    for text in (TEXT[:cut], TEXT + TEXT[:cut] if cut else TEXT * 2, "x" * 5000, "efl1-" + "A" * 100_000):
        with pytest.raises(InviteError):
            decode_invite(text, NOW)


def test_expiry_is_judged_on_both_sides():
    """docs/security.md 2.6: at most 72 hours; check 21: an expired invite is refused."""
    assert decode_invite(TEXT, INVITE.expires_ms) == INVITE
    with pytest.raises(InviteError) as caught:
        decode_invite(TEXT, INVITE.expires_ms + 1)
    assert caught.value.code == "expired"
    for expires in (NOW, NOW - 1, NOW + 72 * HOUR + 1):
        with pytest.raises(InviteError) as caught:
            encode_invite(replace(INVITE, expires_ms=expires), NOW)
        assert caught.value.code == "bad_expiry"


BAD_FIELDS = {
    "url": ["http://fl.example.org", "https://", "https://a/", "https://a?x=1", "https://u@a", "https://a/#b", "", 5],
    "federation": ["Skin", "", "a" * 33, "a\n", None],
    "coordinator": ["a" * 63, "A" * 64, None, "g" * 64],
    "root": ["", "a" * 63, 0],
    "tls": ["", "sha256:" + "a" * 57, False],
    "token": ["00" * 31, "zz" * 32, None, 7],
    "name": ["", "-a", "a b", "a" * 65, "../x", None],
    "role": ["admin", "", None, ["site"]],
    "expires_ms": ["1", 1.5, True, None, -1, 2**53],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD_FIELDS.items() for value in values])
def test_a_field_without_its_form_is_refused_though_the_checksum_holds(key, value):
    with pytest.raises(InviteError):
        decode_invite(pack({**fields(), key: value}), NOW)


@pytest.mark.parametrize(
    "record",
    [
        {"x": 1},
        {},
        [],
        b"{",
        b"[" * 1500,
        b"\xff\xff",
        b"",
        json.dumps(fields()).encode(),
        json.dumps({**fields(), "extra": 1}, sort_keys=True, separators=(",", ":")).encode(),
    ],
    ids=["other", "empty", "list", "cut", "deep", "binary", "nothing", "not canonical", "extra"],
)
def test_another_record_is_refused_though_the_checksum_holds(record):
    with pytest.raises(InviteError):
        decode_invite(pack(record), NOW)


def test_the_table_above_can_fail():
    assert decode_invite(pack(fields()), NOW) == INVITE

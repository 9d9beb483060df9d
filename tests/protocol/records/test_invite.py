"""Invites. Source: docs/security.md 2.6, step 1; check 21 in part."""

import base64
import datetime
import hashlib
import json
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol.errors import InviteError
from edgefl_protocol.pae import pae
from edgefl_protocol.records.invite import (
    MAX_CERTIFICATE_BYTES,
    MAX_INVITE_CHARS,
    Invite,
    decode_invite,
    encode_invite,
)

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


@settings(max_examples=300)
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


# fmt: off
BAD_FIELDS = {
    "url": [
        "http://fl.example.org", "https://", "https://a/", "https://a?x=1", "https://u@a", "https://a/#b", "", 5,
        "https://[::1", "https://a]", "https://a:65536", "https://a:b",  # RFC 3986 3.2.2 and 3.2.3
    ],
    "federation": ["Skin", "", "a" * 33, "a\n", None],
    "coordinator": ["a" * 63, "A" * 64, None, "g" * 64],
    "root": ["", "a" * 63, 0],
    "tls": ["", "sha256:" + "a" * 57, False],
    "token": ["00" * 31, "zz" * 32, None, 7],
    "name": ["", "-a", "a b", "a" * 65, "../x", None],
    "role": ["admin", "", None, ["site"]],
    "expires_ms": ["1", 1.5, True, None, -1, 2**53],
}
# fmt: on


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


def certificate(padding=0):
    """A self-signed certificate, DER; `padding` bytes larger by an extension that nobody knows."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator.example")])
    start = datetime.datetime(2026, 9, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(start).not_valid_after(start + datetime.timedelta(days=90))
    extra = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(padding))
    return builder.add_extension(extra, critical=False).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


DER = certificate()
CARRYING = replace(INVITE, certificate=DER, tls_sha256=hashlib.sha256(DER).hexdigest())


def carrying_fields(**changes):
    record = {key: value for key, value in fields().items() if key != "tls"}
    return {**record, "certificate": base64.urlsafe_b64encode(DER).decode(), **changes}


def test_a_certificate_comes_with_the_invite():
    """docs/security.md 2.6.1: the newcomer needs no file beside it; the pin is that certificate's own hash."""
    text = encode_invite(CARRYING, NOW)
    assert len(text) < 2048 and decode_invite(text, NOW) == CARRYING
    assert decode_invite(pack(carrying_fields()), NOW) == CARRYING


def test_the_largest_certificate_fits():
    """RSA-4096 with many names: the largest invite that its bounds permit is read."""
    der = b""
    while len(der) != MAX_CERTIFICATE_BYTES:  # a signature has 70 to 72 bytes
        der = certificate(1000 + MAX_CERTIFICATE_BYTES - len(certificate(1000)))
    large = replace(
        CARRYING,
        url="https://" + "a" * 255 + ("/" + "b" * 64) * 8,
        federation="f" * 32,
        name="n" * 64,
        certificate=der,
        tls_sha256=hashlib.sha256(der).hexdigest(),
    )
    text = encode_invite(large, NOW)
    assert len(text) <= MAX_INVITE_CHARS and decode_invite(text, NOW) == large


def test_a_certificate_that_is_too_large_is_refused():
    der = certificate(MAX_CERTIFICATE_BYTES)
    with pytest.raises(InviteError, match="at most 2048 bytes"):
        replace(CARRYING, certificate=der, tls_sha256=hashlib.sha256(der).hexdigest())
    with pytest.raises(InviteError):
        decode_invite(pack(carrying_fields(certificate=base64.urlsafe_b64encode(der).decode())), NOW)


@pytest.mark.parametrize("sha256", [None, "c" * 64])
def test_a_certificate_other_than_the_pinned_one_is_refused(sha256):
    with pytest.raises(InviteError, match="not the one that the invite names"):
        replace(CARRYING, tls_sha256=sha256)


PEM = b"-----BEGIN CERTIFICATE-----"
BAD_CERTIFICATES = {
    "nothing": "",
    "none": None,
    "a number": 7,
    "no base64": "*" * 40,
    "no certificate": base64.urlsafe_b64encode(b"x" * 400).decode(),
    "cut": base64.urlsafe_b64encode(DER[:-1]).decode(),
    "bytes behind it": base64.urlsafe_b64encode(DER + b"\0").decode(),
    "two": base64.urlsafe_b64encode(DER + DER).decode(),
    "text form": base64.urlsafe_b64encode(PEM).decode(),
    "another alphabet": base64.b64encode(b"\xff" * 3 + DER).decode(),
    "white space": base64.urlsafe_b64encode(DER).decode() + " ",
    "padding too much": base64.urlsafe_b64encode(DER).decode() + "=",
}


@pytest.mark.parametrize("value", BAD_CERTIFICATES.values(), ids=BAD_CERTIFICATES)
def test_what_is_no_one_certificate_is_refused_though_the_checksum_holds(value):
    """Read strictly: exactly one X.509 certificate in its DER form, in the one base64 that it is written in."""
    with pytest.raises(InviteError):
        decode_invite(pack(carrying_fields(certificate=value)), NOW)


def test_an_invite_says_nothing_of_signers():
    """docs/security.md 2.6.1: whose bundles count is said by the root set and by the owner, never by an invite."""
    for more in ({"signers": ["a" * 64]}, {"trust": "a" * 64}, {"root_set": "x"}, {"tls": "c" * 64}):
        with pytest.raises(InviteError, match="another version"):
            decode_invite(pack(carrying_fields(**more)), NOW)

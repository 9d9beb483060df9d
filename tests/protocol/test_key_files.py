"""Keys at rest. Sources: RFC 5958, RFC 8410; docs/security.md 2.6, step 7."""

import base64
import contextlib

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import x25519
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import KeyMaterialError, SealingKey, SigningKey
from edgefl_protocol.key_files import (
    sealing_key_from_pem,
    sealing_key_to_pem,
    signing_key_from_pem,
    signing_key_to_pem,
)

SIGNING = SigningKey(bytes(range(32)))
SEALING = {1: SealingKey(1, bytes(range(32))), 2: SealingKey(2, bytes(range(96)))}
PLAIN = sealing_key_to_pem(SEALING[2])


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_signing_key_comes_back_and_other_tools_read_it(passphrase):
    pem = signing_key_to_pem(SIGNING, passphrase)
    assert signing_key_from_pem(pem, passphrase).seed == SIGNING.seed
    assert serialization.load_pem_private_key(pem, passphrase).private_bytes_raw() == SIGNING.seed
    assert (base64.b64encode(SIGNING.seed)[:20] in pem) is False


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_sealing_key_comes_back(suite, passphrase):
    pem = sealing_key_to_pem(SEALING[suite], passphrase)
    back = sealing_key_from_pem(pem, passphrase)
    assert (back.suite, back.secret, back.public) == (suite, SEALING[suite].secret, SEALING[suite].public)
    hidden = SEALING[suite].secret not in base64.b64decode(b"".join(pem.splitlines()[1:-1]))
    assert hidden == (passphrase is not None)


@pytest.mark.parametrize(
    ("load", "save", "key"),
    [
        (signing_key_from_pem, signing_key_to_pem, SIGNING),
        (sealing_key_from_pem, sealing_key_to_pem, SEALING[2]),
    ],
    ids=["signing", "sealing"],
)
def test_the_four_ways_to_be_wrong_about_a_passphrase(load, save, key):
    locked, bare = save(key, b"right"), save(key)
    for data, passphrase, code in [
        (locked, b"wrong", "wrong_passphrase"),
        (locked, None, "passphrase_needed"),
        (locked, b"", "passphrase_needed"),
        (bare, b"right", "passphrase_unused"),
    ]:
        with pytest.raises(KeyMaterialError) as caught:
            load(data, passphrase)
        assert caught.value.code == code and "right" not in str(caught.value)


def test_a_key_of_another_kind_is_refused():
    other = x25519.X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    shown = x25519.X25519PrivateKey.generate().public_key().public_bytes(*public)
    for data in (other, shown, PLAIN, b"", b"\xff" * 100, b"x" * 20_000, signing_key_to_pem(SIGNING)[:-30]):
        with pytest.raises(KeyMaterialError):
            signing_key_from_pem(data)
    for data in (other, signing_key_to_pem(SIGNING), b"", b"\xff" * 100, PLAIN + b" " * 20_000, PLAIN[:60]):
        with pytest.raises(KeyMaterialError):
            sealing_key_from_pem(data)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(PLAIN) - 1), st.integers(0, 255))
def test_a_damaged_sealing_key_file_is_refused_or_holds_some_key(position, value):
    data = bytearray(PLAIN)
    data[position] = value
    with contextlib.suppress(KeyMaterialError):
        assert isinstance(sealing_key_from_pem(bytes(data)), SealingKey)


def test_a_sealed_file_shows_every_change():
    """The record's head is associated data: neither version, suite, form, salt, nonce nor text can be altered."""
    pem = sealing_key_to_pem(SEALING[1], b"right").splitlines()
    record = bytearray(base64.b64decode(b"".join(pem[1:-1])))
    for position in (4, 5, 6, 7, 23, 35, len(record) - 1):
        changed = bytearray(record)
        changed[position] ^= 1
        data = b"\n".join([pem[0], base64.b64encode(changed), pem[-1]])
        with pytest.raises(KeyMaterialError):
            sealing_key_from_pem(data, b"right")

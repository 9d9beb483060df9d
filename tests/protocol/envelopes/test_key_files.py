"""Keys at rest. Sources: RFC 5958, RFC 8410; docs/security.md 2.6, step 7."""

import base64
import contextlib
import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import x25519
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import KeyMaterialError, SealingKey, SigningKey
from edgefl_protocol.durable import read_passphrase
from edgefl_protocol.envelopes.key_files import (
    read_public_key,
    sealing_key_from_pem,
    sealing_key_to_pem,
    signing_key_from_pem,
    signing_key_to_pem,
)
from edgefl_protocol.errors import StorageError

SIGNING = SigningKey(bytes(range(32)))
SEALING = {1: SealingKey(1, bytes(range(32))), 2: SealingKey(2, bytes(range(96)))}
PLAIN = sealing_key_to_pem(SEALING[2])


@pytest.mark.parametrize("passphrase", [None, b"correct horse"])
def test_a_signing_key_comes_back_and_other_tools_read_it(passphrase):
    pem = signing_key_to_pem(SIGNING, passphrase)
    assert signing_key_from_pem(pem, passphrase).seed == SIGNING.seed
    assert serialization.load_pem_private_key(pem, passphrase).private_bytes_raw() == SIGNING.seed
    assert (base64.b64encode(SIGNING.seed)[:20] in pem) is False


def test_openssl_opens_an_encrypted_signing_key(tmp_path):
    """The file is the PKCS#8 of RFC 5958 with scrypt as RFC 7914 7 has it, read by a program that we did not write."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    (tmp_path / "key").write_bytes(signing_key_to_pem(SIGNING, b"correct horse"))
    command = ["openssl", "pkey", "-in", "key", "-passin", "pass:correct horse", "-outform", "DER"]
    der = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
    assert der.endswith(SIGNING.seed)
    command = ["openssl", "asn1parse", "-in", "key"]
    told = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "PBES2" in told and "aes-256-cbc" in told and "PBKDF2" not in told
    numbers = [int(line.rpartition(":")[2], 16) for line in told.splitlines() if "INTEGER" in line]
    cost, block, parallel, _ = numbers
    assert "scrypt" in told
    assert cost * block * parallel >= 2**15 * 8 * 1  # operations of a guess: no fewer than for a sealing key


def test_an_encrypted_key_of_an_earlier_version_opens():
    """Earlier files were stretched with PBKDF2; `keygen` and `rotate` write the slow form."""
    private = serialization.load_pem_private_key(signing_key_to_pem(SIGNING), None)
    old = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"right"),
    )
    assert signing_key_from_pem(old, b"right").seed == SIGNING.seed


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


@pytest.mark.parametrize("passphrase", [None, b"right"])
def test_a_signing_key_that_was_cut_accuses_no_passphrase(passphrase):
    """Every cut behind the first line (RFC 7468, 2), and what a copy lost or changed; line ends change nothing."""
    pem = signing_key_to_pem(SIGNING, passphrase)
    first, last = pem.index(b"\n"), pem.rindex(b"-----END")
    lost = [pem[:place] + pem[last:] for place in range(first, last - 4)]
    odd = [pem[: first + 9] + one + pem[first + 10 :] for one in (b"*", b"=", b"\0", b"\xff")]
    for damaged in [*(pem[:place] for place in range(first, len(pem) - 2)), *lost, *odd]:
        with pytest.raises(KeyMaterialError, match="damaged or cut") as caught:
            signing_key_from_pem(damaged, passphrase)
        assert caught.value.code == "bad_key"
    for whole in (pem.replace(b"\n", b"\r\n"), b"Bag Attributes\n" + pem + b"\n", pem[:-1]):
        assert signing_key_from_pem(whole, passphrase).seed == SIGNING.seed


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


@settings(max_examples=200)
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


# fmt: off
PASSPHRASES = {  # content of the file → passphrase: one line end goes, everything else is part of it
    b"correct horse\n": b"correct horse", b"correct horse": b"correct horse", b"correct horse\r\n": b"correct horse",
    b"  spaces stay \n": b"  spaces stay ", b"\nleading": b"\nleading", b"twice\n\n": b"twice\n", b"cr\r": b"cr\r",
    b"two\nlines\n": b"two\nlines", "gr\u00fcn\n".encode(): "gr\u00fcn".encode(), b"\t\n": b"\t",
}
# fmt: on


@pytest.mark.parametrize("content", PASSPHRASES)
def test_exactly_one_line_end_is_no_part_of_a_passphrase(tmp_path, content):
    """docs/security.md 2.6, keys at rest: one rule for every command."""
    file = tmp_path / "pass"
    file.write_bytes(content)
    file.chmod(0o600)
    assert read_passphrase(file, {"EDGEFL_KEY_PASSPHRASE": "not this one"}) == PASSPHRASES[content]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o620, 0o602, 0o666, 0o400, 0o600])
def test_a_passphrase_that_others_can_read_is_refused(tmp_path, mode):
    """docs/security.md 2.6, keys at rest: as for the key that it opens."""
    file = tmp_path / "pass"
    file.write_bytes(b"correct horse\n")
    file.chmod(mode)
    if mode & 0o077 == 0:
        assert read_passphrase(file, {}) == b"correct horse"
        return
    with pytest.raises(StorageError, match="chmod 600") as refused:
        read_passphrase(file, {})
    assert refused.value.code == "permissions" and "correct horse" not in str(refused.value)


def test_a_variable_that_names_a_file_is_warned_of(tmp_path, caplog):
    """It is the passphrase itself, as ever, and is not repeated; what names no file is as silent as before."""
    file = tmp_path / "pass"
    file.write_bytes(b"correct horse\n")
    assert read_passphrase(None, {"EDGEFL_KEY_PASSPHRASE": str(file)}) == str(file).encode()
    assert "--passphrase-file" in caplog.text and str(file) not in caplog.text
    caplog.clear()
    for words in ("correct horse", "x" * 5000, "a\0b", str(tmp_path)):
        assert read_passphrase(None, {"EDGEFL_KEY_PASSPHRASE": words}) == words.encode()
    assert not caplog.records


def test_where_a_passphrase_comes_from(tmp_path):
    """docs/design.md, section 5: file, else environment, else none; an empty file is a mistake and not \"none\"."""
    assert read_passphrase(None, {"EDGEFL_KEY_PASSPHRASE": " as it is\n"}) == b" as it is\n"
    assert read_passphrase(None, {"EDGEFL_KEY_PASSPHRASE": ""}) is None
    assert read_passphrase(None, {}) is None
    for content in (b"", b"\n", b"\r\n"):
        (tmp_path / "pass").write_bytes(content)
        (tmp_path / "pass").chmod(0o600)
        with pytest.raises(KeyMaterialError, match="empty") as refused:
            read_passphrase(tmp_path / "pass", {"EDGEFL_KEY_PASSPHRASE": "x"})
        assert refused.value.code == "no_passphrase"
    (tmp_path / "pass").write_bytes(bytes(4097))
    with pytest.raises(StorageError):
        read_passphrase(tmp_path / "pass", {})
    with pytest.raises(StorageError):
        read_passphrase(tmp_path / "nowhere", {})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nevus.edgefl", b"PK\x03\x04" + bytes(7 << 20), "is a model, not its signer's public key: name the file"),
        ("downloaded", b"PK\x03\x04small", "is a model, not its signer's public key"),
        ("photo.jpg", bytes(1 << 20), "is not a public key; give the signer's file signing.pub"),
        ("note.txt", b"hello", "is not an Ed25519 public key; give the file signing.pub"),
    ],
)
def test_what_is_named_in_place_of_a_public_key_is_told(tmp_path, name, content, said):
    """A model was said to be longer than 16,384 bytes allowed, which tells nobody what to name."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KeyMaterialError) as error:
        read_public_key(tmp_path / name)
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1

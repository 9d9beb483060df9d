"""Whose bundles a device runs."""

import base64
import datetime

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgefl_client.home import Home
from edgefl_client.trust.trusted_keys import add_trusted, list_trusted, read_public_key, remove_trusted
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import KeyMaterialError, StorageError

DAY = datetime.date(2026, 1, 2)
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
RAW = PRIVATE.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
PEM = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

# The 14 encodings of points of low order on edwards25519 (y = 0, ±1 and the order-8 points, with non-canonical
# forms and both signs), as listed by the community test vectors for Ed25519 edge cases.
_P = 2**255 - 19
_Y8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
LOW_ORDER = [
    (y | sign << 255).to_bytes(32, "little") for y in (0, 1, _P - 1, _P, _P + 1, _Y8, _P - _Y8) for sign in (0, 1)
]


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.mark.parametrize(
    "content", [RAW, RAW.hex().encode(), RAW.hex().upper().encode() + b"\n", base64.b64encode(RAW), PEM]
)
def test_every_form_of_a_key_file(tmp_path, content):
    path = tmp_path / "signing.pub"
    path.write_bytes(content)
    assert read_public_key(str(path)).public == RAW


def test_a_key_given_as_text():
    assert read_public_key(RAW.hex()).public == RAW


@pytest.mark.parametrize(
    "given",
    [
        "nowhere.pub",
        "",
        "zz" * 32,
        RAW.hex()[:-2],
        "x" * 5000,
        "-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----",
        X25519PrivateKey.generate().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
        "a\0b",
    ],
)
def test_anything_else_is_one_sentence(given):
    with pytest.raises(KeyMaterialError, match=r"signing\.pub") as error:
        read_public_key(given)
    assert len(str(error.value).splitlines()) == 1


def test_a_model_given_as_a_key_is_told(tmp_path):
    """`--trust nevus.edgefl`: which file it must be."""
    (tmp_path / "nevus.edgefl").write_bytes(b"PK" + bytes(1 << 20))
    with pytest.raises(KeyMaterialError, match=r"is a model, not its signer's public key: name the file signing\.pub"):
        read_public_key(str(tmp_path / "nevus.edgefl"))


@pytest.mark.parametrize("public", LOW_ORDER)
def test_low_order_keys_never_enter(tmp_path, public):
    """docs/security.md, decision 5, check 9: 14/14 refused when trust is given."""
    assert len(set(LOW_ORDER)) == 14
    path = tmp_path / "signing.pub"
    path.write_bytes(public)
    with pytest.raises(KeyMaterialError) as error:
        read_public_key(str(path))
    assert error.value.code in ("low_order_key", "bad_key")


def test_add_list_remove(home):
    assert list_trusted(home) == []
    assert not home.root.exists()  # looking creates nothing
    key = PublicSigningKey(RAW)
    add_trusted(home, key, "lab", DAY)
    add_trusted(home, key, "renamed", DAY)
    (entry,) = list_trusted(home)
    assert (entry.name, entry.added, entry.key) == ("renamed", "2026-01-02", key)
    assert home.root.stat().st_mode & 0o777 == 0o700
    assert home.trust_file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyMaterialError, match=r"no trusted signers .*, or the first 8 or more digits of a key id"):
        remove_trusted(home, "lab")
    with pytest.raises(KeyMaterialError, match="first 8 or more digits"):
        remove_trusted(home, key.key_id[:7])
    assert remove_trusted(home, key.key_id[:8]).name == "renamed"
    assert list_trusted(home) == []


def test_an_ambiguous_name_removes_nothing(home):
    other = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    for public in (RAW, other):
        add_trusted(home, PublicSigningKey(public), "lab", DAY)
    with pytest.raises(KeyMaterialError, match="2 trusted signers"):
        remove_trusted(home, "lab")
    assert len(list_trusted(home)) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"keys": 3}', b'{"keys": [{}]}', b'{"keys": [{"public": "00"}]}', b"[" * 5000, b"\xff"],
)
def test_a_damaged_list_trusts_nobody(home, content):
    """docs/security.md, check 60: typed error, never an empty list in silence."""
    home.prepare()
    home.trust_file.write_bytes(content)
    with pytest.raises((StorageError, KeyMaterialError)):
        list_trusted(home)


@pytest.mark.parametrize("name", ["a\nb", "x" * 65, "\x1b[31m"])
def test_a_name_is_printable(home, name):
    """docs/security.md, check 42: log and list lines stay one line each."""
    with pytest.raises(KeyMaterialError, match="name"):
        add_trusted(home, PublicSigningKey(RAW), name, DAY)

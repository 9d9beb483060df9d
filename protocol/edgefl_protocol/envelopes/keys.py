"""Signing keys (Ed25519, RFC 8032) and sealing keys (HPKE, RFC 9180): one key, one purpose.

Guarantees:
    A key object that exists is usable: low-order and malformed public keys are refused when they enter
    (docs/security.md 0.5). `cryptography` itself loads low-order Ed25519 keys and accepts forged signatures under them.
    A key id is SHA-256(PAE(suite, purpose, public key)): it commits to the key, its suite and its use.
    Secrets never appear in `repr`.

Suites of sealing keys: 1 = X25519, 2 = ML-KEM-768 with X25519 (X-Wing, KEM 0x647A); both HKDF-SHA256 and
ChaCha20-Poly1305. Public bytes of suite 2: ML-KEM key (1184), then X25519 key (32). Secret: ML-KEM seed (64), then
X25519 scalar (32). `cryptography` has no file form for a suite-2 key, so `key_files` holds ours.
"""

import hashlib
import hmac
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import cryptography
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from edgefl_protocol.distribution import require
from edgefl_protocol.errors import KeyMaterialError, OpenError, SignatureError
from edgefl_protocol.pae import pae

require("cryptography", cryptography.__version__)

SUITE_X25519: Final = 1
SUITE_XWING: Final = 2
DEFAULT_SUITE: Final = SUITE_XWING
PUBLIC_BYTES: Final = {SUITE_X25519: 32, SUITE_XWING: 1184 + 32}
SECRET_BYTES: Final = {SUITE_X25519: 32, SUITE_XWING: 64 + 32}
SEAL_OVERHEAD: Final = {SUITE_X25519: 32 + 16, SUITE_XWING: 1120 + 16}  # bytes: encapsulated key and tag
SIGNATURE_BYTES: Final = 64

_SIGNING_SUITE: Final = 1  # Ed25519; the number leaves room for another scheme
_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PRIME: Final = 2**255 - 19
# y coordinate of the four points of order 8; with y = 0, 1, −1 these are all points of low order (14 encodings).
_Y_ORDER_8: Final = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_HPKE: Final = {
    suite: hpke.Suite(kem, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
    for suite, kem in ((SUITE_X25519, hpke.KEM.X25519), (SUITE_XWING, hpke.KEM.MLKEM768_X25519))
}
# Any clamped scalar is a multiple of 8, so its product with a low-order point is zero, which `exchange` refuses.
_PROBE: Final = X25519PrivateKey.from_private_bytes(bytes(range(32)))


@dataclass(frozen=True)
class PublicSigningKey:
    """An Ed25519 public key.

    Raises:
        KeyMaterialError: wrong length, a non-canonical encoding, or one of the 14 encodings of low order.
    """

    public: bytes  # 32 bytes, RFC 8032 encoding

    def __post_init__(self) -> None:
        if type(self.public) is not bytes or len(self.public) != 32:
            raise KeyMaterialError("an Ed25519 public key has 32 bytes")
        y = int.from_bytes(self.public, "little") & (2**255 - 1)  # the top bit is the sign of x
        if y % _PRIME in (0, 1, _PRIME - 1, _Y_ORDER_8, _PRIME - _Y_ORDER_8):
            raise KeyMaterialError("this Ed25519 key is unsafe (low order): anybody can sign with it", "low_order_key")
        if y >= _PRIME:
            raise KeyMaterialError("this Ed25519 key is not in its canonical encoding")

    @cached_property
    def key_id(self) -> str:
        """64 hex digits that name this key and its purpose."""
        return _key_id(_SIGNING_SUITE, b"sign", self.public)

    def verify(self, signature: bytes, label: str, *parts: bytes) -> None:
        """Check a signature over PAE(label, parts).

        Raises:
            SignatureError: it was not made by this key over exactly this.
        """
        try:
            Ed25519PublicKey.from_public_bytes(self.public).verify(signature, pae(label.encode("ascii"), *parts))
        except InvalidSignature:
            raise SignatureError(
                f"the signature was not made by the key {self.key_id[:16]}… over this content"
            ) from None


class SigningKey:
    """An Ed25519 private key."""

    def __init__(self, seed: bytes) -> None:
        """Make the key from its 32-byte seed."""
        if type(seed) is not bytes or len(seed) != 32:
            raise KeyMaterialError("an Ed25519 seed has 32 bytes")
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = PublicSigningKey(self._key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"SigningKey(key_id={self.key_id[:16]}…)"

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self.public_key.public

    @property
    def key_id(self) -> str:
        """64 hex digits that name this key and its purpose."""
        return self.public_key.key_id

    @property
    def seed(self) -> bytes:
        """The secret, 32 bytes."""
        return self._key.private_bytes_raw()

    def sign(self, label: str, *parts: bytes) -> bytes:
        """Return the 64-byte signature over PAE(label, parts); the label keeps uses of a key apart."""
        return self._key.sign(pae(label.encode("ascii"), *parts))


@dataclass(frozen=True)
class PublicSealingKey:
    """A key to seal for.

    Raises:
        KeyMaterialError: unknown suite, wrong length, or an X25519 part of low order.
    """

    suite: int  # 1 or 2
    public: bytes  # 32 bytes (suite 1) or 1216 bytes (suite 2)

    def __post_init__(self) -> None:
        _check_suite(self.suite)
        if type(self.public) is not bytes or len(self.public) != PUBLIC_BYTES[self.suite]:
            raise KeyMaterialError(f"a public sealing key of suite {self.suite} has {PUBLIC_BYTES[self.suite]} bytes")
        try:
            _PROBE.exchange(X25519PublicKey.from_public_bytes(self.public[-32:]))
        except ValueError:
            raise KeyMaterialError(
                "this X25519 key is unsafe (low order): anybody can open what is sealed for it", "low_order_key"
            ) from None
        if self.suite == SUITE_XWING:
            _load_mlkem(self.public[:-32])

    @classmethod
    def checked_before(cls, suite: int, public: bytes) -> Self:
        """Take a key again that was one of this class before, such as a member's from the store: to check costs more
        than to load it. What was never checked does not belong here."""
        key = object.__new__(cls)
        object.__setattr__(key, "suite", suite)
        object.__setattr__(key, "public", public)
        return key

    @cached_property
    def key_id(self) -> str:
        """64 hex digits that name this key, its suite and its purpose."""
        return _key_id(self.suite, b"seal", self.public)

    def seal(self, plaintext: bytes, info: bytes) -> bytes:
        """Return HPKE `enc || ciphertext` (base mode, single shot) bound to `info`."""
        classical = X25519PublicKey.from_public_bytes(self.public[-32:])
        if self.suite == SUITE_X25519:
            return _HPKE[self.suite].encrypt(plaintext, classical, info)
        hybrid = hpke.MLKEM768X25519PublicKey(_load_mlkem(self.public[:-32]), classical)
        return _HPKE[self.suite].encrypt(plaintext, hybrid, info)


class SealingKey:
    """The private half of a sealing key."""

    def __init__(self, suite: int, secret: bytes) -> None:
        """Make the key from its secret: 32 bytes (suite 1) or 64 + 32 bytes (suite 2)."""
        _check_suite(suite)
        if type(secret) is not bytes or len(secret) != SECRET_BYTES[suite]:
            raise KeyMaterialError(f"a secret sealing key of suite {suite} has {SECRET_BYTES[suite]} bytes")
        self.secret = secret
        self._key: X25519PrivateKey | hpke.MLKEM768X25519PrivateKey
        classical = X25519PrivateKey.from_private_bytes(secret[-32:])
        public = classical.public_key().public_bytes_raw()
        if suite == SUITE_X25519:
            self._key = classical
        else:
            lattice = MLKEM768PrivateKey.from_seed_bytes(secret[:-32])
            public = lattice.public_key().public_bytes_raw() + public
            self._key = hpke.MLKEM768X25519PrivateKey(lattice, classical)
        self.public_key = PublicSealingKey(suite, public)

    def __repr__(self) -> str:
        return f"SealingKey(suite={self.suite}, key_id={self.key_id[:16]}…)"

    @property
    def suite(self) -> int:
        """1 or 2."""
        return self.public_key.suite

    @property
    def public(self) -> bytes:
        """The public key: 32 bytes (suite 1) or 1216 bytes (suite 2)."""
        return self.public_key.public

    @property
    def key_id(self) -> str:
        """64 hex digits that name this key, its suite and its purpose."""
        return self.public_key.key_id

    def open(self, sealed: bytes | memoryview, info: bytes) -> bytes:
        """Return what was sealed for this key under this `info`.

        Raises:
            OpenError: another key, another `info`, or changed bytes.
        """
        try:
            return _HPKE[self.suite].decrypt(sealed, self._key, info)
        except (InvalidTag, ValueError):  # ValueError: an encapsulated X25519 key of low order
            raise OpenError("the sealed part does not open with this key and header") from None


def generate_signing_key() -> SigningKey:
    """Return a new Ed25519 key."""
    return SigningKey(Ed25519PrivateKey.generate().private_bytes_raw())


def generate_sealing_key(suite: int = DEFAULT_SUITE) -> SealingKey:
    """Return a new sealing key."""
    _check_suite(suite)
    secret = X25519PrivateKey.generate().private_bytes_raw()
    if suite == SUITE_XWING:
        secret = MLKEM768PrivateKey.generate().private_bytes_raw() + secret
    return SealingKey(suite, secret)


def fingerprint(federation: str, signing_public: bytes, sealing_public: bytes) -> str:
    """Return what two people compare, per federation: 100 bits as 20 Crockford base32 characters."""
    hashed = hashlib.sha256(pae(b"eflk1/fp", federation.encode(), signing_public, sealing_public)).digest()
    bits = int.from_bytes(hashed, "big") >> (256 - 100)
    return "".join(_CROCKFORD[(bits >> shift) & 31] for shift in range(95, -1, -5))


def same_fingerprint(typed: str, computed: str) -> bool:
    """Tell whether a typed fingerprint is the computed one; case, spaces, hyphens and O/0, I/L/1 do not matter."""
    plain = typed.upper().replace("-", "").replace(" ", "").translate(str.maketrans("OIL", "011"))
    return hmac.compare_digest(plain.encode(), computed.encode())


def _key_id(suite: int, purpose: bytes, public: bytes) -> str:
    return hashlib.sha256(pae(bytes([suite]), purpose, public)).hexdigest()


def _check_suite(suite: int) -> None:
    if type(suite) is not int or suite not in PUBLIC_BYTES:
        raise KeyMaterialError(f"suite {suite!r} is unknown; 1 and 2 are allowed", "unknown_suite")


def _load_mlkem(public: bytes) -> MLKEM768PublicKey:
    try:
        return MLKEM768PublicKey.from_public_bytes(public)
    except ValueError:
        raise KeyMaterialError("the ML-KEM-768 part of this public key is malformed") from None

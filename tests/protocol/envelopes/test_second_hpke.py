"""A second implementation of HPKE and of its KEMs opens our envelopes, and we open its: docs/security.md check 12.

pyhpke has the key schedule and X25519. It knows no X-Wing, so suite 2 gets a KEM of fifteen lines around kyber-py's
ML-KEM (draft-connolly-cfrg-xwing-kem 5.3, 5.4; draft-ietf-hpke-pq 4.1). Header and PAE are written anew here.
"""

import hashlib
import json
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from kyber_py.ml_kem import ML_KEM_768
from pyhpke import AEADId, CipherSuite, KDFId, KEMId, KEMKey
from pyhpke.aead import AEAD
from pyhpke.kdf import KDF

ENC_BYTES = {1: 32, 2: 1120}
IDS = {1: 0x0020, 2: 0x647A}
LABEL = bytes.fromhex("5c2e2f2f5e5c")  # of X-Wing


class XWing:
    """The KEM of suite 2; a public key is (ML-KEM, X25519), a secret one (ML-KEM seed, X25519)."""

    id = SimpleNamespace(value=IDS[2])

    def encap(self, public: tuple[bytes, bytes], *_: Any) -> tuple[bytes, bytes]:
        lattice, ciphertext = ML_KEM_768.encaps(public[0])
        own = X25519PrivateKey.generate()
        point = own.public_key().public_bytes_raw()
        classical = own.exchange(X25519PublicKey.from_public_bytes(public[1]))
        return self.combined(lattice, classical, point, public[1]), ciphertext + point

    def decap(self, enc: bytes, secret: tuple[bytes, bytes], *_: Any) -> bytes:
        own = X25519PrivateKey.from_private_bytes(secret[1])
        lattice = ML_KEM_768.decaps(ML_KEM_768.key_derive(secret[0])[1], enc[:-32])
        classical = own.exchange(X25519PublicKey.from_public_bytes(enc[-32:]))
        return self.combined(lattice, classical, enc[-32:], own.public_key().public_bytes_raw())

    @staticmethod
    def combined(lattice: bytes, classical: bytes, point: bytes, public: bytes) -> bytes:
        return hashlib.sha3_256(lattice + classical + point + public + LABEL).digest()


def second(suite: int) -> CipherSuite:
    if suite == 1:
        return CipherSuite.new(KEMId.DHKEM_X25519_HKDF_SHA256, KDFId.HKDF_SHA256, AEADId.CHACHA20_POLY1305)
    named = b"HPKE" + struct.pack(">HHH", IDS[2], 1, 3)
    return CipherSuite(XWing(), KDF(KDFId.HKDF_SHA256, named), AEAD(AEADId.CHACHA20_POLY1305))  # type: ignore[arg-type]


def public_key(suite: int, public: bytes) -> Any:
    classical = KEMKey.from_pyca_cryptography_key(X25519PublicKey.from_public_bytes(public[-32:]))
    return classical if suite == 1 else (public[:-32], public[-32:])


def secret_key(suite: int, secret: bytes) -> Any:
    classical = KEMKey.from_pyca_cryptography_key(X25519PrivateKey.from_private_bytes(secret[-32:]))
    return classical if suite == 1 else (secret[:-32], secret[-32:])


def encoded(*parts: bytes) -> bytes:
    """docs/security.md 2.2: u64 LE count, then for each part u64 LE length and its bytes."""
    return struct.pack("<Q", len(parts)) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def opened_by_the_second(world: Any, envelope: bytes) -> bytes:
    """Open an envelope with nothing of ours but the recipient's secret; returns the payload, its signature verified."""
    fixed, (length,) = envelope[:5], struct.unpack("<H", envelope[5:7])
    header, sealed = envelope[7 : 7 + length], envelope[7 + length :]
    info, enc = encoded(b"efl1/seal", fixed, header), sealed[: ENC_BYTES[world.suite]]
    secret = secret_key(world.suite, world.coordinator_box.secret)
    plain: bytes = second(world.suite).create_recipient_context(enc, secret, info).open(sealed[len(enc) :])
    key = Ed25519PrivateKey.from_private_bytes(world.site.seed).public_key()
    key.verify(plain[:64], encoded(b"efl1/sign", fixed, header, plain[64:]))
    return plain[64:]


def sealed_by_the_second(world: Any, payload: bytes, seq: int) -> bytes:
    """Seal an envelope with nothing of ours but the keys."""
    fields = {**world.fields(seq=seq), "v": 1, "skid": world.site.key_id, "rkid": world.coordinator_box.key_id,
              "mid": f"{seq:032x}", "len": len(payload)}  # fmt: skip
    header, fixed = json.dumps(fields).encode("ascii"), b"EFL1" + bytes([world.suite])
    signature = Ed25519PrivateKey.from_private_bytes(world.site.seed).sign(
        encoded(b"efl1/sign", fixed, header, payload)
    )
    info = encoded(b"efl1/seal", fixed, header)
    enc, context = second(world.suite).create_sender_context(
        public_key(world.suite, world.coordinator_box.public), info
    )
    return fixed + struct.pack("<H", len(header)) + header + enc + context.seal(signature + payload)


def payloads(count: int) -> list[bytes]:
    """Of every length from 0 on, so that blocks of the cipher are full and begun."""
    return [hashlib.shake_256(bytes([number])).digest(7 * number) for number in range(count)]


@pytest.mark.parametrize(("suite", "count"), [(1, 100), (2, 5), pytest.param(2, 100, marks=pytest.mark.slow)])
def test_each_opens_what_the_other_sealed(worlds, suite, count) -> None:
    """Check 12: 100 of 100 in both directions, in both suites; kyber-py takes 30 ms each, so 5 of suite 2 go first."""
    world = worlds[suite - 1]
    assert world.suite == suite
    for number, payload in enumerate(payloads(count)):
        assert opened_by_the_second(world, world.request(payload, seq=number + 1)) == payload
        assert world.open(sealed_by_the_second(world, payload, number + 1)).payload == payload


@pytest.mark.parametrize("suite", [1, 2])
def test_the_second_opens_nothing_under_another_header(worlds, suite) -> None:
    """The oracle can say no: one changed byte of the header is another `info`."""
    world = worlds[suite - 1]
    envelope = bytearray(world.request(b"payload"))
    envelope[20] ^= 1
    with pytest.raises(Exception, match=r"(?i)open"):
        opened_by_the_second(world, bytes(envelope))

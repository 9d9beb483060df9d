"""Signing and sealing keys. Sources: RFC 8032, RFC 7748, RFC 9180, draft-ietf-hpke-pq, Wycheproof; docs/security.md."""

import hashlib
import json
import os
import re
from pathlib import Path

import cryptography_vectors
import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.bindings._rust import openssl
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from edgefl_protocol import (
    KeyMaterialError,
    PublicSealingKey,
    PublicSigningKey,
    SealingKey,
    SigningKey,
    fingerprint,
    generate_sealing_key,
    generate_signing_key,
    same_fingerprint,
)
from edgefl_protocol.errors import OpenError, SignatureError

P = 2**255 - 19
VECTORS = Path(cryptography_vectors.__file__).parent
WYCHEPROOF = os.environ.get("EDGEFL_VECTORS", "")
needs_wycheproof = pytest.mark.skipif(
    not WYCHEPROOF, reason="EDGEFL_VECTORS (folder with the Wycheproof files) is unset"
)

RFC8032 = {  # name: seed, public key, message, signature (section 7.1; the 1023-byte message is the last of sign.input)
    "TEST 1": (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b",
    ),
    "TEST 2": (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
        "b00d291612bb0c00",
    ),
    "TEST 3": (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28d"
        "c027beceea1ec40a",
    ),
    "TEST SHA(abc)": (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        hashlib.sha512(b"abc").hexdigest(),
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17a"
        "d9bef1177331a704",
    ),
}


def rfc8032_vectors():
    last = (VECTORS / "asymmetric/Ed25519/sign.input").read_text().strip().splitlines()[-1].split(":")
    assert len(last[2]) == 2 * 1023
    return [*RFC8032.values(), (last[0][:64], last[1], last[2], last[3][:128])]


def test_ed25519_vectors_of_rfc_8032():
    """docs/security.md check 1: RFC 8032 section 7.1, 5 of 5 byte-equal."""
    agreed = 0
    for seed, public, message, signature in rfc8032_vectors():
        key = SigningKey(bytes.fromhex(seed))
        assert key.public.hex() == public
        assert Ed25519PrivateKey.from_private_bytes(key.seed).sign(bytes.fromhex(message)).hex() == signature
        agreed += 1
    assert agreed == 5


def wycheproof(name):
    return json.loads((Path(WYCHEPROOF) / name).read_text())["testGroups"]


@pytest.mark.data
@needs_wycheproof
def test_wycheproof_ed25519():
    """docs/security.md check 2: 151 of 151, 88 accept and 63 reject, public keys through our loader."""
    accepted = rejected = 0
    for group in wycheproof("ed25519_test.json"):
        key = Ed25519PublicKey.from_public_bytes(PublicSigningKey(bytes.fromhex(group["publicKey"]["pk"])).public)
        for case in group["tests"]:
            try:
                key.verify(bytes.fromhex(case["sig"]), bytes.fromhex(case["msg"]))
                verdict, accepted = "valid", accepted + 1
            except InvalidSignature:
                verdict, rejected = "invalid", rejected + 1
            assert verdict == case["result"], case["tcId"]
    assert (accepted, rejected) == (88, 63)


@pytest.mark.data
@needs_wycheproof
def test_wycheproof_x25519():
    """docs/security.md check 2: 487 secrets match; the 31 keys that give a zero secret are refused by our loader."""
    matched = refused = 0
    for group in wycheproof("x25519_test.json"):
        for case in group["tests"]:
            try:
                public = PublicSealingKey(1, bytes.fromhex(case["public"])).public
            except KeyMaterialError as error:
                assert error.code == "low_order_key" and case["shared"] == "00" * 32, case["tcId"]
                refused += 1
                continue
            private = X25519PrivateKey.from_private_bytes(bytes.fromhex(case["private"]))
            shared = private.exchange(X25519PublicKey.from_public_bytes(public))
            assert shared.hex() == case["shared"], case["tcId"]
            matched += 1
    assert (matched, refused) == (487, 31)


@pytest.mark.data
@needs_wycheproof
def test_wycheproof_chacha20_poly1305():
    """docs/security.md check 2: 325 of 325 of the cipher under every seal."""
    agreed = 0
    for group in wycheproof("chacha20_poly1305_test.json"):
        for case in group["tests"]:
            field = {name: bytes.fromhex(case[name]) for name in ("key", "iv", "aad", "msg", "ct", "tag")}
            try:
                text = ChaCha20Poly1305(field["key"]).decrypt(field["iv"], field["ct"] + field["tag"], field["aad"])
                verdict = "valid" if text == field["msg"] else "wrong text"
            except (InvalidTag, ValueError):
                verdict = "invalid"
            assert verdict == case["result"], case["tcId"]
            agreed += 1
    assert agreed == 325


KDFS = {1: hpke.KDF.HKDF_SHA256, 3: hpke.KDF.HKDF_SHA512, 17: hpke.KDF.SHAKE256}
AEADS = {1: hpke.AEAD.AES_128_GCM, 2: hpke.AEAD.AES_256_GCM, 3: hpke.AEAD.CHACHA20_POLY1305}


def hpke_vectors(name, kem_id):
    cases = json.loads((VECTORS / "HPKE" / name).read_text())
    return [case for case in cases if case["mode"] == 0 and case["kem_id"] == kem_id and case["aead_id"] in AEADS]


def opened(case, kem, private):
    """Open a vector's first message; it has associated data, which only the library's test helper takes."""
    suite = hpke.Suite(kem, KDFS[case["kdf_id"]], AEADS[case["aead_id"]])
    first = case["encryptions"][0]
    sealed = bytes.fromhex(case["enc"] + first["ct"])
    info, aad = bytes.fromhex(case["info"]), bytes.fromhex(first["aad"])
    return openssl.hpke._decrypt_with_aad(suite, sealed, private, info, aad) == bytes.fromhex(first["pt"])


def test_hpke_x25519_vectors_of_rfc_9180():
    """docs/security.md check 3: RFC 9180 base mode with X25519, 6 of 6, with the key that our loader built."""
    cases = hpke_vectors("test-vectors.json", 0x20)
    for case in cases:
        key = SealingKey(1, bytes.fromhex(case["skRm"]))
        assert key.public.hex() == case["pkRm"]
        assert opened(case, hpke.KEM.X25519, key._key)
    assert len(cases) == 6


def test_hpke_hybrid_vectors_and_the_seed_conversion():
    """docs/security.md check 3: X-Wing (0x647A), 2 of 2; SHAKE256(seed) gives both secret keys and the public key."""
    cases = hpke_vectors("hpke-pq-test-vectors.json", 0x647A)
    for case in cases:
        key = SealingKey(2, hashlib.shake_256(bytes.fromhex(case["skRm"])).digest(96))
        assert key.public.hex() == case["pkRm"]
        assert opened(case, hpke.KEM.MLKEM768_X25519, key._key)
    assert len(cases) == 2


# Points of low order, by arithmetic of our own -----------------------------------------------------------------------

D = -121665 * pow(121666, -1, P) % P
ROOT = pow(2, (P - 1) // 4, P)  # a square root of -1


def add(one, two):
    """Add points of the twisted Edwards curve (RFC 8032, 5.1.4, affine)."""
    (a, b), (c, d) = one, two
    k = D * a * b * c * d % P
    return (a * d + b * c) * pow(1 + k, -1, P) % P, (b * d + a * c) * pow(1 - k, -1, P) % P


def low_order_points():
    """Return the 8 points of the torsion group, found by multiplying points by the prime order L."""
    order = 2**252 + 27742317777372353535851937790883648493
    y = 2
    while True:
        y += 1
        square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
        x = pow(square, (P + 3) // 8, P)
        x = x if x * x % P == square else x * ROOT % P
        if x * x % P != square:
            continue
        result, point, scalar = (0, 1), (x, y), order
        while scalar:
            result = add(result, point) if scalar & 1 else result
            point, scalar = add(point, point), scalar >> 1
        group, step = [(0, 1)], result
        while step != (0, 1):
            group.append(step)
            step = add(step, result)
        if len(group) == 8:
            return group


def low_order_encodings():
    """Return all 32-byte strings that decode to a low-order point: y or y + p, either sign where x is 0."""
    found = set()
    for x, y in low_order_points():
        for value in (y, y + P):
            for sign in (0, 1):
                if value < 2**255 and (x == 0 or x & 1 == sign):
                    found.add((value | sign << 255).to_bytes(32, "little"))
    return sorted(found)


def test_there_are_fourteen_low_order_encodings_and_all_are_refused():
    """docs/security.md check 9: 14 of 14 Ed25519 encodings (8 and 6 alternative ones, as CCTV counts them)."""
    encodings = low_order_encodings()
    assert len(encodings) == 14
    for encoding in encodings:
        with pytest.raises(KeyMaterialError) as caught:
            PublicSigningKey(encoding)
        assert caught.value.code == "low_order_key"


def test_the_refusal_matters_because_the_library_accepts_a_forgery():
    """docs/security.md 0.5: under the identity key, R = identity and S = 0 sign every message."""
    identity, forged = (1).to_bytes(32, "little"), (1).to_bytes(32, "little") + bytes(32)
    assert Ed25519PublicKey.from_public_bytes(identity).verify(forged, b"anything at all") is None
    with pytest.raises(InvalidSignature):  # which it says of a key as keys are made
        Ed25519PrivateKey.generate().public_key().verify(forged, b"anything at all")


@pytest.mark.parametrize("suite", [1, 2])
def test_low_order_x25519_keys_are_refused_in_both_suites(suite):
    """docs/security.md check 9: all low-order u, canonical or not, with and without the ignored top bit."""
    us = {(1 + y) * pow(1 - y, -1, P) % P for _, y in low_order_points() if y != 1}
    us |= {0, P - 1}  # the point at infinity encodes as 0; −1 has order 4 on the twist
    assert len(us) == 5 and 1 in us
    encodings = {v | top << 255 for u in us for v in (u, u + P) if v < 2**255 for top in (0, 1)}
    assert len(encodings) == 14
    prefix = b"" if suite == 1 else generate_sealing_key(2).public[:-32]
    for value in encodings:
        with pytest.raises(KeyMaterialError) as caught:
            PublicSealingKey(suite, prefix + value.to_bytes(32, "little"))
        assert caught.value.code == "low_order_key"


def test_a_key_that_is_not_canonical_is_refused():
    for extra in range(2, 19):
        with pytest.raises(KeyMaterialError):
            PublicSigningKey((P + extra).to_bytes(32, "little"))


@pytest.mark.parametrize("suite", [1, 2])
def test_what_is_sealed_for_a_key_opens_with_it_alone_and_under_the_same_info(suite):
    """RFC 9180: base mode, bound to info; changed bytes do not open."""
    key, other = generate_sealing_key(suite), generate_sealing_key(suite)
    sealed = key.public_key.seal(b"text", b"info")
    assert key.open(sealed, b"info") == b"text"
    wrong = [(other, sealed, b"info"), (key, sealed, b"Info"), (key, sealed[:-1], b"info"), (key, b"", b"info")]
    wrong.append((key, bytes(32) + sealed[32:], b"info"))  # an encapsulated key of low order (suite 1)
    for opener, data, info in wrong:
        with pytest.raises(OpenError):
            opener.open(data, info)


def test_a_signature_is_bound_to_its_label_and_to_the_borders_of_its_parts():
    """docs/security.md 2.4: one label, one use; PAE leaves no byte to move between fields."""
    key = generate_signing_key()
    signature = key.sign("efl1/sign", b"ab", b"c")
    key.public_key.verify(signature, "efl1/sign", b"ab", b"c")
    for label, parts in [("eflb1/manifest", (b"ab", b"c")), ("efl1/sign", (b"a", b"bc")), ("efl1/sign", (b"abc",))]:
        with pytest.raises(SignatureError):
            key.public_key.verify(signature, label, *parts)


def test_a_key_id_commits_to_the_key_its_suite_and_its_use():
    """docs/security.md 2.2: skid and rkid are SHA-256 over suite, purpose and public key, all 256 bits."""

    def pae(*parts):
        return len(parts).to_bytes(8, "little") + b"".join(len(p).to_bytes(8, "little") + p for p in parts)

    raw = generate_signing_key().public
    signing, sealing = PublicSigningKey(raw), PublicSealingKey(1, raw)
    assert signing.key_id == hashlib.sha256(pae(b"\x01", b"sign", raw)).hexdigest()
    assert sealing.key_id == hashlib.sha256(pae(b"\x01", b"seal", raw)).hexdigest() != signing.key_id
    hybrid = generate_sealing_key(2)
    assert hybrid.key_id == hashlib.sha256(pae(b"\x02", b"seal", hybrid.public)).hexdigest()


def test_a_fingerprint_is_a_hundred_bits_in_crockford_base32():
    """docs/security.md 2.6, step 3: 20 characters of SHA-256(PAE("eflk1/fp", fed, signing key, sealing key))."""
    signing, sealing = bytes(range(32)), bytes(range(32, 64))
    shown = fingerprint("skin", signing, sealing)
    parts = (b"eflk1/fp", b"skin", signing, sealing)
    text = len(parts).to_bytes(8, "little") + b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    bits = bin(int.from_bytes(hashlib.sha256(text).digest(), "big"))[2:].zfill(256)[:100]
    alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    assert shown == "".join(alphabet[int(bits[i : i + 5], 2)] for i in range(0, 100, 5))
    assert re.fullmatch(r"[0-9A-HJKMNP-TV-Z]{20}", shown)
    others = [("Skin", signing, sealing), ("skin", sealing, signing), ("skin", signing, sealing + b"0")]
    assert shown not in [fingerprint(*other) for other in others]


def test_a_typed_fingerprint_may_have_spaces_hyphens_and_mixed_up_letters():
    shown = "0123456789ABCDEFGHJK"
    for typed in (
        "0123-4567-89ab-cdef-ghjk",
        " O1234 56789 ABCDE FGHJK",
        "oI23456789abcdefghjk",
        "0L23456789ABCDEFGHJK",
    ):
        assert same_fingerprint(typed, shown)
    for typed in ("0123456789ABCDEFGHJM", "0123456789ABCDEFGHJ", "", "0123456789ABCDEFGHJKK", "ß"):
        assert not same_fingerprint(typed, shown)


@pytest.mark.parametrize("suite", [0, 3, "1", None, True, 1.0])
def test_an_unknown_suite_is_refused(suite):
    for build in (generate_sealing_key, lambda suite: SealingKey(suite, bytes(32)), lambda s: PublicSealingKey(s, b"")):
        with pytest.raises(KeyMaterialError):
            build(suite)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_keys_of_another_length_are_refused(size):
    for build in (PublicSigningKey, SigningKey, lambda d: SealingKey(1, d), lambda d: PublicSealingKey(2, d)):
        with pytest.raises(KeyMaterialError):
            build(bytes(size))


def test_no_secret_is_shown():
    """docs/security.md check 14, in part: a key in a log line or traceback shows its id and nothing else."""
    signing, sealing = generate_signing_key(), generate_sealing_key(2)
    shown = repr([signing, sealing]) + str(signing) + str(sealing)
    assert signing.seed.hex() not in shown and sealing.secret.hex()[:32] not in shown
    assert repr(signing.seed)[2:10] not in shown

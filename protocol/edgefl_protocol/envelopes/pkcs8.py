"""A private key in PKCS#8, encrypted under a passphrase that is slow to guess.

`cryptography` reads such files, and writes them with 2,048 rounds of PBKDF2 only: a third of a millisecond a guess. So
this module writes the one DER structure itself: PBES2 with scrypt(n=2^14, r=8, p=2) and AES-256-CBC. A guess takes as
many operations as one of a sealing key (`key_files`); the memory is half of that, the most that OpenSSL's tools open.

Source: RFC 5958 (EncryptedPrivateKeyInfo), RFC 8018 A.4 (PBES2), RFC 7914 7 (scrypt in it), X.690 (DER).
"""

import base64
import secrets
from typing import Final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.padding import PKCS7

_INTEGER, _OCTETS, _SEQUENCE = 0x02, 0x04, 0x30
_PBES2: Final = bytes.fromhex("06092a864886f70d01050d")  # object identifiers as DER has them: 1.2.840.113549.1.5.13
_SCRYPT: Final = bytes.fromhex("06092b06010401da47040b")  # 1.3.6.1.4.1.11591.4.11
_AES_256_CBC: Final = bytes.fromhex("060960864801650304012a")  # 2.16.840.1.101.3.4.1.42
_COST, _BLOCK, _PARALLEL, _KEY_BYTES = 1 << 14, 8, 2, 32


def encrypted_pem(private_key: bytes, passphrase: bytes) -> bytes:
    """Encrypt a PrivateKeyInfo in DER, and return it as PEM."""
    salt, start = secrets.token_bytes(16), secrets.token_bytes(16)
    stretched = Scrypt(salt=salt, length=_KEY_BYTES, n=_COST, r=_BLOCK, p=_PARALLEL).derive(passphrase)
    padder = PKCS7(algorithms.AES.block_size).padder()
    cipher = Cipher(algorithms.AES(stretched), modes.CBC(start)).encryptor()
    sealed = cipher.update(padder.update(private_key) + padder.finalize()) + cipher.finalize()
    numbers = b"".join(_der(_INTEGER, _unsigned(one)) for one in (_COST, _BLOCK, _PARALLEL, _KEY_BYTES))
    stretching = _der(_SEQUENCE, _SCRYPT + _der(_SEQUENCE, _der(_OCTETS, salt) + numbers))
    encryption = _der(_SEQUENCE, _AES_256_CBC + _der(_OCTETS, start))
    scheme = _der(_SEQUENCE, _PBES2 + _der(_SEQUENCE, stretching + encryption))
    text = base64.b64encode(_der(_SEQUENCE, scheme + _der(_OCTETS, sealed))).decode("ascii")
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join(
        ["-----BEGIN ENCRYPTED PRIVATE KEY-----", *lines, "-----END ENCRYPTED PRIVATE KEY-----", ""]
    ).encode("ascii")


def is_whole(der: bytes) -> bool:
    """Tell whether bytes are one DER sequence with nothing missing and nothing behind it (X.690 8.1.3)."""
    if len(der) < 2 or der[0] != _SEQUENCE:
        return False
    more = der[1] - 0x80 if der[1] > 0x80 else 0  # bytes that the length takes, where it needs some of its own
    count = int.from_bytes(der[2 : 2 + more], "big") if more else der[1]
    return len(der) == 2 + more + count


def _der(tag: int, content: bytes) -> bytes:
    """A value behind its tag and length."""
    count = len(content)
    if count < 0x80:
        return bytes([tag, count]) + content
    size = count.to_bytes((count.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 + len(size)]) + size + content


def _unsigned(number: int) -> bytes:
    """A whole number above 0 in two's complement."""
    return number.to_bytes(number.bit_length() // 8 + 1, "big")

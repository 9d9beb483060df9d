"""Keys as bytes at rest: private ones with or without a passphrase, public ones as text.

Signing keys: PKCS#8 PEM (RFC 5958, RFC 8410), readable by other tools (`pkcs8`). Sealing keys: a record of our own,
because no standard file holds a hybrid key: base64 between PEM-like lines of

    "EFLK" | version 1 | suite | 0 | secret                                   without a passphrase
    "EFLK" | version 1 | suite | 1 | salt (16) | nonce (12) | sealed secret   with one

The second form seals with ChaCha20-Poly1305 under scrypt(passphrase, salt, n=2^15, r=8, p=1), the first seven bytes as
associated data. Where the bytes lie, and with which file mode, is the caller's business (`durable.read_private`),
as is where the passphrase comes from (`durable.read_passphrase`).
Source: docs/security.md 2.6, keys at rest.
"""

import base64
import binascii
import re
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from edgefl_protocol.durable import FilePath, read_bounded
from edgefl_protocol.envelopes.keys import SECRET_BYTES, PublicSigningKey, SealingKey, SigningKey
from edgefl_protocol.envelopes.pkcs8 import encrypted_pem, is_whole
from edgefl_protocol.errors import KeyMaterialError, StorageError

MAX_KEY_FILE_BYTES: Final = 16 << 10

_BEGIN: Final = "-----BEGIN EDGEFL SEALING KEY-----"
_END: Final = "-----END EDGEFL SEALING KEY-----"
_PKCS8_BEGIN: Final = re.compile(rb"-----BEGIN ((?:ENCRYPTED )?PRIVATE KEY)-----")  # RFC 7468, 10 and 11
_MAGIC: Final = b"EFLK\x01"
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_ZIP: Final = b"PK"  # begins a bundle


def signing_key_to_pem(key: SigningKey, passphrase: bytes | None = None) -> bytes:
    """Return the key as PKCS#8 PEM, encrypted where a passphrase is given."""
    private = Ed25519PrivateKey.from_private_bytes(key.seed)
    encoding = serialization.Encoding.DER if passphrase else serialization.Encoding.PEM
    plain = private.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return encrypted_pem(plain, passphrase) if passphrase else plain


def signing_key_from_pem(data: bytes, passphrase: bytes | None = None) -> SigningKey:
    """Load a PKCS#8 PEM Ed25519 key.

    Raises:
        KeyMaterialError: not such a key, or cut (`bad_key`), encrypted and no passphrase given (`passphrase_needed`),
            the wrong one (`wrong_passphrase`), or one given for a key that is not encrypted (`passphrase_unused`).
    """
    if len(data) > MAX_KEY_FILE_BYTES:
        raise KeyMaterialError(f"a key file of {len(data)} bytes; at most {MAX_KEY_FILE_BYTES} are allowed")
    _check_whole(data)
    _check_passphrase_use(b"BEGIN ENCRYPTED PRIVATE KEY" in data, passphrase)
    try:
        key = serialization.load_pem_private_key(data, passphrase or None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if passphrase:
            raise KeyMaterialError("this passphrase does not open the signing key", "wrong_passphrase") from None
        raise KeyMaterialError("this is not a signing key (PKCS#8 PEM, Ed25519)") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyMaterialError("this private key is not an Ed25519 key; make one with `edgefl-export keygen`")
    return SigningKey(key.private_bytes_raw())


def read_public_key(file: FilePath) -> PublicSigningKey:
    """Read the public key of a file such as `signing.pub`: 64 hexadecimal digits, or PEM.

    Raises:
        KeyMaterialError: it holds no Ed25519 public key, or one of low order.
    """
    data = read_key_file(file).strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", data):
        return PublicSigningKey(bytes.fromhex(data.decode("ascii")))
    public = public_from_pem(data)
    if public is None:
        raise KeyMaterialError(f"{file} is not an Ed25519 public key; give the file signing.pub")
    return PublicSigningKey(public)


def read_key_file(file: FilePath) -> bytes:
    """Read the file that is given as a public key; a `KeyMaterialError` where it is a model or no key at all."""
    try:
        data = read_bounded(file, MAX_KEY_FILE_BYTES)
    except StorageError as error:
        if error.code != "too_large":
            raise
        data = b""
    if data.startswith(_ZIP) or str(file).endswith(".edgefl"):
        raise KeyMaterialError(
            f"{file} is a model, not its signer's public key: name the file signing.pub that the signer gave you"
        )
    if not data:
        raise KeyMaterialError(f"{file} is not a public key; give the signer's file signing.pub")
    return data


def public_from_pem(data: bytes) -> bytes | None:
    """Return the 32 bytes of an Ed25519 public key in PEM, unchecked; None for anything else."""
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else None


def public_key_line(key: PublicSigningKey) -> bytes:
    """Return the content of a file that `read_public_key` reads."""
    return key.public.hex().encode("ascii") + b"\n"


def sealing_key_to_pem(key: SealingKey, passphrase: bytes | None = None) -> bytes:
    """Return the key as our record, encrypted where a passphrase is given."""
    head = _MAGIC + bytes([key.suite, 1 if passphrase else 0])
    body = key.secret
    if passphrase:
        salt, nonce = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_NONCE_BYTES)
        body = salt + nonce + ChaCha20Poly1305(_stretch(passphrase, salt)).encrypt(nonce, key.secret, head)
    text = base64.b64encode(head + body).decode("ascii")
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    return "\n".join([_BEGIN, *lines, _END, ""]).encode("ascii")


def sealing_key_from_pem(data: bytes, passphrase: bytes | None = None) -> SealingKey:
    """Load what `sealing_key_to_pem` made.

    Raises:
        KeyMaterialError: with the codes of `signing_key_from_pem`.
    """
    record = _unwrap(data)
    head, body = record[:7], record[7:]
    suite, sealed = head[5], head[6]
    if not head.startswith(_MAGIC) or suite not in SECRET_BYTES or sealed not in (0, 1):
        raise KeyMaterialError("this sealing key is of an unknown version or suite")
    _check_passphrase_use(bool(sealed), passphrase)
    if sealed and passphrase:
        salt, nonce = body[:_SALT_BYTES], body[_SALT_BYTES : _SALT_BYTES + _NONCE_BYTES]
        try:
            cipher = ChaCha20Poly1305(_stretch(passphrase, salt))
            body = cipher.decrypt(nonce, body[_SALT_BYTES + _NONCE_BYTES :], head)
        except (InvalidTag, ValueError):
            raise KeyMaterialError("this passphrase does not open the sealing key", "wrong_passphrase") from None
    return SealingKey(suite, body)


def _unwrap(data: bytes) -> bytes:
    """Return the bytes between the PEM-like lines."""
    try:
        lines = data[: MAX_KEY_FILE_BYTES + 1].decode("ascii").split()
        text = " ".join(lines)
        if len(data) > MAX_KEY_FILE_BYTES or not text.startswith(_BEGIN) or not text.endswith(_END):
            raise KeyMaterialError("this is not a sealing key file")
        record = base64.b64decode(text[len(_BEGIN) : -len(_END)].replace(" ", ""), validate=True)
    except (UnicodeDecodeError, binascii.Error):
        raise KeyMaterialError("this is not a sealing key file") from None
    if len(record) < 8:
        raise KeyMaterialError("this sealing key file is truncated")
    return record


def _check_whole(data: bytes) -> None:
    """Refuse a PKCS#8 file that was cut: decrypted, it would look like one of another passphrase."""
    begin = _PKCS8_BEGIN.search(data)
    if begin is None:
        return
    text, end, _ = data[begin.end() :].partition(b"-----END " + begin[1] + b"-----")
    try:
        der = base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error:
        der = b""
    if not end or not is_whole(der):
        raise KeyMaterialError("the file of this signing key is damaged or cut; put it back from a copy")


def _check_passphrase_use(encrypted: bool, passphrase: bytes | None) -> None:
    if encrypted and not passphrase:
        raise KeyMaterialError(
            "the private key is encrypted; give its passphrase with --passphrase-file FILE or in EDGEFL_KEY_PASSPHRASE",
            "passphrase_needed",
        )
    if passphrase and not encrypted:
        raise KeyMaterialError(
            "a passphrase was given, but this key is not encrypted; leave the passphrase out", "passphrase_unused"
        )


def _stretch(passphrase: bytes, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=1 << 15, r=8, p=1).derive(passphrase)

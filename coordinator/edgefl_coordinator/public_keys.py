"""Public signing keys in files: 64 hexadecimal digits, or PEM. Loads nothing of the coordinator."""

import re
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from edgefl_protocol.durable import read_bounded
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import KeyMaterialError

_HEX64 = re.compile(rb"[0-9a-fA-F]{64}")
_MAX_KEY_BYTES = 16 * 2**10


def read_public_key(path: Path) -> PublicSigningKey:
    """Return the key of a file such as `signing.pub`.

    Raises:
        KeyMaterialError: it holds no Ed25519 public key, or one of low order.
        StorageError: it cannot be read.
    """
    data = read_bounded(path, _MAX_KEY_BYTES).strip()
    if _HEX64.fullmatch(data):
        return PublicSigningKey(bytes.fromhex(data.decode("ascii")))
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise KeyMaterialError(f"{path} holds no Ed25519 public key; give the file signing.pub")
    return PublicSigningKey(key.public_bytes_raw())


def written_key(key: PublicSigningKey) -> bytes:
    """Return the content of a file that `read_public_key` reads."""
    return key.public.hex().encode("ascii") + b"\n"

"""Signing keys of a publisher on disk: `signing.key` (PKCS#8 PEM, mode 0600) and `signing.pub` (64 hexadecimal digits).

Guarantees: an existing key is never overwritten; a private key that others can read is refused.
Source: docs/security.md 2.6.
"""

from pathlib import Path

from edgefl_protocol.durable import read_private, write_atomic
from edgefl_protocol.envelopes.key_files import (
    MAX_KEY_FILE_BYTES,
    public_key_line,
    signing_key_from_pem,
    signing_key_to_pem,
)
from edgefl_protocol.envelopes.keys import SigningKey, generate_signing_key
from edgefl_protocol.errors import KeyMaterialError, StorageError

PRIVATE_NAME = "signing.key"
PUBLIC_NAME = "signing.pub"


def create_key(folder: Path, passphrase: bytes | None) -> SigningKey:
    """Make a signing key in a folder.

    Args:
        folder: made if it is missing, mode 0700.
        passphrase: encrypts the private key; None leaves it readable by its owner.

    Raises:
        StorageError: a key is there already, or the folder cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the folder {folder}: {error.strerror}; name another folder", "storage"
        ) from error
    for name in (PRIVATE_NAME, PUBLIC_NAME):
        if (folder / name).exists():
            raise StorageError(
                f"{folder / name} exists already and is never overwritten; name another folder", "key_exists"
            )
    key = generate_signing_key()
    write_atomic(folder / PRIVATE_NAME, signing_key_to_pem(key, passphrase), 0o600)
    write_atomic(folder / PUBLIC_NAME, public_key_line(key.public_key))
    return key


def open_key(place: Path, passphrase: bytes | None) -> SigningKey:
    """Read a signing key.

    Args:
        place: its file, or the folder that `create_key` wrote.
        passphrase: for an encrypted key; ignored for one that is not, since the environment may hold it for others.

    Raises:
        KeyMaterialError: not a signing key, or the passphrase is missing or wrong.
        StorageError: missing, or readable by others.
    """
    file = place / PRIVATE_NAME if place.is_dir() else place
    data = read_private(file, MAX_KEY_FILE_BYTES)
    try:
        return signing_key_from_pem(data, passphrase)
    except KeyMaterialError as error:
        if error.code != "passphrase_unused":
            raise
        return signing_key_from_pem(data)

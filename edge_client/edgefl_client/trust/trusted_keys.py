"""Whose bundles this device runs: keys of signers that its owner added by hand.

There is no trust on first use: a bundle's own key never enters by loading it. Keys under which anybody can sign (low
order) are refused when they enter (docs/security.md, decision 5 and check 9).
"""

import base64
import binascii
import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgefl_client.home import Home, read_json, write_json
from edgefl_protocol.envelopes.key_files import read_key_file
from edgefl_protocol.envelopes.keys import PublicSigningKey
from edgefl_protocol.errors import KeyMaterialError, StorageError

MAX_KEYS = 256
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,64}")


@dataclass(frozen=True, kw_only=True)
class TrustedKey:
    """A signer of bundles."""

    key: PublicSigningKey  # the public key
    name: str  # what the owner calls it
    added: str  # date it was added, ISO 8601

    def to_json(self) -> dict[str, str]:
        """Return the entry `edgefl trust list --json` prints."""
        return {"name": self.name, "key_id": self.key.key_id, "public": self.key.public.hex(), "added": self.added}


def read_public_key(given: str) -> PublicSigningKey:
    """Read the public key a person names: a file, or the key itself.

    Args:
        given: path of a file, or the key as text. Either holds an Ed25519 public key as 64 hexadecimal digits, as
            base64 of 32 bytes, or as PEM (`BEGIN PUBLIC KEY`); a file may also hold the 32 bytes themselves.

    Raises:
        KeyMaterialError: none of these, or a key of low order.
    """
    path = Path(given)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # a long text is no file name
        is_file = False
    data = read_key_file(path) if is_file else given.encode("utf-8", "replace")
    raw = data if is_file and len(data) == 32 else _decoded(data.strip())
    if raw is None:
        where = f"{given} is not" if is_file else f"{given[:80]!r} is neither a file nor"
        raise KeyMaterialError(
            f"{where} an Ed25519 public key; give the signer's file signing.pub, or the key as 64 hexadecimal digits",
            "bad_key",
        )
    return PublicSigningKey(raw)


def _decoded(text: bytes) -> bytes | None:
    if text.startswith(b"-----BEGIN PUBLIC KEY-----"):
        # Rare, and most of the time this module would take to load.
        from edgefl_protocol.envelopes.key_files import public_from_pem

        return public_from_pem(text)
    if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
        return bytes.fromhex(text.decode("ascii"))
    try:
        raw = base64.b64decode(text.translate(bytes.maketrans(b"-_", b"+/")), validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if len(raw) == 32 else None


def list_trusted(home: Home) -> list[TrustedKey]:
    """List the trusted signers, oldest first."""
    record = read_json(home.trust_file, "the list of trusted signers")
    entries = [] if record is None else record.get("keys")
    try:
        if not isinstance(entries, list) or len(entries) > MAX_KEYS:
            raise ValueError
        return [
            TrustedKey(
                key=PublicSigningKey(bytes.fromhex(entry["public"])), name=str(entry["name"]), added=str(entry["added"])
            )
            for entry in entries
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise StorageError(
            f"{home.trust_file} is damaged; remove it and add the signers again with edgefl trust add", "damaged"
        ) from error


def add_trusted(home: Home, key: PublicSigningKey, name: str | None, today: datetime.date) -> TrustedKey:
    """Trust a signer from now on; adding it again renames it.

    Args:
        name: what to call it; None for the first digits of its key id.

    Raises:
        KeyMaterialError: the name is not printable text of at most 64 characters.
    """
    called = name or key.key_id[:16]
    if not _NAME.fullmatch(called):
        raise KeyMaterialError(
            "a signer's name must be 1 to 64 printable characters; choose another with --name", "bad_name"
        )
    entry = TrustedKey(key=key, name=called, added=today.isoformat())
    kept = [other for other in list_trusted(home) if other.key != key]
    if len(kept) >= MAX_KEYS:
        raise StorageError(f"{MAX_KEYS} signers are trusted already; remove some first", "too_many_keys")
    _write(home, [*kept, entry])
    return entry


def remove_trusted(home: Home, which: str) -> TrustedKey:
    """Stop trusting a signer.

    Args:
        which: its name, its public key in hexadecimal, or at least 8 first digits of its key id.

    Raises:
        KeyMaterialError: no signer, or more than one, answers to this.
    """
    entries = list_trusted(home)
    found = [
        entry
        for entry in entries
        if which in (entry.name, entry.key.public.hex()) or (len(which) >= 8 and entry.key.key_id.startswith(which))
    ]
    if len(found) != 1:
        number = "no" if not found else f"{len(found)}"
        raise KeyMaterialError(
            f"{which!r} fits {number} trusted signers and must fit exactly one: give a name, a key, or the first 8 or "
            "more digits of a key id; see edgefl trust list",
            "unknown_signer",
        )
    _write(home, [entry for entry in entries if entry is not found[0]])
    return found[0]


def _write(home: Home, entries: Iterable[TrustedKey]) -> None:
    home.prepare()
    keys = [{"public": entry.key.public.hex(), "name": entry.name, "added": entry.added} for entry in entries]
    write_json(home.trust_file, {"format": 1, "keys": keys})

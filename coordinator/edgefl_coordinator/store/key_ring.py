"""The coordinator's sealing keys over time: one file with the current key and those that still open messages.

Guarantees:
    A key is renewed after a week. The one before opens messages for two queue lifetimes more, then it is gone from the
    file and from memory. A queue lifetime is 24 hours: for so long a member may seal for the key record it holds.
    A key record never outlives its key, so nobody seals for a key that is gone.
    The number of the record rises with each renewal; number and keys stand in one file that is replaced as a whole, so
    a crash leaves the ring before or the ring after.
Source: docs/security.md 2.4 (forward secrecy) and 2.6.4, check 23.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from edgefl_coordinator.settings import Home
from edgefl_protocol.durable import read_private, write_atomic
from edgefl_protocol.envelopes.key_files import MAX_KEY_FILE_BYTES, sealing_key_from_pem, sealing_key_to_pem
from edgefl_protocol.envelopes.keys import SealingKey, generate_sealing_key
from edgefl_protocol.errors import KeyMaterialError

_DAY_MS: Final = 24 * 3600 * 1000
QUEUE_LIFETIME_MS: Final = _DAY_MS  # a member refreshes an older key record before it seals
RENEW_AFTER_MS: Final = 7 * _DAY_MS
KEPT_MS: Final = 2 * QUEUE_LIFETIME_MS
RECORD_VALID_MS: Final = 7 * _DAY_MS
_MAX_PREVIOUS: Final = 32
_MAX_RING_BYTES: Final = (_MAX_PREVIOUS + 1) * MAX_KEY_FILE_BYTES
_FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True)
class SealingRing:
    """The sealing keys at one moment."""

    number: int  # of the key record, from 1
    current: SealingKey  # what members seal for
    made_ms: int  # when it was made, Unix ms
    previous: tuple[tuple[SealingKey, int], ...] = ()  # earlier keys, each with the time until which it opens messages

    def opening(self, now_ms: int) -> list[SealingKey]:
        """Return the keys that open messages now, the current one first."""
        return [self.current, *(key for key, until_ms in self.previous if now_ms < until_ms)]

    def is_due(self, now_ms: int) -> bool:
        """Tell whether the current key is a week old."""
        return now_ms - self.made_ms >= RENEW_AFTER_MS

    def record_until(self, now_ms: int) -> int:
        """Return when a key record signed now expires: before its key may be gone."""
        return min(now_ms + RECORD_VALID_MS, max(self.made_ms + RENEW_AFTER_MS, now_ms) + KEPT_MS)

    def renewed(self, key: SealingKey, now_ms: int, *, keep_old: bool = True) -> "SealingRing":
        """Return the ring with a new current key."""
        old = ((self.current, now_ms + KEPT_MS),) if keep_old else ()
        previous = (*old, *self.without_past(now_ms).previous) if keep_old else ()
        return SealingRing(number=self.number + 1, current=key, made_ms=now_ms, previous=previous[:_MAX_PREVIOUS])

    def without_past(self, now_ms: int) -> "SealingRing":
        """Return the ring without the keys whose time is over."""
        return replace(self, previous=tuple(one for one in self.previous if now_ms < one[1]))


def new_ring(suite: int, now_ms: int) -> SealingRing:
    """Return the ring of a new coordinator."""
    return SealingRing(number=1, current=generate_sealing_key(suite), made_ms=now_ms)


def ring_to_bytes(ring: SealingRing, passphrase: bytes | None = None) -> bytes:
    """Return the file's content; each key is encrypted where a passphrase is given."""

    def pem(key: SealingKey) -> str:
        return sealing_key_to_pem(key, passphrase).decode("ascii")

    value = {
        "format": _FORMAT,
        "number": ring.number,
        "made_ms": ring.made_ms,
        "current": pem(ring.current),
        "previous": [{"key": pem(key), "until_ms": until_ms} for key, until_ms in ring.previous],
    }
    return (json.dumps(value, indent=1) + "\n").encode("ascii")


def save_ring(home: Home, ring: SealingRing, passphrase: bytes | None = None) -> None:
    """Replace the file.

    Raises:
        StorageError: the disk is full; the ring before is still there.
    """
    write_atomic(home.sealing_ring, ring_to_bytes(ring, passphrase), mode=0o600)


def load_ring(home: Home, passphrase: bytes | None = None) -> SealingRing:
    """Read the file; a home from before there was one has its single key in `sealing.key`.

    Raises:
        StorageError: it is missing, or others can read it.
        KeyMaterialError: it is damaged, or the passphrase does not fit.
    """
    first = home.keys / "sealing.key"
    if not home.sealing_ring.exists() and first.exists():
        key = sealing_key_from_pem(read_private(first, MAX_KEY_FILE_BYTES), passphrase)
        return SealingRing(number=1, current=key, made_ms=int(first.stat().st_mtime * 1000))
    data = read_private(home.sealing_ring, _MAX_RING_BYTES)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged(home.sealing_ring) from None
    names = {"format", "number", "made_ms", "current", "previous"}
    if not isinstance(value, dict) or value.keys() != names or value["format"] != _FORMAT:
        raise _damaged(home.sealing_ring)
    return _from_json(value, home.sealing_ring, passphrase)


def _from_json(value: dict[str, Any], path: Path, passphrase: bytes | None) -> SealingRing:
    if not all(type(value[name]) is int and value[name] >= 0 for name in ("number", "made_ms")):
        raise _damaged(path)
    try:
        previous = [(str(one["key"]), one["until_ms"]) for one in value["previous"]]
    except (TypeError, KeyError):
        raise _damaged(path) from None
    if len(previous) > _MAX_PREVIOUS or not all(type(until_ms) is int for _, until_ms in previous):
        raise _damaged(path)

    def key(pem: str) -> SealingKey:
        return sealing_key_from_pem(pem.encode("utf-8", "replace"), passphrase)

    return SealingRing(
        number=value["number"],
        current=key(str(value["current"])),
        made_ms=value["made_ms"],
        previous=tuple((key(pem), until_ms) for pem, until_ms in previous),
    )


def _damaged(path: Path) -> KeyMaterialError:
    return KeyMaterialError(f"{path} is damaged: it does not hold the sealing keys; restore it from the backup")

"""The coordinator's sealing keys over time: one file with the current key and those that still open messages.

Guarantees:
    A key is renewed after a week. The one before opens messages for two queue lifetimes more, then it is gone from the
    file and from memory. A queue lifetime is 24 hours: for so long a member may seal for the key record it holds.
    A key record never outlives its key, so nobody seals for a key that is gone.
    The number of the record rises with each renewal; number and keys stand in one file that is replaced as a whole, so
    a crash leaves the ring before or the ring after.
Source: docs/security.md 2.4 (forward secrecy) and 2.6.4, check 23.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

import msgspec

from edgefl_coordinator.settings import CoordinatorHome
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


class _Previous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str  # PEM
    until_ms: int


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ring as it lies on the disk."""

    format: Literal[1]
    number: Annotated[int, msgspec.Meta(ge=0)]
    made_ms: Annotated[int, msgspec.Meta(ge=0)]
    current: str  # PEM
    previous: Annotated[tuple[_Previous, ...], msgspec.Meta(max_length=_MAX_PREVIOUS)]


def new_ring(suite: int, now_ms: int) -> SealingRing:
    """Return the ring of a new coordinator."""
    return SealingRing(number=1, current=generate_sealing_key(suite), made_ms=now_ms)


def ring_to_bytes(ring: SealingRing, passphrase: bytes | None = None) -> bytes:
    """Return the file's content; each key is encrypted where a passphrase is given."""

    def pem(key: SealingKey) -> str:
        return sealing_key_to_pem(key, passphrase).decode("ascii")

    previous = tuple(_Previous(key=pem(key), until_ms=until_ms) for key, until_ms in ring.previous)
    file = _File(format=1, number=ring.number, made_ms=ring.made_ms, current=pem(ring.current), previous=previous)
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def save_ring(home: CoordinatorHome, ring: SealingRing, passphrase: bytes | None = None) -> None:
    """Replace the file; a `StorageError` where the disk is full, with the ring before still there."""
    write_atomic(home.sealing_ring, ring_to_bytes(ring, passphrase), mode=0o600)


def load_ring(home: CoordinatorHome, passphrase: bytes | None = None) -> SealingRing:
    """Read the file; a home from before there was one has its single key in `sealing.key`.

    A `StorageError` where it is missing, or others can read it; a `KeyMaterialError` where it is damaged, or the
    passphrase does not fit.
    """
    first = home.keys / "sealing.key"
    if not home.sealing_ring.exists() and first.exists():
        key = sealing_key_from_pem(read_private(first, MAX_KEY_FILE_BYTES), passphrase)
        return SealingRing(number=1, current=key, made_ms=int(first.stat().st_mtime * 1000))
    data = read_private(home.sealing_ring, _MAX_RING_BYTES)
    try:
        stored = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise KeyMaterialError(
            f"{home.sealing_ring} is damaged: it does not hold the sealing keys; restore it from the backup"
        ) from None

    def opened(pem: str) -> SealingKey:
        return sealing_key_from_pem(pem.encode("utf-8", "replace"), passphrase)

    return SealingRing(
        number=stored.number,
        current=opened(stored.current),
        made_ms=stored.made_ms,
        previous=tuple((opened(one.key), one.until_ms) for one in stored.previous),
    )

"""Small signed records: the coordinator's clock, the index of current bundles, and its keys.

Guarantees: a value that a `verify_*` function returns was signed by the stated key for this use, is not expired, not
from the future and not older than one seen before; anything else is a `RecordError`. The labels keep the uses apart,
so an index never passes for a key record. Their form stands in `_record_form`; the federation's root, the list of
revoked keys and a member's new keys are records too (`root`, `revocation`, `rotation`).
Source: docs/security.md 2.4 to 2.8; index and key record follow TUF's timestamp and root roles.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from edgefl_protocol.envelopes.header import MAX_SAFE_INT
from edgefl_protocol.envelopes.keys import PublicSealingKey, PublicSigningKey, SigningKey
from edgefl_protocol.errors import KeyMaterialError, RecordError
from edgefl_protocol.records.record_form import (
    COUNTS,
    HEX64,
    MAX_AHEAD_MS,
    TIMES,
    WORD,
    Rule,
    check_fields,
    check_scope,
    make,
    parse,
    split,
    verify,
)
from edgefl_protocol.records.record_form import MAX_RECORD_BYTES as MAX_RECORD_BYTES

TIME_LABEL: Final = "eflt1/time"
INDEX_LABEL: Final = "efli1/index"
KEYS_LABEL: Final = "eflk1/keyrec"

_NONCE: Final = re.compile(r"[A-Za-z0-9_-]{16,64}")


@dataclass(frozen=True, kw_only=True)
class SignedTime:
    """The coordinator's clock, as an answer to one nonce."""

    nonce: str
    now_ms: int


@dataclass(frozen=True, kw_only=True, order=True)
class IndexEntry:
    """The current bundle of one (line, task)."""

    line: str  # line of bundles
    task: str  # what it classifies
    version: int  # of the current bundle; from 1
    sha256: str  # of the bundle file, hex
    size: int  # of the bundle file, bytes


@dataclass(frozen=True, kw_only=True)
class Index:
    """Which bundle is current, of each (line, task) of a federation."""

    federation: str
    issued_ms: int
    expires_ms: int
    entries: tuple[IndexEntry, ...]

    def current(self, line: str, task: str) -> IndexEntry | None:
        """Return the entry of a line and task, or None."""
        return next((entry for entry in self.entries if (entry.line, entry.task) == (line, task)), None)


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """The coordinator's current keys."""

    federation: str  # whose coordinator
    number: int  # counts up with each new record; a lower one than seen is refused
    signing: PublicSigningKey  # signs replies and records
    sealing: PublicSealingKey  # what members seal for
    issued_ms: int  # Unix ms
    expires_ms: int  # Unix ms


def make_time(key: SigningKey, nonce: str, now_ms: int) -> bytes:
    """Sign the clock over a caller's nonce (16 to 64 characters of base64url)."""
    body = {"nonce": nonce, "now_ms": now_ms}
    check_fields(body, {"nonce": _NONCE, "now_ms": (0, MAX_SAFE_INT)})
    return make(key, TIME_LABEL, body)


def verify_time(record: bytes, key: PublicSigningKey, nonce: str) -> SignedTime:
    """Return the coordinator's time."""
    body = verify(record, TIME_LABEL, key)
    check_fields(body, {"nonce": _NONCE, "now_ms": (0, MAX_SAFE_INT)})
    if body["nonce"] != nonce:
        raise RecordError("the signed time answers another request", "wrong_nonce")
    return SignedTime(nonce=nonce, now_ms=body["now_ms"])


def make_index(
    key: SigningKey, federation: str, entries: Iterable[IndexEntry], issued_ms: int, expires_ms: int
) -> bytes:
    """Sign the list of current bundles; at most one entry per (line, task)."""
    body = {
        "federation": federation,
        "issued_ms": issued_ms,
        "expires_ms": expires_ms,
        "entries": [asdict(entry) for entry in sorted(entries)],
    }
    _read_index(body)
    return make(key, INDEX_LABEL, body)


def verify_index(record: bytes, key: PublicSigningKey, federation: str, now_ms: int, seen_issued_ms: int = 0) -> Index:
    """Return the index.

    Args:
        seen_issued_ms: `issued_ms` of the newest index seen before; an older one is refused.

    Raises:
        RecordError: code `bad_signature`, `wrong_federation`, `expired`, `from_future`, `rolled_back` or `bad_record`.
    """
    index = _read_index(verify(record, INDEX_LABEL, key))
    check_scope(index.federation, federation, index.expires_ms, now_ms)
    if index.issued_ms > now_ms + MAX_AHEAD_MS:  # else one wrong clock would put all later ones out
        raise RecordError("the index is dated ahead of this clock; check both clocks", "from_future")
    if index.issued_ms < seen_issued_ms:
        raise RecordError("the index is older than one seen before", "rolled_back")
    return index


def make_key_record(
    key: SigningKey, federation: str, sealing: PublicSealingKey, number: int, issued_ms: int, expires_ms: int
) -> bytes:
    """Sign the coordinator's own keys; the signing key vouches for both."""
    body = {
        "federation": federation,
        "number": number,
        "signing": key.public.hex(),
        "suite": sealing.suite,
        "sealing": sealing.public.hex(),
        "issued_ms": issued_ms,
        "expires_ms": expires_ms,
    }
    _read_key_record(body)
    return make(key, KEYS_LABEL, body)


def verify_key_record(
    record: bytes, pinned_key_id: str, federation: str, now_ms: int, seen_number: int = 0
) -> KeyRecord:
    """Return the coordinator's keys, vouched for by the pinned signing key.

    Args:
        pinned_key_id: key id of the coordinator's signing key, from the invite.
        seen_number: number of the newest record seen before; a lower one is refused.

    Raises:
        RecordError: code `wrong_key`, `bad_signature`, `wrong_federation`, `expired`, `rolled_back` or `bad_record`.
    """
    unverified = _read_key_record(parse(split(record)[0]))
    if unverified.signing.key_id != pinned_key_id:
        raise RecordError("the key record names another signing key than the invite", "wrong_key")
    found = _read_key_record(verify(record, KEYS_LABEL, unverified.signing))
    check_scope(found.federation, federation, found.expires_ms, now_ms)
    if found.number < seen_number:
        raise RecordError(f"key record {found.number} is older than number {seen_number} seen before", "rolled_back")
    return found


def _read_index(body: dict[str, Any]) -> Index:
    check_fields(body, {"federation": WORD, "issued_ms": TIMES, "expires_ms": TIMES, "entries": None})
    if type(body["entries"]) is not list:
        raise RecordError("the index's entries are not a list")
    for entry in body["entries"]:
        check_fields(entry, {"line": WORD, "task": WORD, "version": COUNTS, "sha256": HEX64, "size": COUNTS})
    entries = tuple(IndexEntry(**entry) for entry in body["entries"])
    if len({(entry.line, entry.task) for entry in entries}) != len(entries):
        raise RecordError("the index lists a line and task twice")
    return Index(
        federation=body["federation"], issued_ms=body["issued_ms"], expires_ms=body["expires_ms"], entries=entries
    )


def _read_key_record(body: dict[str, Any]) -> KeyRecord:
    forms: dict[str, Rule] = {"federation": WORD, "number": COUNTS, "signing": HEX64, "suite": (1, 2)}
    forms |= {"sealing": re.compile(r"[0-9a-f]{64,2432}"), "issued_ms": TIMES, "expires_ms": TIMES}
    check_fields(body, forms)
    try:
        signing = PublicSigningKey(bytes.fromhex(body["signing"]))
        sealing = PublicSealingKey(body["suite"], bytes.fromhex(body["sealing"]))
    except (KeyMaterialError, ValueError):
        raise RecordError("the key record holds an unusable key") from None
    return KeyRecord(
        federation=body["federation"],
        number=body["number"],
        signing=signing,
        sealing=sealing,
        issued_ms=body["issued_ms"],
        expires_ms=body["expires_ms"],
    )

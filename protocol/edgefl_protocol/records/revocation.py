"""The list of revoked keys: signed by the coordinator, numbered, and valid for at most 24 hours.

Guarantees: a list that `verify_revoked` returns was signed by the stated key for this federation, is at most 24 hours
old, and its number is not below one seen before. So nobody on the way can hide a revocation for longer than a day: a
device without a valid list takes no new bundle (docs/security.md 2.6.5, check 24). It names key ids: of bundle signers,
and of members that were shut out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from edgefl_protocol.envelopes.keys import PublicSigningKey, SigningKey
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.record_form import (
    COUNTS,
    TIMES,
    WORD,
    Rule,
    check_fields,
    check_issued,
    check_scope,
    hex_list,
    make,
    parse,
    split,
    verify,
)

REVOKED_LABEL: Final = "eflr1/revoked"
MAX_REVOKED: Final = 512  # key ids in one list
REVOKED_VALID_MS: Final = 24 * 3600 * 1000


@dataclass(frozen=True, kw_only=True)
class RevokedKeys:
    """A verified list."""

    federation: str  # whose
    version: int  # rises with each revocation, from 1
    issued_ms: int  # Unix ms
    expires_ms: int  # Unix ms, at most 24 hours after issue
    key_ids: frozenset[str]  # of the revoked keys


def make_revoked(
    key: SigningKey, federation: str, version: int, key_ids: Iterable[str], issued_ms: int, expires_ms: int
) -> bytes:
    """Sign a list."""
    body = {
        "federation": federation,
        "version": version,
        "issued_ms": issued_ms,
        "expires_ms": expires_ms,
        "keys": sorted(key_ids),
    }
    _read(body)
    return make(key, REVOKED_LABEL, body)


def verify_revoked(
    record: bytes, key: PublicSigningKey, federation: str, now_ms: int, seen_version: int = 0
) -> RevokedKeys:
    """Return the list.

    Args:
        seen_version: of the newest list seen before; a lower one is refused.

    Raises:
        RecordError: code `bad_signature`, `wrong_federation`, `expired`, `from_future`, `bad_lifetime`, `rolled_back`
            or `bad_record`.
    """
    found = _read(verify(record, REVOKED_LABEL, key))
    check_scope(found.federation, federation, found.expires_ms, now_ms)
    check_issued(found.issued_ms, found.expires_ms, now_ms, REVOKED_VALID_MS)
    if found.version < seen_version:
        raise RecordError(
            "the coordinator's list of revoked keys is older than the one seen before, as after a restored backup; ask "
            "the operator to revoke again what was revoked since then, and to run edgefl-coordinator rotate",
            "rolled_back",
        )
    return found


def unverified_revoked(record: bytes) -> RevokedKeys:
    """Read a list whose signature is not checked here: one that was verified when it came."""
    return _read(parse(split(record)[0]))


def _read(body: dict[str, Any]) -> RevokedKeys:
    forms: dict[str, Rule] = {"federation": WORD, "version": COUNTS, "issued_ms": TIMES}
    forms |= {"expires_ms": TIMES, "keys": None}
    check_fields(body, forms)
    return RevokedKeys(
        federation=body["federation"],
        version=body["version"],
        issued_ms=body["issued_ms"],
        expires_ms=body["expires_ms"],
        key_ids=frozenset(hex_list(body["keys"], "keys", MAX_REVOKED)),
    )

"""What holds the audit log together: the chain of its rows, and signed heads of it.

    digest of a row   SHA-256 of PAE("efla1/audit", digest before, number, at_ms, event, subject, detail)
    signed head       {federation, rows, sha256 of the last of them, at_ms, signing key}, signed as "efla1/head"

Guarantees: the digest covers every field of a row and all rows before it, so an edited, removed or moved row is found
at a place that the error names. Whoever can write the store can compute a whole new chain, but no head: a history that
was rewritten before a head, or cut before it, is found with the public key alone. What came after the newest head that
the reader has is not proven. Source: docs/security.md 2.9, check 69.
"""

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from edgefl_coordinator.errors import OperatorError
from edgefl_protocol.envelopes.keys import PublicSigningKey, SigningKey
from edgefl_protocol.errors import KeyMaterialError, RecordError
from edgefl_protocol.pae import pae
from edgefl_protocol.records.record_form import COUNTS, HEX64, TIMES, WORD, check_fields, make, parse, split, verify
from edgefl_protocol.sentences import counted

HEAD_LABEL: Final = "efla1/head"
FIRST: Final = "0" * 64  # digest before the first row


class LogRow(NamedTuple):
    """A row as it is kept."""

    number: int  # from 1
    at_ms: int
    event: str
    subject: str
    detail: str  # JSON, as it was written
    sha256: str


@dataclass(frozen=True)
class LogHead:
    """How far the log reached at a time, signed."""

    federation: str
    rows: int
    sha256: str  # of the last of the rows
    at_ms: int
    key_id: str  # of the coordinator's signing key that signed it


def digest(previous: str, number: int, at_ms: int, event: str, subject: str, detail: str) -> str:
    """Compute the digest of a row from its fields and the digest of the row before."""
    parts = (previous, str(number), str(at_ms), event, subject, detail)
    return hashlib.sha256(pae(b"efla1/audit", *(part.encode() for part in parts))).hexdigest()


def make_head(key: SigningKey, federation: str, rows: int, sha256: str, at_ms: int) -> bytes:
    """Sign that the log had so many rows, and the digest of the last."""
    body = {"federation": federation, "rows": rows, "sha256": sha256, "at_ms": at_ms, "signing": key.public.hex()}
    return make(key, HEAD_LABEL, body)


def read_head(record: bytes) -> LogHead:
    """Verify a head with the key that it names; whether that key counts, `check_log` asks.

    Raises:
        RecordError: it is no head, or that key did not sign it (`bad_signature`).
    """
    found = parse(split(record)[0])
    check_fields(found, {"federation": WORD, "rows": COUNTS, "sha256": HEX64, "at_ms": TIMES, "signing": HEX64})
    try:
        key = PublicSigningKey(bytes.fromhex(found["signing"]))
    except KeyMaterialError as error:
        raise RecordError(f"the head names an unusable key: {error}") from None
    verify(record, HEAD_LABEL, key)
    return LogHead(found["federation"], found["rows"], found["sha256"], found["at_ms"], key.key_id)


def check_log(
    rows: Iterable[LogRow], heads: Collection[LogHead] = (), federation: str = "", key_ids: Collection[str] = ()
) -> int:
    """Recompute the chain, compare it with the heads, and return its number of rows.

    Args:
        federation: of the heads.
        key_ids: of the coordinator's signing keys, now and before.

    Raises:
        OperatorError: the first row that was changed, removed or moved; a head of a key that does not count, of
            another federation, or of rows that are not there or not the same. One sentence.
    """
    wanted = _by_rows(heads, federation, key_ids)
    previous, number = FIRST, 0
    for row in rows:
        number += 1
        expected = digest(previous, row.number, row.at_ms, row.event, row.subject, row.detail)
        if row.number != number or row.sha256 != expected:
            raise OperatorError(f"the audit log is broken at row {number}: it was edited after it was written")
        previous = row.sha256
        if wanted.pop(number, previous) != previous:
            raise OperatorError(
                f"the audit log was written anew: a signed head tells another row {number}, so a row up to there is "
                "not the one that was signed"
            )
    if wanted:
        raise OperatorError(
            f"the audit log was cut: it has {counted(number, 'row')}, and a signed head tells of {max(wanted)}"
        )
    return number


def _by_rows(heads: Collection[LogHead], federation: str, key_ids: Collection[str]) -> dict[int, str]:
    """The digest that the heads tell of each row they end at."""
    found: dict[int, str] = {}
    for head in heads:
        if head.federation != federation:
            raise OperatorError(f"a signed head is of the federation {head.federation}, not {federation}")
        if head.key_id not in key_ids:
            raise OperatorError(
                f"a head of row {head.rows} is signed by the key {head.key_id}, which is not known as the "
                "coordinator's; if it is or was its key, name it with --key KEY_ID"
            )
        if found.setdefault(head.rows, head.sha256) != head.sha256:
            raise OperatorError(f"two signed heads tell different rows {head.rows}: the log was written anew")
    return found


def newest(heads: Iterable[LogHead]) -> LogHead | None:
    """Return the head of the most rows, or None."""
    return max(heads, key=lambda head: head.rows, default=None)

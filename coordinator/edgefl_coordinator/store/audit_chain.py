"""What holds the audit log together: the chain of its rows, and signed heads of it.

    digest of a row   SHA-256 of PAE("efla1/audit", digest before, number, at_ms, event, subject, detail)
    signed head       {federation, rows, sha256 of the last of them, at_ms, signing key}, signed as "efla1/head"

Guarantees: the digest covers every field of a row and all rows before it, so an edited, removed or moved row is found
at a place that the error names. Whoever can write the store can compute a whole new chain, but no head: a history that
was rewritten before a head, or cut before it, is found with the public key alone. What came after the newest head that
the reader has is not proven. A restored log lacks rows that were signed; that is told, and passes only where the reader
says that it is known. Source: docs/security.md 2.9, check 69.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.envelopes.keys import PublicSigningKey, SigningKey
from edgefl_protocol.errors import KeyMaterialError, RecordError
from edgefl_protocol.pae import pae
from edgefl_protocol.records.record_form import COUNTS, HEX64, TIMES, WORD, check_fields, make, parse, split, verify
from edgefl_protocol.sentences import counted

HEAD_LABEL: Final = "efla1/head"
RESTORED: Final = "restored"  # the event of the row with which a restored log goes on
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
    rows: Iterable[LogRow],
    heads: Collection[LogHead] = (),
    federation: str = "",
    key_ids: Collection[str] = (),
    restored: Collection[int] = (),
) -> int:
    """Recompute the chain, compare it with the heads, and return its number of rows.

    Args:
        federation: of the heads.
        key_ids: of the coordinator's signing keys, now and before.
        restored: rows at which the reader knows that the log was restored from a backup. A head that was signed before
            that, of that row or a later one, tells of rows that were lost with it, and is passed over.

    Raises:
        OperatorError: the first row that was changed, removed or moved; a head of a key that does not count, of
            another federation, or of rows that are not there or not the same. One sentence.
    """
    wanted = _by_rows(heads, federation, key_ids)
    restorations: dict[int, int] = {}  # row → when
    previous, number = FIRST, 0
    for row in rows:
        number += 1
        expected = digest(previous, row.number, row.at_ms, row.event, row.subject, row.detail)
        if row.number != number or row.sha256 != expected:
            raise OperatorError(f"the audit log is broken at row {number}: it was edited after it was written")
        previous = row.sha256
        if row.event == RESTORED:
            restorations[number] = row.at_ms
        others = [head for head in wanted.pop(number, ()) if head.sha256 != previous]
        if _not_lost(others, restorations, restored):
            raise OperatorError(
                f"the audit log was written anew: a signed head tells another row {number}, so a row up to there is "
                "not the one that was signed"
            )
    behind = [head for heads in wanted.values() for head in heads]
    if missing := _not_lost(behind, restorations, restored):
        most = max(head.rows for head in missing)
        raise OperatorError(
            f"the audit log was cut: it has {counted(number, 'row')}, and a signed head tells of {most}"
        )
    return number


def _not_lost(heads: Iterable[LogHead], restorations: Mapping[int, int], known: Collection[int]) -> list[LogHead]:
    """Return the heads that no restoration explains.

    An `OperatorError` where one explains a head that the reader does not know of: whoever cut the log can write such a
    row, too.
    """
    left = []
    for head in heads:
        found = [row for row, at_ms in restorations.items() if row <= head.rows and head.at_ms < at_ms]
        if not found:
            left.append(head)
        elif not set(found) & set(known):
            row = min(found)
            raise OperatorError(
                f"the audit log says that it was restored from a backup in row {row}, at {moment(restorations[row])}, "
                f"and a head that was signed before, at {moment(head.at_ms)}, tells of {head.rows} rows: those from "
                f"row {row} on were lost. If you restored it then, check again with --restored {row}; if nobody did, "
                "the log was cut"
            )
    return left


def _by_rows(heads: Collection[LogHead], federation: str, key_ids: Collection[str]) -> dict[int, list[LogHead]]:
    """The heads by the row that they end at."""
    found: dict[int, list[LogHead]] = {}
    for head in heads:
        if head.federation != federation:
            raise OperatorError(f"a signed head is of the federation {head.federation}, not {federation}")
        if head.key_id not in key_ids:
            raise OperatorError(
                f"a head of row {head.rows} is signed by the key {head.key_id}, which is not known as the "
                "coordinator's; if it is or was its key, name it with --key KEY_ID"
            )
        found.setdefault(head.rows, []).append(head)
    return found


def newest(heads: Iterable[LogHead]) -> LogHead | None:
    """Return the head that was signed last, or None."""
    return max(heads, key=lambda head: (head.at_ms, head.rows), default=None)

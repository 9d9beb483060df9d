"""The audit log: append-only rows, each chained to the one before.

Guarantees: the digest of a row covers every field of it and the digest before it, so an edited, removed or moved row
breaks the chain at a place that `verify` names. Source: docs/security.md, check 69; label `efla1/audit`.
"""

import hashlib
import json
from collections.abc import Collection, Mapping

from sqlalchemy import Connection, insert, select

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store.tables import audit
from edgefl_protocol.pae import pae

Detail = Mapping[str, object]

_FIRST = "0" * 64


def append(connection: Connection, now_ms: int, event: str, subject: str, detail: Detail | None = None) -> None:
    """Add one row within the caller's transaction; `detail` never holds a secret or a payload.

    `event` says what happened, in snake_case, and `subject` whom it concerns: a member's name, a round, a bundle.
    """
    last = connection.execute(select(audit.c.number, audit.c.sha256).order_by(audit.c.number.desc()).limit(1)).first()
    number, previous = (last.number + 1, last.sha256) if last else (1, _FIRST)
    text = json.dumps(dict(detail or {}), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    sha256 = _digest(previous, number, now_ms, event, subject, text)
    row = {"number": number, "at_ms": now_ms, "event": event, "subject": subject, "detail": text, "sha256": sha256}
    connection.execute(insert(audit).values(row))


def last(connection: Connection) -> dict[str, str | int] | None:
    """Return event, subject and at_ms of the newest row, or None."""
    row = connection.execute(select(audit).order_by(audit.c.number.desc()).limit(1)).first()
    return {"event": row.event, "subject": row.subject, "at_ms": row.at_ms} if row else None


def newest_of(connection: Connection, events: Collection[str]) -> tuple[str, str, int, dict[str, object]] | None:
    """Return event, subject, at_ms and detail of the newest row of these events, or None."""
    found = select(audit).where(audit.c.event.in_(events)).order_by(audit.c.number.desc()).limit(1)
    row = connection.execute(found).first()
    return (row.event, row.subject, row.at_ms, json.loads(row.detail)) if row else None


def verify(connection: Connection) -> int:
    """Recompute the chain and return its number of rows.

    An `OperatorError` names the first row that was changed, removed or moved.
    """
    previous, number = _FIRST, 0
    for row in connection.execute(select(audit).order_by(audit.c.number)):
        number += 1
        expected = _digest(previous, row.number, row.at_ms, row.event, row.subject, row.detail)
        if row.number != number or row.sha256 != expected:
            raise OperatorError(f"the audit log is broken at row {number}: it was edited after it was written")
        previous = row.sha256
    return number


def _digest(previous: str, number: int, at_ms: int, event: str, subject: str, detail: str) -> str:
    parts = (previous, str(number), str(at_ms), event, subject, detail)
    return hashlib.sha256(pae(b"efla1/audit", *(part.encode() for part in parts))).hexdigest()

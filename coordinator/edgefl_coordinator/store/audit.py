"""The audit log: append-only rows, each chained to the one before. Source: docs/security.md 2.9."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from edgefl_coordinator.store.audit_chain import FIRST, LogRow, digest
from edgefl_coordinator.store.statements import Statement
from edgefl_coordinator.store.tables import audit

Detail = Mapping[str, object]

_WRITTEN = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":"))
_HEAD = Statement(select(audit.c.number, audit.c.sha256).order_by(audit.c.number.desc()).limit(1))
_ADD = Statement(insert(audit))


@dataclass(frozen=True)
class AuditRow:
    """One row of the log."""

    number: int  # from 1
    at_ms: int
    event: str
    subject: str
    detail: dict[str, Any]


def append(connection: Connection, now_ms: int, event: str, subject: str, detail: Detail | None = None) -> None:
    """Add one row within the caller's transaction; `detail` never holds a secret or a payload.

    `event` says what happened, in snake_case, and `subject` whom it concerns: a member's name, a round, a bundle.
    """
    before, previous = head(connection)
    number = before + 1
    text = _WRITTEN.encode(dict(detail or {}))
    sha256 = digest(previous, number, now_ms, event, subject, text)
    row = {"number": number, "at_ms": now_ms, "event": event, "subject": subject, "detail": text, "sha256": sha256}
    _ADD.send(connection, **row)


def last(connection: Connection) -> dict[str, str | int] | None:
    """Return event, subject and at_ms of the newest row, or None."""
    row = connection.execute(select(audit).order_by(audit.c.number.desc()).limit(1)).first()
    return {"event": row.event, "subject": row.subject, "at_ms": row.at_ms} if row else None


def newest_of(connection: Connection, events: Collection[str]) -> tuple[str, str, int, dict[str, object]] | None:
    """Return event, subject, at_ms and detail of the newest row of these events, or None."""
    newest = select(func.max(audit.c.number)).where(audit.c.event.in_(events)).scalar_subquery()
    row = connection.execute(select(audit).where(audit.c.number == newest)).first()
    return (row.event, row.subject, row.at_ms, json.loads(row.detail)) if row else None


def since_ms(connection: Connection, event: str, ended_by: Collection[str]) -> int | None:
    """Return when the newest unbroken run of an event began, or None where a row of `ended_by` came after it."""
    ended = select(func.coalesce(func.max(audit.c.number), 0)).where(audit.c.event.in_(ended_by)).scalar_subquery()
    begun = select(func.min(audit.c.at_ms)).where(audit.c.event == event, audit.c.number > ended)
    found: int | None = connection.scalar(begun)
    return found


def times_of(
    connection: Connection, events: Collection[str], subjects: Collection[str] = (), *, from_ms: int
) -> list[int]:
    """Return when these events happened from a time on, of these subjects alone where some are named."""
    found = select(audit.c.at_ms).where(audit.c.event.in_(events), audit.c.at_ms >= from_ms)
    return list(connection.scalars(found.where(audit.c.subject.in_(subjects)) if subjects else found))


def count(connection: Connection) -> int:
    """Return the number of the newest row; 0 where there is none."""
    return connection.scalar(select(func.max(audit.c.number))) or 0


def rows(connection: Connection, *, after: int, most: int) -> list[AuditRow]:
    """Return the first `most` rows whose number is above `after`, in order."""
    found = select(audit).where(audit.c.number > after).order_by(audit.c.number).limit(most)
    return [_row(one) for one in connection.execute(found)]


def newest_rows(connection: Connection, *, from_ms: int = 0, most: int) -> list[AuditRow]:
    """Return the newest `most` rows of a time from `from_ms` on, in order."""
    found = select(audit).where(audit.c.at_ms >= from_ms).order_by(audit.c.number.desc()).limit(most)
    return [_row(one) for one in connection.execute(found)][::-1]


def _row(found: Any) -> AuditRow:
    return AuditRow(found.number, found.at_ms, found.event, found.subject, json.loads(found.detail))


def kept_rows(connection: Connection, *, after: int = 0, most: int | None = None) -> Iterator[LogRow]:
    """Give the rows as they are kept, in the order of their numbers."""
    found = select(audit).where(audit.c.number > after).order_by(audit.c.number).limit(most)
    for row in connection.execute(found):
        yield LogRow(row.number, row.at_ms, row.event, row.subject, row.detail, row.sha256)


def head(connection: Connection) -> tuple[int, str]:
    """Return the number of the newest row and its digest; 0 and zeros where there is none."""
    found = _HEAD.first(connection)
    return (found[0], found[1]) if found else (0, FIRST)

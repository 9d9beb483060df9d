"""What `serve` logs: a line of text or one JSON object for each event, with its time and level.

Guarantees: an event is logged once its row of the audit log is committed, and once; a line holds names, numbers and
codes, never a key, a token, an invite, or what a member wrote. Of a fault of this program it holds where it arose and
its kind, and not its message, which may quote anything. Source: docs/security.md 2.6, check 14.
"""

import json
import logging
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TextIO

from edgefl_coordinator.store import audit, audit_words
from edgefl_coordinator.store.coordinator import Coordinator

LogFormat = Literal["text", "json"]
_ROWS_AT_ONCE = 1000
_MINUTE_S = 60.0
log = logging.getLogger("edgefl_coordinator")


def configure_logging(stream: TextIO, log_format: LogFormat, level: str) -> None:
    """Log to a stream: this program from `level` on, what it uses from warnings on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines() if log_format == "text" else _Objects())
    handler.addFilter(OnceAMinute())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    log.setLevel(level.upper())


class EventLog:
    """Logs what the audit log tells from now on."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        with coordinator.store.transaction() as connection:
            self._number = audit.count(connection)

    def catch_up(self) -> None:
        """Log the events since the last call."""
        while True:
            with self._coordinator.store.transaction() as connection:
                rows = audit.rows(connection, after=self._number, most=_ROWS_AT_ONCE)
            for row in rows:
                level = audit_words.event_level(row.event, row.detail)
                if log.isEnabledFor(level):
                    detail = audit_words.without_explanation(row.event, row.detail)
                    facts = {"event": row.event, "subject": row.subject, **detail}
                    words = audit_words.event_words(row.event, row.subject, row.detail)
                    log.log(level, "%s", words, extra={"facts": facts, "at_ms": row.at_ms})
                self._number = row.number
            if len(rows) < _ROWS_AT_ONCE:
                return


class OnceAMinute(logging.Filter):
    """Lets what anybody on the network can cause through once a minute, so that nobody fills the disk with lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}  # message → when it was let through, how many came since

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is logged; it then says how many like it were not."""
        if not hasattr(record, "once_a_minute"):
            return True
        said, now_s = record.getMessage(), self._clock()
        last_s, dropped = self._last.get(said, (now_s - _MINUTE_S, 0))
        if now_s - last_s < _MINUTE_S:
            self._last[said] = (last_s, dropped + 1)
            return False
        self._last[said] = (now_s, 0)
        if dropped:
            record.msg, record.args = f"{said}, and {dropped} times since the last such line", ()
        return True


def _time(record: logging.LogRecord) -> str:
    seconds = getattr(record, "at_ms", record.created * 1000) / 1000
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _where(error: BaseException) -> str:
    """Write where an error and those that it arose from were raised, and their kinds."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    here = f"Traceback:\n{''.join(traceback.format_tb(error.__traceback__))}{type(error).__qualname__}"
    return f"{_where(before)}\n{here}" if before else here


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = f"{_time(record)} {record.levelname} {' '.join(record.getMessage().splitlines())}"
        error = record.exc_info[1] if record.exc_info else None
        return f"{said}\n{_where(error)}" if error else said


class _Objects(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        told = {"time": _time(record), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info and record.exc_info[1]:
            told["traceback"] = _where(record.exc_info[1])
        return json.dumps({**getattr(record, "facts", {}), **told})

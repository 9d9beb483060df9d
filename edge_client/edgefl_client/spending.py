"""What left this device and when, so that the policy's limits hold across restarts and crashes.

* An entry is on the disk before the first byte leaves (SQLite, `synchronous=FULL`), so a crash can count something
  that did not leave, never miss something that did.
* An entry is known by the key of its work item: a reply that is sent again under the same key counts once.
* Entries older than 24 hours are dropped. One dated in the future came from a wrong clock and ages from now on.

No content is kept: key, federation, round, kinds, bytes, time. Source: docs/security.md, reliability table.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence

from edgefl_client.exchange.member import Permit
from edgefl_client.exchange.outbox import WorkItem
from edgefl_client.home import Home
from edgefl_client.policy import Policy, PolicyError, Spent, travels_of
from edgefl_protocol.errors import StorageError
from edgefl_protocol.payload import Payload

DAY_MS = 86_400_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    idem TEXT PRIMARY KEY,
    federation TEXT NOT NULL,
    round INTEGER NOT NULL,
    travels TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    at_ms INTEGER NOT NULL
) STRICT
"""


def read_spent(
    home: Home, now_ms: int, *, federation: str = "", round_number: int | None = None, idem: str = ""
) -> Spent:
    """What left in the last 24 hours, apart from one reply.

    Args:
        home: the device's home.
        now_ms: Unix milliseconds, by the best clock there is.
        federation: of the reply in question; empty for none.
        round_number: its round, which is not counted among the others; None where it has none yet.
        idem: key of its work item, which is not counted; empty for none.

    Raises:
        StorageError: the notes are damaged or cannot be read.
    """
    if not home.spent_file.exists():
        return Spent(now_ms=now_ms)
    with _opened(home) as db:
        _age(db, now_ms)
        size = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM spent WHERE idem != ?", (idem,)).fetchone()[0]
        rounds = set(db.execute("SELECT federation, round FROM spent").fetchall()) - {(federation, round_number)}
    return Spent(now_ms=now_ms, rounds=len(rounds), bytes=size)


def note_spent(
    home: Home, now_ms: int, *, federation: str, round_number: int, idem: str, travels: Sequence[str], size: int
) -> None:
    """Note durably that a reply is about to leave.

    Args:
        home: the device's home.
        now_ms: Unix milliseconds, by the best clock there is.
        federation: whom it is for.
        round_number: the round it answers.
        idem: key of its work item; noted once.
        travels: kinds of content in it.
        size: bytes of its payload.

    Raises:
        StorageError: it cannot be noted, so it must not leave.
    """
    home.prepare()
    with _opened(home) as db:
        db.execute(
            "INSERT OR REPLACE INTO spent (idem, federation, round, travels, bytes, at_ms) VALUES (?, ?, ?, ?, ?, ?)",
            (idem, federation, round_number, " ".join(travels), size, now_ms),
        )


def permit(home: Home, policy: Policy, clock_ms: Callable[[], int]) -> Permit:
    """The question to ask right before a work item is sent: None where it may leave, which is then noted.

    Args:
        home: the device's home.
        policy: the owner's decisions.
        clock_ms: Unix milliseconds, by the corrected clock.
    """

    def ask(item: WorkItem, round_number: int) -> PolicyError | None:
        now_ms, size = clock_ms(), len(item.payload)
        travels = travels_of(Payload.from_bytes(item.payload, size).arrays)
        spent = read_spent(home, now_ms, federation=item.federation, round_number=round_number, idem=item.idem)
        try:
            policy.check(travels, size, spent)
        except PolicyError as error:
            return error
        note_spent(
            home, now_ms, federation=item.federation, round_number=round_number, idem=item.idem, travels=travels,
            size=size,
        )  # fmt: skip
        return None

    return ask


def _age(db: sqlite3.Connection, now_ms: int) -> None:
    db.execute("UPDATE spent SET at_ms = ? WHERE at_ms > ?", (now_ms, now_ms))
    db.execute("DELETE FROM spent WHERE at_ms <= ?", (now_ms - DAY_MS,))


@contextlib.contextmanager
def _opened(home: Home) -> Iterator[sqlite3.Connection]:
    """The notes in one transaction, which is on the disk when the block ends."""
    path = home.spent_file
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        with contextlib.closing(sqlite3.connect(path, timeout=10.0, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=DELETE")
            db.execute("PRAGMA synchronous=FULL")
            db.execute(_SCHEMA)
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
    except (sqlite3.Error, OSError) as error:
        full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
        why = "the disk is full" if full else str(getattr(error, "strerror", None) or error)
        raise StorageError(
            f"what left this device cannot be noted in {path}: {why}; free space, or move the file away if it is "
            "damaged",
            "disk_full" if full else "storage",
        ) from error

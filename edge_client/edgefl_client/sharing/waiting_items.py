"""What waits in the outbox, as its owner may see and drop it: facts of the items, never their contents or keys.

Listing needs no key of the member and changes no item. Looking into an item and dropping it take the member's keys, and
with them the lock, so that nothing is dropped while another process sends it.
"""

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl_client.home import Home
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.release import describe
from edgefl_exchange.errors import OutboxError
from edgefl_exchange.identity import Identity
from edgefl_exchange.outbox import LEARNED, WorkItem, storage_error
from edgefl_protocol.sentences import counted

LEAST_DIGITS = 8  # of an item's key, to name it by
_CUT_OFF = "SQLITE_READONLY_ROLLBACK"  # a kill cut a transaction off: nobody holds it, and SQLite undoes it in "rw"


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An item that waits."""

    id: str  # its key
    federation: str  # whom it is for
    kind: str  # `reply` for a contribution, `learned` for what was learned in a round
    round: int | None  # the round it is promised to, or None
    state: str  # `waiting`: never sent; `unanswered`: sent, and no signed answer came, so it may have arrived
    attempts: int  # how often it was sent
    age_s: int  # seconds since it was put; negative where the clock went back
    bytes: int  # of it on the disk


def list_waiting(home: Home, now_ms: int) -> list[Waiting]:
    """List what waits, oldest first.

    Raises:
        OutboxError: the outbox is damaged, or held by another process.
    """
    path = home.outbox_file
    if not path.exists():
        return []
    try:
        rows = _rows(path)
    except sqlite3.Error as error:
        raise storage_error(path, error) from error
    return [
        Waiting(
            id=idem, federation=federation, kind=kind, round=round_number,
            state="unanswered" if attempts else "waiting", attempts=attempts,
            age_s=(now_ms - created_ms) // 1000, bytes=size,
        )
        for idem, federation, kind, round_number, attempts, created_ms, size in rows
    ]  # fmt: skip


def _rows(path: Path) -> list[tuple[Any, ...]]:
    try:
        return _read(path, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != _CUT_OFF:
            raise
        return _read(path, "rw")


def _read(path: Path, mode: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", timeout=10.0, uri=True)) as db:
        if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'item'").fetchone() is None:
            return []  # killed while it was made
        return db.execute(
            "SELECT idem, federation, kind, round, attempts, created_ms, bytes FROM item ORDER BY created_ms, rowid"
        ).fetchall()


def show_waiting(device: Device, which: str) -> dict[str, Any]:
    """Describe what an item would tell its receiver (`release.describe`).

    Args:
        which: the item's id, or its first digits.

    Raises:
        OutboxError: no such item, or it cannot be opened.
    """
    found = _named(device, which)
    with (
        Identity(device.home.member, device.passphrase) as identity,
        device.outbox(identity) as outbox,
    ):
        item: WorkItem | None = next((one for one in outbox.items(found.federation) if one.idem == found.id), None)
        if item is None:
            raise _gone(which)
        return {"id": found.id, "federation": found.federation, "round": found.round, **describe(item.payload)}


def drop_waiting(device: Device, which: str) -> Waiting:
    """Drop an item for good, and give what it was.

    Raises:
        OutboxError: no such item.
        EdgeflError: the member's keys cannot be opened, or another process uses them.
    """
    _named(device, which)  # before the keys are asked for
    with (
        Identity(device.home.member, device.passphrase) as identity,
        device.outbox(identity) as outbox,
    ):
        found = _named(device, which)  # it may have left meanwhile
        if found.kind == LEARNED and found.round is not None:  # else the next sync would learn the round again
            from edgefl_client.learning.live_round import drop_reply  # brings the runtime, which listing does without

            drop_reply(device.home, found.federation, found.round, "its owner dropped it")
        outbox.delete(found.id)
    return found


def waiting_text(items: list[Waiting]) -> str:
    """Write the outbox for a person, a line per item."""
    if not items:
        return "nothing waits in the outbox"
    return "\n".join(
        f"{one.id}  {one.bytes} bytes for {one.federation}, {_age(one.age_s)}, "
        + ("for the next round" if one.round is None else f"for round {one.round}")
        + ("" if one.state == "waiting" else f", sent {counted(one.attempts, 'time')} without an answer")
        for one in items
    )


def _named(device: Device, which: str) -> Waiting:
    items = list_waiting(device.home, device.clock_ms())
    found = [one for one in items if one.id == which or (len(which) >= LEAST_DIGITS and one.id.startswith(which))]
    if len(found) != 1:
        raise _gone(which)
    return found[0]


def _gone(which: str) -> OutboxError:
    return OutboxError(
        f"{which[:64]!r} fits no item of the outbox, or more than one: give the whole id or at least its first "
        f"{LEAST_DIGITS} digits, as edgefl advanced outbox lists them",
        "unknown_item",
    )


def _age(seconds: int) -> str:
    if seconds < 0:
        return "its age is unknown, because the clock was ahead"
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} old"
    return f"{seconds} s old"

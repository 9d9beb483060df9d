"""What left this device and when, so that the policy's limits hold across restarts and crashes.

* An entry is on the disk before the first byte leaves, so a crash can count something that did not leave, never miss
  something that did. The file is replaced atomically; a damaged one is an error, never "nothing was spent".
* An entry is known by the key of its work item and its content: a reply that is sent again counts once, and one that
  is learned again under the same key counts again.
* Entries older than 24 hours are dropped. One dated in the future came from a wrong clock and ages from now on.
* Only the holder of the member's keys writes, so two processes cannot lose each other's entries.

No content is kept: key, federation, round, kinds, bytes, time, and the digest by which it is known again.
Source: docs/security.md, reliability table.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

from edgefl_client.home import Home, read_json, write_json
from edgefl_client.sharing.policy import Policy, PolicyError, Spent
from edgefl_exchange.delivery import Permit
from edgefl_exchange.outbox import WorkItem
from edgefl_protocol.errors import StorageError
from edgefl_protocol.rules.travels import travels_of

DAY_MS = 86_400_000
MAX_ENTRIES = 500  # of 24 hours; the file stays small enough to be read


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A reply that left."""

    idem: str  # key of its work item
    federation: str  # whom it was for
    round: int  # the round it answered
    travels: str  # kinds of content in it, with spaces between
    bytes: int  # of its payload
    at_ms: int  # when, Unix milliseconds
    sha256: str = ""  # of its payload, of a large one as it is encrypted; empty in files of before


def read_spent(
    home: Home, now_ms: int, *, federation: str = "", round_number: int | None = None, idem: str = "", sha256: str = ""
) -> Spent:
    """Add up what left in the last 24 hours, apart from one reply.

    Args:
        now_ms: Unix milliseconds, by the best clock there is.
        federation: of the reply in question; empty for none.
        round_number: its round, which is not counted among the others; None where it has none yet.
        idem: key of its work item; empty for none.
        sha256: digest of its content, as in `Entry`: what left under this key with this content is not counted.
    """
    entries = [one for one in _entries(home) if one.at_ms > now_ms - DAY_MS]
    rounds = {(one.federation, one.round) for one in entries} - {(federation, round_number)}
    return Spent(
        now_ms=now_ms, rounds=len(rounds), bytes=sum(one.bytes for one in entries if not _is(one, idem, sha256))
    )


def sent_before(home: Home, federation: str, content: bytes) -> int | None:
    """Find the round that the very same payload was sent for in the last 24 hours or so; None where there is none."""
    same = hashlib.sha256(content).hexdigest()
    return next((one.round for one in _entries(home) if (one.federation, one.sha256) == (federation, same)), None)


def note_spent(
    home: Home,
    now_ms: int,
    *,
    federation: str,
    round_number: int,
    idem: str,
    travels: Sequence[str],
    size: int,
    sha256: str = "",
) -> None:
    """Note durably, once per key and content, that a reply is about to leave; where that fails, it must not leave."""
    entry = Entry(
        idem=idem, federation=federation, round=round_number, travels=" ".join(travels), bytes=size, at_ms=now_ms,
        sha256=sha256,
    )  # fmt: skip
    _write(home, [*(one for one in _entries(home) if not _is(one, idem, sha256)), entry], now_ms)


def permit(home: Home, policy: Policy, clock_ms: Callable[[], int]) -> Permit:
    """Make the check that is called right before a work item is sent.

    The check returns why the item may not leave. Where it may, the check notes what leaves and returns None. Only the
    holder of the member's keys calls it.
    """

    def ask(item: WorkItem, round_number: int) -> PolicyError | None:
        now_ms, size = clock_ms(), item.size
        entries = _entries(home)
        if any(one.at_ms > now_ms for one in entries):  # by a clock that was ahead: from now on they age
            _write(home, entries, now_ms)
        travels = travels_of(item.names)
        sha256 = hashlib.sha256(item.payload).hexdigest() if item.blob is None else item.blob.sha256
        spent = read_spent(
            home, now_ms, federation=item.federation, round_number=round_number, idem=item.idem, sha256=sha256
        )  # fmt: skip
        try:
            policy.check(travels, size, spent)
        except PolicyError as error:
            return error
        recent = [one for one in entries if one.at_ms > now_ms - DAY_MS and not _is(one, item.idem, sha256)]
        if len(recent) >= MAX_ENTRIES:
            return PolicyError(
                f"{len(recent)} replies left this device in the last 24 hours, and more than {MAX_ENTRIES} are "
                "never sent: wait, and tell the operator",
                "too_many_rounds",
            )
        note_spent(
            home, now_ms, federation=item.federation, round_number=round_number, idem=item.idem, travels=travels,
            size=size, sha256=sha256,
        )  # fmt: skip
        return None

    return ask


def _is(entry: Entry, idem: str, sha256: str) -> bool:
    """Tell whether an entry is of this very reply."""
    return (entry.idem, entry.sha256) == (idem, sha256)


def _write(home: Home, entries: Sequence[Entry], now_ms: int) -> None:
    home.prepare()
    kept = [replace(one, at_ms=min(one.at_ms, now_ms)) for one in entries if one.at_ms > now_ms - DAY_MS]
    write_json(home.spent_file, {"format": 1, "left": [asdict(one) for one in kept]})


def _entries(home: Home) -> list[Entry]:
    record = read_json(home.spent_file, "what left in the last 24 hours")
    if record is None:
        return []
    try:
        if set(record) != {"format", "left"} or record["format"] != 1:
            raise ValueError("it is not in the form that this version writes")
        entries = [Entry(**one) for one in record["left"]]
        if not all(type(getattr(one, field.name)) is field.type for one in entries for field in fields(Entry)):
            raise ValueError("it holds a value of another type")
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"{home.spent_file} is damaged: it does not say what left in the last 24 hours; restore it, or move it "
            "away if you know that little left",
            "damaged",
        ) from error
    return entries

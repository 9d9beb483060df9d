"""Broadcasts of a federation's rounds on this device: one file a round in the home, of the newest three rounds.

A file is named by federation, number of the coordinator's key record, and round. A coordinator that was restored from a
backup does rounds again, perhaps with other replies, and its record has a number above all that members saw
(docs/decisions/0056): so what it sent of a round before is not taken for what it sends now. It renews its key each
week, too; then the round's broadcast is fetched once more.
"""

from pathlib import Path

from edgefl_client.home import Home
from edgefl_exchange.membership import Membership
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.envelopes.blob import MAX_BLOB_BYTES
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.payload import Payload

KEPT = 3


def broadcast_file(home: Home, membership: Membership, number: int) -> Path:
    """Name the file of a round's broadcast, whether it is there or not."""
    return home.broadcasts / f"{_begins(membership)}{number:06d}.payload"


def newest_file(home: Home, federation: str) -> Path | None:
    """Find the file of the newest round of a federation; None where there is none."""
    return max(home.broadcasts.glob(f"{federation}-*.payload"), default=None)


def read_broadcast(file: Path) -> Payload:
    """Read a broadcast."""
    return Payload.from_bytes(read_bounded(file, MAX_BLOB_BYTES), MAX_BLOB_BYTES)


def kept_broadcast(home: Home, membership: Membership, number: int) -> Payload | None:
    """Read a round's broadcast; None where it is missing, or damaged so that it has to be fetched again."""
    file = broadcast_file(home, membership, number)
    try:
        return read_broadcast(file) if file.exists() else None
    except PayloadError:
        return None


def keep_broadcast(home: Home, membership: Membership, number: int, broadcast: Payload) -> None:
    """Keep a round's broadcast durably, and delete all but the newest."""
    home.prepare(home.broadcasts)
    write_atomic(broadcast_file(home, membership, number), broadcast.to_bytes(), mode=0o600)
    for old in sorted(home.broadcasts.glob("*.payload"), key=_round_of)[:-KEPT]:
        old.unlink(missing_ok=True)


def forget_others(home: Home, membership: Membership, number: int) -> None:
    """Delete what a restored coordinator does again: broadcasts of later rounds, and of the keys before its own."""
    for file in home.broadcasts.glob("*.payload"):
        if _round_of(file) > number or not file.name.startswith(_begins(membership)):
            file.unlink(missing_ok=True)


def forget_all(home: Home) -> None:
    """Delete every broadcast."""
    for file in home.broadcasts.glob("*.payload"):
        file.unlink(missing_ok=True)


def _begins(membership: Membership) -> str:
    return f"{membership.federation}-{membership.key_number}-"


def _round_of(file: Path) -> int:
    digits = file.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0

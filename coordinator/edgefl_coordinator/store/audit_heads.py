"""The signed heads of the audit log: one line each in the file `audit-heads` of the coordinator's folder.

Guarantees: `serve` signs one when it starts, each hour in which something happened, and when it stops; the file is
replaced as a whole, so a crash leaves the heads before. They hold no secret and are made to be copied elsewhere:
against such a copy the server itself cannot rewrite what it signed. Source: docs/security.md 2.9, check 69.
"""

from collections.abc import Collection

from sqlalchemy import Connection

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import audit, revocations
from edgefl_coordinator.store.audit_chain import LogHead, check_log, make_head, newest, read_head
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.root import unverified_root

EACH_S = 3600.0
MAX_HEADS_BYTES = 64 << 20  # of 18 years with one an hour


def sign(coordinator: Coordinator) -> LogHead | None:
    """Sign how far the log reaches now, durably; None where the newest head tells it already.

    Raises:
        StorageError: the disk; the heads before are still there.
        OperatorError: the file holds something else.
    """
    with coordinator.store.transaction() as connection:
        rows, sha256 = audit.head(connection)
    lines = _lines(coordinator.store.home)
    last = _read(lines[-1]) if lines else None
    if rows == 0 or (last is not None and (last.rows, last.sha256) == (rows, sha256)):
        return None
    keys, federation = coordinator.keys, coordinator.settings.federation
    record = make_head(keys.signing, federation, rows, sha256, coordinator.clock())
    write_atomic(coordinator.store.home.heads, b"".join(line + b"\n" for line in (*lines, record)))
    return read_head(record)


def verify(
    coordinator: Coordinator, connection: Connection, key_ids: Collection[str] = (), restored: Collection[int] = ()
) -> tuple[int, LogHead | None]:
    """Check the log and its heads; return how many rows it has, and its newest head.

    `key_ids` are signing keys that this coordinator had before, beside its own and those of the root sets, and
    `restored` rows at which the log was restored. An `OperatorError` says in one sentence what is broken.
    """
    heads = [_read(line) for line in _lines(coordinator.store.home)]
    known = {coordinator.keys.signing.key_id, *key_ids}
    for record in revocations.chain(connection):
        known |= {key.key_id for key in unverified_root(record).coordinators}
    count = check_log(audit.kept_rows(connection), heads, coordinator.settings.federation, known, restored)
    return count, newest(heads)


def lines_of(coordinator: Coordinator) -> list[str]:
    """Return the heads as they are kept."""
    return [line.decode("ascii", "replace") for line in _lines(coordinator.store.home)]


def _lines(home: CoordinatorHome) -> list[bytes]:
    return read_bounded(home.heads, MAX_HEADS_BYTES).splitlines() if home.heads.exists() else []


def _read(line: bytes) -> LogHead:
    try:
        return read_head(line)
    except RecordError as error:
        raise OperatorError(f"the file of signed heads is broken: {error}") from error

"""What was acknowledged is there when the power comes back. Source: docs/security.md 2.2 and 5; its check 58."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Row, select
from tests.power_cut import BEGIN, FlushedDisk, cut_after_each

from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.store import BLOB_COLUMNS, SMALL_BYTES, Store
from edgefl_coordinator.store.tables import replies, states, uploads

NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)

HOME = f"""{BEGIN}
from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import sqlite_file
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_protocol import Payload
from tests.coordinator.conftest import Clock, quick_member, settings_table, start_rounds

root, count = Path(sys.argv[1]), int(sys.argv[2])
home = CoordinatorHome(root)
sqlite_file.has_wal_reset_defect = lambda _: sys.argv[3:] != ["wal"]  # with the fault, the journal is DELETE

def opened(**changes):
    make_home(home, settings_table(**changes))
    return open_coordinator(home, clock=Clock())
"""

UPLOADS = f"""{HOME}
coordinator = opened(rounds={{"quorum_target": count + 1}})
members = [quick_member(coordinator, f"clinic-{{number}}") for number in range(count)]
start_rounds(coordinator)
for member in members:
    assert isinstance(member.reply(1), Payload)
    acknowledged(member.name)
"""

FEDCLF = f"""{HOME}
import hashlib
from functools import partial
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.web.operations import OPERATIONS
from tests.coordinator.payloads.conftest import CNN, Blob, averaging_worker, reply_of

VALUES = 20_000  # 80 kB: a file
CNN_TASK = {{"method": "fedclf", "shares_maps": False, "backbone": CNN}}

worker = partial(averaging_worker, rounds=count, values=VALUES)

def start():
    OPERATIONS["start"](coordinator, {{}})
    assert step(coordinator, worker)

def digest(data):
    return hashlib.sha256(data).hexdigest()
"""

# Six things are acknowledged in a round: a reply in one envelope, three pieces of a blob, its reply, and the state.
IN_FILES = f"""{FEDCLF}
rounds = {{"count": count, "quorum_min": 2, "quorum_target": 2, "min_cohort": 1, "allow_small_cohort": True}}
coordinator = opened(task=CNN_TASK, rounds=rounds)
one, other = (quick_member(coordinator, f"clinic-{{number}}") for number in range(2))
start()
for number in range(1, count // 6 + 1):
    inline, large = reply_of(2 * number, VALUES), reply_of(2 * number + 1, VALUES).to_bytes()
    assert isinstance(one.reply(number, payload=inline), Payload)
    acknowledged(f"reply {{digest(inline.to_bytes())}}")
    blob = Blob(large)
    for place in range(3):
        have = blob.put(other, 32_768 * place, 32_768 * (place + 1))
        assert have == min(32_768 * (place + 1), len(blob.sealed))
        acknowledged(f"piece {{have}} {{digest(blob.sealed[:have])}}")
    assert isinstance(blob.reply(other, number, idem=f"work-item-{{number:08}}"), Payload)
    acknowledged(f"reply {{digest(large)}}")
    while step(coordinator, worker):
        pass
    acknowledged(f"state {{number}}")
"""

# Eight at once: five small ones in the crowd's thread, three of a file each in threads of their own, as `serve` does.
TOGETHER = f"""{FEDCLF}
from concurrent.futures import ThreadPoolExecutor
from tests.coordinator.carried import together

coordinator = opened(task=CNN_TASK, rounds={{"quorum_target": count + 1}})
members = [quick_member(coordinator, f"clinic-{{number}}") for number in range(count)]
start()

def send(number, values):
    payload = reply_of(number, values)
    assert isinstance(members[number].reply(1, payload=payload), Payload)
    acknowledged(f"reply {{digest(payload.to_bytes())}}")

with ThreadPoolExecutor(3) as pool:
    for first in range(0, count, 8):
        large = [pool.submit(send, first + place, VALUES) for place in range(5, 8)]
        for done in together(coordinator, [partial(send, first + place, 1000) for place in range(5)]):
            done.get()
        for sent in large:
            sent.result()
"""


@contextlib.contextmanager
def back(left: Path) -> Iterator[tuple[Store, Connection]]:
    """Open what a cut left, as the next start of the coordinator does: the audit log holds, each blob is whole."""
    opened = open_coordinator(CoordinatorHome(left))
    try:
        with opened.store.transaction() as connection:
            check_log(audit.kept_rows(connection))
            whole = [name for column in BLOB_COLUMNS if column is not uploads.c.blob
                     for name in connection.scalars(select(column).where(column.is_not(None)))]  # fmt: skip
        assert whole and all(opened.store.get_blob(name) for name in whole)
        with opened.store.transaction() as connection:
            yield opened.store, connection
    finally:
        opened.store.close()


def stored(connection: Connection) -> dict[str, Row[Any]]:
    """The replies in the store by their digest, each once."""
    rows = connection.execute(select(replies)).all()
    found = {row.sha256: row for row in rows}
    assert len(found) == len(rows)
    return found


def replied(told: list[str]) -> set[str]:
    """Digests of the replies that were acknowledged."""
    return {line.split()[1] for line in told if line.startswith("reply ")}


@pytest.mark.parametrize("cuts", [5, pytest.param(100, marks=NIGHTLY)])
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_no_acknowledged_upload_is_lost(folder, cuts, journal) -> None:
    """Check 58: 5 and 100 power cuts on a disk that drops what was not flushed; 0 acknowledged uploads are lost."""
    for told, left in cut_after_each(FlushedDisk(folder), UPLOADS, cuts, folder, journal):
        assert (left / "store.sqlite-wal").exists() == (journal == "wal")
        with back(left) as (_, connection):
            assert len(connection.scalars(select(replies.c.blob)).all()) == len(told)


@pytest.mark.parametrize("cuts", [12, pytest.param(102, marks=NIGHTLY)])
def test_what_lies_in_files_is_whole(folder, cuts) -> None:
    """Check 58 above 64 KiB: a reply, each piece of a blob, the blob's reply, and what the round made of both."""
    for told, left in cut_after_each(FlushedDisk(folder), IN_FILES, cuts, folder):
        kind, *last = told[-1].split()
        with back(left) as (store, connection):
            kept, pieces = stored(connection), connection.execute(select(uploads)).all()
            assert kept.keys() == replied(told)
            if kind == "reply":
                assert kept[last[0]].bytes > SMALL_BYTES and kept[last[0]].blob in store.payloads.names()
            if kind == "piece":
                assert [row.have for row in pieces] == [int(last[0])]
                begun = b"".join(store.payloads.upload(pieces[0].blob))
                assert hashlib.sha256(begun[: pieces[0].have]).hexdigest() == last[1]
            if kind == "state":
                assert max(connection.scalars(select(states.c.number))) == int(last[0])


@pytest.mark.parametrize("cuts", [8, pytest.param(104, marks=NIGHTLY)])
def test_what_shares_a_commit_is_kept_with_it(folder, cuts) -> None:
    """Check 58 for requests that come at once: whoever was answered first is kept, whoever else was under way."""
    untold = []
    for told, left in cut_after_each(FlushedDisk(folder), TOGETHER, cuts, folder):
        with back(left) as (_, connection):
            kept = stored(connection).keys()
        assert kept >= replied(told)
        untold.append(len(kept) - len(told))
    assert max(untold) >= 4  # the commit of the first small one was that of the other four

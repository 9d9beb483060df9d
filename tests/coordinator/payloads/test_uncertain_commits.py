"""A commit whose last flush fails may be on the disk; and large replies do not hold up small requests.

Source: docs/security.md, reliability (power loss) and overload; SQLite's SQLITE_IOERR_DIR_FSYNC, which comes after the
commit.
"""

import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store.tables import replies, states
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import Refusal


@pytest.fixture
def blob(lab: Any) -> Any:
    return lab.Blob(lab.reply_of(1).to_bytes())


def fail_after(federation: Any, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """The commit of this number is made, and then reported as failed."""
    dialect, made = federation.store._engine.dialect, []
    commit = dialect.do_commit

    def commits(connection: Any) -> None:
        commit(connection)
        made.append(1)
        if len(made) == which:
            raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(dialect, "do_commit", commits)


@pytest.mark.both_places
def test_a_reply_that_was_kept_after_all_has_its_file(federation, pair, blob, lab, monkeypatch) -> None:
    """Whichever of its commits fails so: the retry is accepted, and the file of the accepted reply is there."""
    blob.put_all(pair[0])
    failed = 0
    for which in range(1, 7):
        with monkeypatch.context() as patch:
            fail_after(federation, patch, which)
            failed += isinstance(blob.reply(pair[0]), Refusal)
        assert isinstance(blob.reply(pair[0]), Payload)
        (row,) = lab.rows(federation, replies)
        assert federation.store.get_blob(row.blob)
    assert failed


@pytest.mark.both_places
def test_a_state_that_was_kept_after_all_has_its_file(federation, pair, blob, lab, monkeypatch) -> None:
    """The round goes on from it: nothing that a row names is deleted."""
    for member in pair:
        one = lab.Blob(lab.reply_of(2).to_bytes())
        one.put_all(member)
        assert isinstance(one.reply(member), Payload)
    federation.clock.now_ms += 10**6
    for which in range(1, 5):
        with monkeypatch.context() as patch:
            fail_after(federation, patch, which)
            try:
                step(federation, lab.averaging_worker)
            except StorageError:
                continue
            break
    step(federation, lab.averaging_worker)
    named = [row.blob for row in lab.rows(federation, states) if row.blob is not None]
    assert named and all(federation.store.get_blob(name) for name in named)


def test_large_replies_in_a_crowd_leave_room(federation, pair, blob) -> None:
    """While one is read, eight may wait or be read; the next ones are told to come again, and hold no thread."""
    blob.put_all(pair[0])
    federation.store.large.acquire()
    try:
        with ThreadPoolExecutor(8) as threads:
            waiting = [threads.submit(blob.reply, pair[0], idem=f"work-item-{number:08}") for number in range(8)]
            while federation.store.waiting_large._value:
                time.sleep(0.01)
            assert blob.reply(pair[1], idem="work-item-99999999").code == "busy"
            federation.store.large.release()
            found = [one.result() for one in waiting]
    finally:
        if federation.store.large.locked():
            federation.store.large.release()
    assert sum(isinstance(one, Payload) for one in found) == 1

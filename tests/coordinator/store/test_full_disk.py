"""A disk that fills up at any flush of a round, or any new page of its database: docs/security.md check 59.

Two members reply, one in an envelope and one with a blob, and the round is aggregated. The disk is full from the n-th
flush of a file on, or the database from the n-th new page on, for each n until the round fits. Whatever failed is one
typed sentence; with room again the same round ends with the same state.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, text
from tests.coordinator.kept_blobs import blob_names
from tests.coordinator.payloads.conftest import CNN, Blob, averaging_worker, reply_of

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.store import BLOB_COLUMNS
from edgefl_coordinator.store.tables import replies, states
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import Refusal

Full = Callable[[Any, int], Any]  # gives a context in which the disk of a coordinator holds so much and no more


@contextmanager
def files_full(coordinator: Any, left: int) -> Iterator[None]:
    """So many flushes of a file or folder pass, and no more."""

    def counted(real: Callable[[int], None], descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, partial(counted, getattr(os, name)))
        yield


@contextmanager
def pages_full(coordinator: Any, left: int) -> Iterator[None]:
    """The database may have so many more pages: behind them SQLite itself says that the disk is full."""

    def most(pages: int) -> None:
        with coordinator.store.transaction() as connection:
            connection.execute(text(f"PRAGMA max_page_count = {pages}"))

    with coordinator.store.transaction() as connection:
        before = int(connection.scalar(text("PRAGMA page_count")))
    most(before + left)
    yield
    most(2**30)


class Round:
    """What is left of the first round; a member sends again what was not acknowledged."""

    def __init__(self, coordinator: Any, pair: list[Any], values: int) -> None:
        self.coordinator, self.pair, self.values = coordinator, pair, values
        self.blob = Blob(reply_of(2, values).to_bytes())
        self.waiting = [self.one_sends, self.other_sends]

    def one_sends(self) -> Any:
        return self.pair[0].reply(1, idem="work-item-00000001", payload=reply_of(1, self.values))

    def other_sends(self) -> Any:
        have = self.blob.put(self.pair[1], 0, 0)
        while isinstance(have, int) and have < len(self.blob.sealed):
            have = self.blob.put(self.pair[1], have, have + 50_000)
        return self.blob.reply(self.pair[1]) if isinstance(have, int) else have

    def go_on(self) -> list[str]:
        """Do it; returns the codes of what failed."""
        failed = []
        steps = [partial(step, self.coordinator, partial(averaging_worker, values=self.values))] * 3
        for work in [*self.waiting, *steps]:
            try:
                found = work()
            except StorageError as error:
                failed.append(error.code)
                continue
            if isinstance(found, Refusal):
                failed.append(found.code)
            elif work in self.waiting:
                self.waiting.remove(work)
        return failed


def state_of(coordinator: Any) -> str:
    """Digest of the state that the first round made, where books and files agree."""
    store = coordinator.store
    with store.transaction() as connection:
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
        check_log(audit.kept_rows(connection))
        events = [row.event for row in audit.rows(connection, after=0, most=1000)]
        assert len(connection.execute(select(replies)).all()) == events.count("reply_accepted") == 2
        named = {name for column in BLOB_COLUMNS for name in connection.scalars(select(column)) if name is not None}
        found = connection.scalar(select(states.c.sha256).where(states.c.number == 1))
    assert events.count("state") == 2 and all(store.get_blob(name) for name in named)
    store.sweep()  # as the next start does: a file whose name could not be flushed is an orphan until then
    assert blob_names(store) == named and not list(store.home.jobs.iterdir())
    return str(found)


@pytest.fixture
def made(make_coordinator, tools) -> Callable[[str, int], Round]:
    """Makes a coordinator in its first round, and two members."""

    def make(name: str, values: int) -> Round:
        coordinator = make_coordinator(
            name,
            task={"method": "fedclf", "shares_maps": False, "backbone": CNN},
            rounds={"quorum_target": 2, "quorum_min": 2, "min_cohort": 1, "allow_small_cohort": True},
        )
        pair = [tools.quick_member(coordinator, f"clinic-{letter}") for letter in "ab"]
        OPERATIONS["start"](coordinator, {})
        assert step(coordinator, partial(averaging_worker, values=values))
        return Round(coordinator, pair, values)

    return make


@pytest.mark.parametrize("each", [pytest.param(4, marks=pytest.mark.smaller), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("full", "values"), [(files_full, 20_000), (pages_full, 15_000)])
def test_a_disk_that_fills_up_at_any_write_of_a_round(made, full: Full, values: int, each: int) -> None:
    """Check 59, replies in files and in rows: at each, or each fourth: typed, whole, and the round goes on."""
    undisturbed = made("whole", values)
    assert undisturbed.go_on() == []
    whole = state_of(undisturbed.coordinator)
    for left in range(0, 100, each):
        one = made(str(left), values)
        with full(one.coordinator, left):
            failed = one.go_on()
        assert set(failed) <= {"storage_full", "disk_full"}, (left, failed)
        assert one.go_on() == [], left
        assert state_of(one.coordinator) == whole, left
        one.coordinator.store.close()
        if not failed:
            break
    assert 12 <= left < 90  # a file takes two: itself and its folder

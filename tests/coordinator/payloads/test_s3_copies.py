"""No copy of a coordinator that keeps its payloads in an S3-compatible store removes what the original keeps there.

A copy has the original's keys, so its prefix is the copy's, too. Source: docs/guides/postgresql.md 6; docs/security.md,
reliability.
"""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.web.admin import run_operation
from edgefl_coordinator.web.service import _Leader
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError


@pytest.fixture
def payloads(gateway: Any) -> Callable[[], str]:
    url: Callable[[], str] = gateway.url
    return url


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there lies there for hours."""
    monkeypatch.setattr("edgefl_coordinator.store.store._OLD_S", -60)


@pytest.fixture
def opened(clock: Any) -> Iterator[Callable[[Path], Coordinator]]:
    made: list[Coordinator] = []

    def opens(folder: Path) -> Coordinator:
        made.append(open_coordinator(CoordinatorHome(folder), clock=clock))
        return made[-1]

    yield opens
    for one in made:
        one.store.close()


def begin(coordinator: Coordinator) -> None:
    """Lead, as `serve` does."""
    _Leader(coordinator, None).begin()


def objects(coordinator: Any) -> set[str]:
    held = coordinator.store.payloads._store
    return {one["path"] for batch in obstore.list(held) for one in batch} - {"leader"}


@pytest.fixture
def copied(federation: Any, pair: list[Any], lab: Any, later: None, opened: Any, tmp_path: Path) -> tuple[Any, Path]:
    """A federation, led anew, after its folder was copied, which has received a reply that the copy does not know."""
    begin(federation)
    sent = [lab.Blob(lab.reply_of(number).to_bytes()) for number in (1, 2)]
    sent[0].put_all(pair[0])
    assert isinstance(sent[0].reply(pair[0]), Payload)
    federation.store.close()
    shutil.copytree(federation.store.home.root, tmp_path / "copy")
    again = pair[0].coordinator = pair[1].coordinator = opened(federation.store.home.root)
    begin(again)
    sent[1].put(pair[1], 0, 2**19)
    return again, tmp_path / "copy"


def test_opening_a_copy_removes_nothing(copied, opened) -> None:
    """Of an upload and a reply that it does not name, days later."""
    federation, copy = copied
    kept = objects(federation)
    assert len([path for path in kept if path.startswith("uploads/")]) == 1
    opened(copy).store.close()
    assert objects(federation) == kept


def test_a_command_on_a_copy_removes_nothing(copied) -> None:
    """Nobody serves it: `revoke` strikes out its row of a reply, and leaves the object, which the original names."""
    federation, copy = copied
    kept = objects(federation)
    run_operation(CoordinatorHome(copy), "revoke", {"name": "clinic-a"})
    assert objects(federation) == kept


def test_a_copy_that_is_served_is_refused(copied, opened) -> None:
    """A restore drill with the original's prefix: it says what to do, and has removed nothing."""
    federation, copy = copied
    kept = objects(federation)
    for _ in range(2):
        drill = opened(copy)
        with pytest.raises(OperatorError, match="give a copy a prefix of its own") as refused:
            begin(drill)
        assert len(str(refused.value).splitlines()) == 1 and objects(federation) == kept
        drill.store.close()
    begin(federation)


def test_a_copy_goes_on_where_its_operator_says_so(copied, opened) -> None:
    """After the original is lost; then the original no longer leads."""
    federation, copy = copied
    obstore.delete(federation.store.payloads._store, "leader")
    drill = opened(copy)
    begin(drill)
    assert not any(path.startswith("uploads/") for path in objects(federation))
    with pytest.raises(OperatorError, match="another copy of this coordinator has led"):
        begin(federation)


def test_who_leads_removes_what_is_old(federation, later) -> None:
    """On SQLite, too, where nothing was swept at open."""
    orphan, kept = federation.store.put_blob(b"its transaction never came"), objects(federation)
    begin(federation)
    assert objects(federation) == kept - {f"payloads/{orphan.name}"}


def test_an_empty_database_does_not_empty_the_prefix(federation, opened) -> None:
    """`store.sqlite` was lost: one sentence, as where payloads lie in the folder."""
    federation.store.put_blob(b"kept")
    federation.store.close()
    kept, home = objects(federation), federation.store.home
    home.database.unlink()
    with pytest.raises(StorageError, match="empty although there are blobs"):
        opened(home.root)
    assert objects(federation) == kept


def test_a_machine_that_cannot_reach_the_store_leads(gateway, federation, caplog) -> None:
    """It holds the lead already: members get what lies in the database, and the log says what was left undone."""
    caplog.set_level(logging.WARNING)
    gateway.kill()
    begin(federation)
    gateway.start()
    assert "was not swept" in caplog.text and "does not answer" in caplog.text
    begin(federation)

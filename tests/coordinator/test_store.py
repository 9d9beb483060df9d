"""The store: journal gate (check 65), sweep (check 55), disk full (check 59), audit chain (check 69), migrations."""

import errno
import hashlib
import os
import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, select, text

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import audit, store, tables
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.store import has_wal_reset_defect
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import BroadcastRequest, Refusal
from edgefl_protocol.pae import pae

# fmt: off
WAL_RESET = [  # docs/security.md, decision 7: affected 3.7.0 to 3.51.2, fixed in 3.51.3, 3.50.7 and 3.44.6
    ((3, 6, 23), False), ((3, 7, 0), True),   ((3, 40, 1), True),  ((3, 44, 5), True),  ((3, 44, 6), False),
    ((3, 45, 0), True),  ((3, 50, 6), True),  ((3, 50, 7), False), ((3, 51, 2), True),  ((3, 51, 3), False),
    ((3, 52, 0), False), ((4, 0, 0), False),
]
# fmt: on


@pytest.mark.parametrize(("version", "affected"), WAL_RESET)
def test_journal_gate(version, affected) -> None:
    """Check 65: which versions get DELETE in place of WAL."""
    assert has_wal_reset_defect(version) is affected


@pytest.mark.parametrize(("version", "mode"), [((3, 40, 1), "delete"), ((3, 51, 3), "wal")])
def test_the_file_has_the_mode_and_full_flushes(make_coordinator, monkeypatch, version, mode) -> None:
    """Check 65: the mode that is reported is the file's; synchronous is FULL (2)."""
    monkeypatch.setattr(store.sqlite3, "sqlite_version_info", version)
    coordinator = make_coordinator()
    assert coordinator.store.journal_mode == mode
    with coordinator.store.transaction() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == mode
        assert connection.scalar(text("PRAGMA synchronous")) == 2
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"


def test_only_one_process_has_it_open(coordinator) -> None:
    with pytest.raises(OperatorError, match="another process"):
        open_coordinator(coordinator.store.home)


def test_serve_waits_for_a_command_that_has_it_open(coordinator) -> None:
    """docs/guides/federation.md, step 1: `serve &` and the next command at once; whichever is first, both come
    through, and what the command did to the keys counts."""
    home = coordinator.store.home
    with pytest.raises(OperatorError, match="another process"):
        open_coordinator(home, wait_s=0.2)

    def end() -> None:
        OPERATIONS["rotate"](coordinator, {"signing": False})
        coordinator.store.close()

    ends = threading.Timer(0.3, end)
    ends.start()
    again = open_coordinator(home, wait_s=60)
    again.store.close()
    ends.join()
    assert again.keys.ring.number == coordinator.keys.ring.number == 2


def test_tables_are_those_of_the_migrations(coordinator) -> None:
    """The table objects that queries use have exactly the columns that the migrations made."""
    with coordinator.store.transaction() as connection:
        found = inspect(connection)
        for name, table in tables.metadata.tables.items():
            assert [column["name"] for column in found.get_columns(name)] == [column.name for column in table.columns]
        assert set(found.get_table_names()) == set(tables.metadata.tables)


def test_a_newer_store_is_left_alone(coordinator) -> None:
    home = coordinator.store.home
    with coordinator.store.transaction() as connection:
        connection.execute(text("INSERT INTO migrations VALUES ('m999_future', 1)"))
    coordinator.store.close()
    with pytest.raises(OperatorError, match="upgrade"):
        open_coordinator(home)


def test_a_new_migration_runs_once_in_its_own_transaction(make_coordinator, monkeypatch) -> None:
    make_coordinator().store.close()
    runs = []

    def m998_more(connection) -> None:
        runs.append(1)
        connection.execute(text("CREATE TABLE more (a INTEGER)"))
        if len(runs) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(tables, "MIGRATIONS", (*tables.MIGRATIONS, m998_more))
    with pytest.raises(KeyboardInterrupt):
        make_coordinator()
    make_coordinator().store.close()
    make_coordinator()
    assert len(runs) == 2


def test_sweep(make_coordinator, tools) -> None:
    """Check 55: leftovers of a crash go at the next start; what a row names stays."""
    coordinator = make_coordinator()
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    member.reply(1)
    home = coordinator.store.home
    named = {path.name for path in home.blobs.iterdir()}
    coordinator.store.put_blob(b"its transaction never came")
    (home.blobs / ".reply.0123456789abcdef.tmp").write_bytes(b"half")
    (home.root / ".config.toml.0123456789abcdef.tmp").write_bytes(b"half")
    (home.jobs / "aggregate-1-0123").mkdir()
    coordinator.store.close()
    make_coordinator()
    assert {path.name for path in home.blobs.iterdir()} == named
    assert not list(home.jobs.iterdir())
    assert not list(home.root.glob("*.tmp")) + list(home.root.glob(".*.tmp"))


def blobs(coordinator) -> set[str]:
    return {path.name for path in coordinator.store.home.blobs.iterdir()}


def named(coordinator) -> set[str]:
    with coordinator.store.transaction() as connection:
        columns = (tables.replies.c.blob, tables.broadcasts.c.blob, tables.states.c.blob)
        return {name for column in columns for name in connection.scalars(select(column)) if name is not None}


def test_past_rounds_leave_no_blob(make_coordinator, tools) -> None:
    """docs/security.md, reliability: kept are the newest state, the open round's broadcasts and its replies; rows of
    the past stay, and an idempotent answer of a past round is still given."""
    coordinator = make_coordinator(rounds={"quorum_target": 2})
    pair = [tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b")]
    tools.start_rounds(coordinator)
    first = pair[0].reply(1, idem="work-item-00000001")
    for number in (1, 2, 3):
        for member in pair[1 if number == 1 else 0 :]:
            assert isinstance(member.reply(number, idem=f"{member.name}-{number:010}"), Payload)
        assert len(blobs(coordinator)) == 2 + 2 + 1  # broadcasts, replies, state
        assert step(coordinator, tools.toy_worker)
        assert blobs(coordinator) == named(coordinator) and len(blobs(coordinator)) == 2 + 1
        late = pair[0].call("broadcast", BroadcastRequest(round=number).to_payload(), rnd=number)
        assert isinstance(late, Refusal) and late.code == "round_closed"
    assert pair[0].reply(1, idem="work-item-00000001") == first
    with coordinator.store.transaction() as connection:
        assert len(list(connection.scalars(select(replies.c.sha256)))) == 6
        assert len(list(connection.scalars(select(tables.states.c.sha256)))) == 4
    coordinator.store.close()
    again = make_coordinator()  # nothing that is needed is swept
    assert len(blobs(again)) == 3 and blobs(again) == named(again)


def test_a_crash_before_the_past_is_deleted(make_coordinator, tools, monkeypatch) -> None:
    """Check 55: struck out and committed, but not deleted: the round stands, and the next start sweeps the files."""
    coordinator = make_coordinator(rounds={"quorum_target": 2})
    pair = [tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b")]
    tools.start_rounds(coordinator)
    for member in pair:
        member.reply(1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step(coordinator, tools.toy_worker)
    assert len(blobs(coordinator)) == 5 + 3
    coordinator.store.close()
    again = make_coordinator()
    assert blobs(again) == named(again) and len(blobs(again)) == 3
    for member in pair:
        member.coordinator = again
        assert isinstance(member.reply(2), Payload)
    assert step(again, tools.toy_worker)


def test_a_revoked_members_blob_goes_at_once(coordinator, tools) -> None:
    """docs/security.md, revocation: the dropped reply does not wait for a restart."""
    member, _ = (tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b"))
    tools.start_rounds(coordinator)
    before = blobs(coordinator)
    member.reply(1)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-a"})
    assert blobs(coordinator) == before


def test_a_store_of_before_keeps_its_rows(make_coordinator, tools, monkeypatch) -> None:
    """Migrations: rows and blobs of a store made before past blobs were deleted come through, then the past goes."""
    with monkeypatch.context() as patch:
        others = tuple(one for one in tables.MIGRATIONS if one is not tables.m004_past_blobs_go)
        patch.setattr(tables, "MIGRATIONS", others)
        coordinator = make_coordinator(rounds={"quorum_target": 2})
        pair = [tools.approved_member(coordinator, name) for name in ("clinic-a", "clinic-b")]
        tools.start_rounds(coordinator)
        for member in pair:
            member.reply(1)
        before = blobs(coordinator)
        with coordinator.store.transaction() as connection:  # nor had such a store what came later
            connection.execute(text("ALTER TABLE replies DROP COLUMN beside"))
            connection.execute(text("DELETE FROM migrations WHERE name LIKE 'm007%'"))
        coordinator.store.close()
    again = make_coordinator()
    assert blobs(again) == named(again) == before
    assert step(again, tools.toy_worker)
    assert len(blobs(again)) == 3


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_disk_full_under_a_blob(coordinator, tools, monkeypatch, call) -> None:
    """Check 59: a typed refusal, nothing stored, no leftover; the same work item passes when space returns."""
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    blobs = sorted(coordinator.store.home.blobs.iterdir())
    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", full_disk)
        else:
            patch.setattr(Path, "replace", full_disk)
        refused = member.reply(1, idem="work-item-00000001")
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("storage_full", 507)
    assert sorted(coordinator.store.home.blobs.iterdir()) == blobs
    assert isinstance(member.reply(1, idem="work-item-00000001"), Payload)


def test_disk_full_under_the_database(coordinator, tools) -> None:
    """Check 59: SQLite's own SQLITE_FULL at every page count until it fits: typed, whole, and it recovers."""
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)

    def pages(limit: int | None) -> int:
        with coordinator.store.transaction() as connection:
            count = connection.scalar(text("PRAGMA page_count"))
            connection.execute(text(f"PRAGMA max_page_count = {limit if limit is not None else 2**30}"))
            return int(count)

    blobs = sorted(coordinator.store.home.blobs.iterdir())
    pages(pages(None))
    refusals = 0
    for attempt in range(200):  # requests fill the last pages, then one of them does not fit
        answer = member.call("task", Payload()) if attempt % 2 else member.reply(1, payload=tools.maps_payload(attempt))
        if isinstance(answer, Refusal) and answer.code == "storage_full":
            refusals += 1
            if refusals == 3:
                break
    assert refusals == 3
    with coordinator.store.transaction() as connection:
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
        kept = list(connection.scalars(select(replies.c.blob)))
    assert len(kept) <= 1
    assert len(list(coordinator.store.home.blobs.iterdir())) == len(blobs) + len(kept)
    pages(None)
    assert isinstance(member.call("task", Payload()), Payload)


def test_audit_chain(coordinator, tools) -> None:
    """Check 69: an edited, removed or moved row is found."""
    tools.approved_member(coordinator, "clinic-a")
    assert OPERATIONS["audit"](coordinator, {})["rows"] >= 4
    tampering = [
        "UPDATE audit SET subject = 'clinic-z' WHERE number = 2",
        "UPDATE audit SET at_ms = at_ms + 1 WHERE number = 1",
        "DELETE FROM audit WHERE number = 2",
        "UPDATE audit SET number = 1000 WHERE number = 2",
    ]
    for statement in tampering:
        with pytest.raises(OperatorError, match="broken at row"), coordinator.store.transaction() as connection:
            connection.execute(text(statement))
            audit.verify(connection)  # raising undoes the tampering
    assert OPERATIONS["audit"](coordinator, {})["rows"] >= 4


def test_a_forged_row_breaks_the_next(coordinator, tools) -> None:
    """Check 69: whoever edits a row and computes its digest anew is found at the row after it."""
    tools.approved_member(coordinator, "clinic-a")
    with pytest.raises(OperatorError, match="broken at row 3"), coordinator.store.transaction() as connection:
        first, second = connection.execute(text("SELECT * FROM audit ORDER BY number LIMIT 2")).all()
        parts = (first.sha256, "2", str(second.at_ms), second.event, "clinic-z", second.detail)
        digest = hashlib.sha256(pae(b"efla1/audit", *(part.encode() for part in parts))).hexdigest()
        forged = text("UPDATE audit SET subject = 'clinic-z', sha256 = :digest WHERE number = 2")
        connection.execute(forged, {"digest": digest})
        audit.verify(connection)


def test_statements_take_parameters_only() -> None:
    """Check 38: no SQL is built from text at run time."""
    folder = Path(tables.__file__).parent
    for path in folder.glob("*.py"):
        source = path.read_text()
        assert "text(f" not in source and 'execute(f"' not in source.replace('execute(f"PRAGMA {pragma}")', ""), path


def test_sqlite_errors_are_typed(coordinator) -> None:
    with pytest.raises(StorageError), coordinator.store.transaction() as connection:
        connection.execute(text("INSERT INTO rounds VALUES (1, 'train', 'no such state', 0, 0, 0, NULL)"))
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(Exception, match="no such table"):
        connection.execute(text("SELECT * FROM rounds"))
    engine.dispose()
    assert sqlite3.threadsafety >= 1

"""Files beside the store: swept when nothing names them (check 55), and a full disk under them (check 59)."""

import errno
import os
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import tables
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web import reply_route
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload, durable
from edgefl_protocol.messages.requests import BroadcastRequest, Refusal


def test_sweep(make_coordinator, tools) -> None:
    """Check 55: leftovers of a crash go at the next start; what a row names stays."""
    coordinator = make_coordinator()
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    member.reply(1)
    home = coordinator.store.home
    named = blob_names(coordinator.store)
    coordinator.store.put_blob(b"its transaction never came")
    with coordinator.store.transaction() as connection:
        coordinator.store.put_small(connection, b"no reply names it")
    (home.blobs / ".reply.0123456789abcdef.tmp").write_bytes(b"half")
    (home.root / ".config.toml.0123456789abcdef.tmp").write_bytes(b"half")
    (home.jobs / "aggregate-1-0123").mkdir()
    coordinator.store.close()
    assert blob_names(make_coordinator().store) == named
    assert not list(home.jobs.iterdir())
    assert not list(home.root.glob("*.tmp")) + list(home.root.glob(".*.tmp"))


def test_names_of_files_taken_over_are_flushed(make_coordinator, tmp_path, monkeypatch) -> None:
    """fsync(2): without one of its folder a file's name may be gone after a power cut; one does for all of them."""
    store, flushed, real = make_coordinator().store, [], durable.flush_to_disk

    def sees(folder) -> None:
        flushed.append({path.name for path in folder.iterdir()} if folder == store.home.blobs else set())
        real(folder)

    monkeypatch.setattr(durable, "flush_to_disk", sees)
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode())
    adopted = {blob.name for blob in store.adopt([tmp_path / "one", tmp_path / "two"])}
    assert flushed and adopted <= flushed[-1]


def blobs(coordinator) -> set[str]:
    return blob_names(coordinator.store)


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


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_disk_full_under_a_blob(coordinator, tools, monkeypatch, call) -> None:
    """Check 59: a typed refusal, nothing stored, no leftover; the same work item passes when space returns."""
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    blobs = sorted(blob_names(coordinator.store))
    with monkeypatch.context() as patch:
        patch.setattr(reply_route, "SMALL_BYTES", 0)  # a small one is no file
        if call == "fsync":
            patch.setattr(os, "fsync", full_disk)
        else:
            patch.setattr(Path, "replace", full_disk)
        refused = member.reply(1, idem="work-item-00000001")
    assert isinstance(refused, Refusal) and (refused.code, refused.status) == ("storage_full", 507)
    assert sorted(blob_names(coordinator.store)) == blobs
    assert isinstance(member.reply(1, idem="work-item-00000001"), Payload)

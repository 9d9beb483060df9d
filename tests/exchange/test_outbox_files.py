"""Large work items lie as encrypted files beside the outbox: at rest, through crashes, in bounded memory."""

import os
import sqlite3
import tracemalloc
from typing import Any

import numpy as np
import pytest

from edgefl_exchange.errors import OutboxError
from edgefl_exchange.outbox import Bounds, Outbox
from edgefl_protocol.durable import read_pieces
from edgefl_protocol.envelopes.blob import BLOB_ABOVE_BYTES, open_blob
from edgefl_protocol.errors import PayloadError, StorageError
from edgefl_protocol.payload import Payload

KEY = bytes(range(32))
LARGE = b"CANARY" * 300_000  # 1.8 MB
START_MS = 1_600_000_000_000
DAY_MS = 86_400_000


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outbox.sqlite3"


def files(path: Any) -> list[Any]:
    folder = path.with_name(f"{path.name}.files")
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_a_large_item_lies_beside_the_database(path):
    """docs/security.md, idempotency: encrypted at rest, as small ones; check 14: nothing in the clear; mode 0600."""
    with Outbox(path, KEY) as outbox:
        idem = outbox.put("skin", "reply", LARGE, 0)
        outbox.put("skin", "other", bytes(BLOB_ABOVE_BYTES), 1)
    (file,) = files(path)
    assert path.stat().st_size < 2 * BLOB_ABOVE_BYTES
    assert b"CANARY" not in file.read_bytes() and b"CANARY" not in path.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    with Outbox(path, KEY) as outbox:
        item, other = outbox.items("skin")
        assert (item.idem, item.size, item.payload, other.blob) == (idem, len(LARGE), LARGE, None)
        assert outbox.file_of(item.blob) == file
        assert open_blob(read_pieces(file, 10**7), item.blob) == LARGE
        assert item.blob.key.hex().encode() not in path.read_bytes() and item.blob.key not in path.read_bytes()
        outbox.delete(idem)
        assert files(path) == []


def test_the_blob_of_an_item_stays_the_same(path):
    """docs/security.md, idempotency: a retry after a restart, and a later round, send the same bytes again."""
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", LARGE, 0)
        (first,) = outbox.items("skin")
        outbox.promise(first.idem, 1)
    with Outbox(path, KEY) as outbox:
        (again,) = outbox.items("skin")
        assert again.blob == first.blob
        fresh = outbox.release(again)
        (freed,) = outbox.items("skin")
        assert (freed.idem, freed.blob, freed.payload) == (fresh, first.blob, LARGE)


def test_replaced_expired_and_refused_items_leave_no_file(path):
    with Outbox(path, KEY, Bounds(bytes=5_000_000, age_ms=DAY_MS)) as outbox:
        outbox.put("skin", "reply", LARGE, START_MS)
        newer = outbox.put("skin", "reply", LARGE[1:], START_MS)
        assert len(files(path)) == 1
        outbox.promise(newer, 1)
        outbox.put("skin", "reply", LARGE, START_MS)
        assert len(files(path)) == 2
        with pytest.raises(OutboxError) as caught:
            outbox.put("other", "reply", LARGE, START_MS)
        assert caught.value.code == "outbox_full"
        assert len(files(path)) == 2
        assert outbox.expire(START_MS + DAY_MS + 1) == 2
        assert files(path) == []


def test_another_key_a_moved_row_and_a_damaged_file_do_not_open(path):
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", LARGE, 0)
    with Outbox(path, bytes(32)) as outbox, pytest.raises(OutboxError):
        outbox.items("skin")
    (file,) = files(path)
    sound = file.read_bytes()
    for damaged in (sound[:-1], sound[:100_000], b"", sound[:500] + bytes([sound[500] ^ 1]) + sound[501:]):
        file.write_bytes(damaged)
        with Outbox(path, KEY) as outbox:
            (item,) = outbox.items("skin")
            with pytest.raises(OutboxError) as caught:
                _ = item.payload
            assert caught.value.code == "outbox_damaged"
    file.unlink()
    with Outbox(path, KEY) as outbox, pytest.raises(OutboxError):
        _ = outbox.items("skin")[0].payload
    with sqlite3.connect(path) as db:
        db.execute("UPDATE item SET file = ?", ("0" * 32,))
    db.close()
    with Outbox(path, KEY) as outbox, pytest.raises(OutboxError):
        outbox.items("skin")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", ["_check_room", "_drop"])
def test_a_crash_between_file_and_row_is_swept(path, monkeypatch, step):
    """Reliability: what no row names goes at the next start, what a row names stays."""
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", LARGE, 0)
        (kept,) = files(path)

        def die(*_: object) -> None:
            raise Killed

        monkeypatch.setattr(Outbox, step, die)
        if step == "_check_room":
            monkeypatch.setattr(Outbox, "_drop", lambda *_: None)  # the process is gone before it can clean up
        with pytest.raises(Killed):
            outbox.put("skin", "reply", LARGE[:-1], 1)
    monkeypatch.undo()
    assert len(files(path)) == 2
    with Outbox(path, KEY) as outbox:
        (item,) = outbox.items("skin")
        assert item.payload == (LARGE if step == "_check_room" else LARGE[:-1])
        (left,) = files(path)
        assert (left == kept) == (step == "_check_room")


def test_a_file_that_somebody_writes_now_is_not_swept(path):
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", LARGE, 0)
    folder = files(path)[0].parent
    fresh, stale = folder / ".a.1.tmp", folder / ".a.2.tmp"
    fresh.write_bytes(b"x")
    stale.write_bytes(b"x")
    os.utime(stale, (1, 1))
    Outbox(path, KEY).close()
    assert fresh.exists() and not stale.exists()


def test_a_full_disk_keeps_nothing(path, monkeypatch):
    """Check 59: a sentence; what was there is there."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    with Outbox(path, KEY) as outbox:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(StorageError) as caught:
                outbox.put("skin", "reply", LARGE, 0)
            assert caught.value.code == "disk_full"
        assert files(path) == [] and outbox.count() == 0


def test_an_outbox_of_an_older_version_goes_on(path):
    """Items that were put before large ones had files of their own are still there and open."""
    with Outbox(path, KEY) as outbox:
        idem = outbox.put("skin", "reply", b"small", 0)
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE item DROP COLUMN file")
    db.close()
    with Outbox(path, KEY) as outbox:
        assert [(item.idem, item.payload) for item in outbox.items("skin")] == [(idem, b"small")]
        outbox.put("skin", "other", LARGE, 1)
    with Outbox(path, KEY) as outbox:
        assert [item.size for item in outbox.items("skin")] == [5, len(LARGE)]


def test_names_are_read_without_the_rest(path):
    """The owner's policy asks what an item holds: of a large one the header is read, not 20 MB."""
    payload = Payload({"weights": np.zeros(5_000_000, np.float32), "features": np.zeros(3)}, {"n_train": 5})
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", payload.to_bytes(), 0)
        outbox.put("skin", "other", Payload({"maps.0": np.ones(2)}, {}).to_bytes(), 1)
        large, small = outbox.items("skin")
        tracemalloc.start()
        assert large.names == ["features", "weights"]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * 2**20
        assert small.names == ["maps.0"]
        (file,) = files(path)
        file.write_bytes(b"\0" + file.read_bytes()[1:])
        with pytest.raises(OutboxError):
            _ = large.names
        outbox.put("skin", "odd", b"no payload", 2)
        with pytest.raises(PayloadError):
            _ = outbox.items("skin")[-1].names


def test_listing_and_keeping_take_no_memory_of_their_own(path):
    """20 MB are kept and listed in 2 MiB beside the content itself."""
    content = np.random.default_rng(0).bytes(20_000_000)
    tracemalloc.start()
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", content, 0)
        assert [item.size for item in outbox.items("skin")] == [len(content)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20

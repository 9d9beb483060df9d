"""The outbox keeps what it took: crashes, full disks, thieves, bounds."""

import os
import signal
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.power_cut import BEGIN, FlushedDisk, cut_after_each

from edgefl_exchange.errors import OutboxError
from edgefl_exchange.item_files import ItemFiles
from edgefl_exchange.outbox import Bounds, Outbox
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.errors import StorageError

KEY = bytes(range(32))
DAY_MS = 86_400_000
START_MS = 1_577_836_800_000  # 2020-01-01


@pytest.fixture
def path(tmp_path):
    return tmp_path / "outbox.sqlite3"


def test_an_item_survives_closing_and_is_deleted_once(path):
    with Outbox(path, KEY) as outbox:
        idem = outbox.put("skin", "reply", b"payload", 5)
    with Outbox(path, KEY) as outbox:
        (item,) = outbox.items("skin")
        assert (item.idem, item.payload, item.round, item.created_ms) == (idem, b"payload", None, 5)
        assert outbox.items("other") == []
        outbox.promise(idem, 3)
    with Outbox(path, KEY) as outbox:
        (item,) = outbox.items("skin")
        assert (item.round, item.attempts) == (3, 1)
        outbox.delete(idem)
        assert outbox.items("skin") == []


def test_contents_and_mode_on_the_disk(path):
    """docs/security.md, idempotency: work items are encrypted locally; check 14: nothing in the clear."""
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", b"CANARY" * 100, 0)
    assert b"CANARY" not in path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_key_and_a_moved_row_do_not_open(path):
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", b"one", 0)
    with Outbox(path, bytes(32)) as outbox, pytest.raises(OutboxError) as error:
        outbox.items("skin")
    assert error.value.code == "outbox_damaged"
    with sqlite3.connect(path) as db:
        db.execute("UPDATE item SET kind = 'bundle'")
    db.close()
    with Outbox(path, KEY) as outbox, pytest.raises(OutboxError):
        outbox.items("skin")


def test_an_unsent_item_is_replaced_a_promised_one_stays(path):
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", b"old", 0)
        newer = outbox.put("skin", "reply", b"new", 1)
        assert [item.payload for item in outbox.items("skin")] == [b"new"]
        outbox.promise(newer, 1)
        outbox.put("skin", "reply", b"newest", 2)
        assert [item.payload for item in outbox.items("skin")] == [b"new", b"newest"]


def test_bounds_of_number_size_and_age(path):
    """docs/security.md, reliability: bounded size and age."""
    with Outbox(path, KEY, Bounds(items=2, bytes=1000, age_ms=30 * DAY_MS)) as outbox:
        first = outbox.put("a", "reply", b"x", START_MS)
        outbox.put("b", "reply", b"x", START_MS + DAY_MS)
        with pytest.raises(OutboxError, match="edgefl sync") as error:
            outbox.put("c", "reply", b"x", 2)
        assert error.value.code == "outbox_full"
        outbox.delete(first)
        with pytest.raises(OutboxError):
            outbox.put("c", "reply", bytes(1000), 2)
        assert outbox.count() == 1
        assert outbox.expire(START_MS + 30 * DAY_MS) == 0
        assert outbox.expire(START_MS + 31 * DAY_MS + 1) == 1
        assert outbox.count() == 0


def test_the_largest_reply_that_a_federation_may_allow_has_room(path, monkeypatch):
    """docs/security.md 2.2: 1 GiB; its file has 16 bytes more for each 64 KiB. An empty outbox was called full."""
    largest = BlobReference(blob="0" * 32, size=2**30 + 2**14 * 16, sha256="0" * 64, key=KEY)
    monkeypatch.setattr(ItemFiles, "keep", lambda *_: largest)  # nobody writes it here
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", b"small", 0)
        outbox.put_learned("skin", 1, bytes(2**20 + 1), 0)
        with pytest.raises(OutboxError, match="it holds 2 items") as full:
            outbox.put_learned("skin", 2, bytes(2**20 + 1), 0)
        assert full.value.code == "outbox_full"


@pytest.mark.parametrize("wrong_ms", [0, START_MS - 1, START_MS + 900 * DAY_MS])
def test_an_item_dated_by_a_wrong_clock_ages_from_when_that_is_seen(path, wrong_ms):
    """docs/security.md, reliability: a clock that was not set, or was ahead, neither drops an item nor keeps it."""
    with Outbox(path, KEY, Bounds(age_ms=30 * DAY_MS)) as outbox:
        outbox.put("a", "reply", b"x", wrong_ms)
        now_ms = START_MS + 400 * DAY_MS
        assert outbox.expire(now_ms) == 0
        assert outbox.expire(now_ms + 30 * DAY_MS) == 0
        assert outbox.expire(now_ms + 30 * DAY_MS + 1) == 1


def test_release_gives_a_new_key(path):
    with Outbox(path, KEY) as outbox:
        outbox.put("a", "reply", b"x", 0)
        (item,) = outbox.items("a")
        outbox.promise(item.idem, 4)
        fresh = outbox.release(item)
        (freed,) = outbox.items("a")
        assert freed.idem == fresh != item.idem
        assert (freed.round, freed.attempts, freed.payload) == (None, 0, b"x")


@pytest.mark.parametrize("keep", [0, 1, 15, 100, 2048, 4096, 6000])
def test_a_truncated_file_is_a_sentence_or_empty(path, keep):
    """docs/security.md, check 60: typed error or recovery, never a wrong number."""
    with Outbox(path, KEY) as outbox:
        outbox.put("skin", "reply", bytes(9000), 0)
    path.write_bytes(path.read_bytes()[:keep])
    try:
        with Outbox(path, KEY) as outbox:
            assert outbox.items("skin") == []
    except (OutboxError, StorageError) as error:
        assert len(str(error).splitlines()) == 1


def test_a_second_writer_waits_or_is_told(path, monkeypatch):
    with Outbox(path, KEY) as outbox:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        outbox._db.execute("PRAGMA busy_timeout = 50")
        with pytest.raises(OutboxError) as error:
            outbox.put("skin", "reply", b"x", 0)
        assert error.value.code == "outbox_busy"
        holder.execute("ROLLBACK")
        holder.close()
        outbox.put("skin", "reply", b"x", 0)


FULL_DISK = """
import sys
from pathlib import Path
from edgefl_exchange.outbox import Outbox
from edgefl_protocol.errors import EdgeflError
path = Path(sys.argv[1])
with Outbox(path, bytes(32)) as outbox:
    outbox.put("skin", "reply", b"kept", 0)
    outbox.promise(outbox.items("skin")[0].idem, 1)
    outbox._db.execute(f"PRAGMA max_page_count = {outbox._db.execute('PRAGMA page_count').fetchone()[0] + 2}")
    try:
        outbox.put("skin", "reply", bytes(1_000_000), 1)
    except EdgeflError as error:
        print(error.code, "|", error)
    print([item.payload for item in outbox.items("skin")])
"""


def test_a_full_disk_is_a_sentence_and_loses_nothing(path):
    """docs/security.md, check 59: disk full: typed error, accepted work kept.

    SQLite's own page limit gives the same SQLITE_FULL as the file system.
    """
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith("disk_full | ")
    assert "free space" in first
    assert second == "[b'kept']"


PUTTER = """
import sys
from pathlib import Path
from edgefl_exchange.outbox import Outbox
with Outbox(Path(sys.argv[1]), bytes(32)) as outbox:
    for number in range(10_000):
        idem = outbox.put(f"fed-{number}", "reply", b"x" * 3000, 0)
        print(number, flush=True)
        if number % 2:
            outbox.delete(idem)
            print(-number, flush=True)
"""


@pytest.mark.parametrize("delay_lines", [1, 8])
def test_killed_at_any_moment_nothing_acknowledged_is_lost(path, delay_lines):
    """docs/security.md, check 56: SIGKILL while queueing: 0 lost items."""
    process = subprocess.Popen([sys.executable, "-c", PUTTER, str(path)], stdout=subprocess.PIPE, text=True)
    said = [int(process.stdout.readline()) for _ in range(delay_lines)]
    os.kill(process.pid, signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().splitlines()]
    process.stdout.close()
    process.wait()
    kept = {number for number in said if number >= 0} - {-number for number in said if number < 0}
    with Outbox(path, bytes(32)) as outbox:
        for number in kept - {max(said)}:  # the last one may have been deleted unheard
            assert len(outbox.items(f"fed-{number}")) == 1
        assert outbox.count() <= len(kept) + 1


class OutboxMachine(RuleBasedStateMachine):
    """Against a dictionary as model: whatever is done, and however often it is reopened, the same items are there."""

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "o"
        self.box = Outbox(self.path, KEY)
        self.model = {}
        self.clock = 0

    def teardown(self):
        self.box.close()
        self.folder.cleanup()

    @rule()
    def put(self):
        self.clock += 1
        payload = f"{self.clock}".encode()
        idem = self.box.put("skin", "reply", payload, self.clock)
        self.model = {key: value for key, value in self.model.items() if value[1] is not None} | {idem: (payload, None)}

    @rule()
    def promise_oldest(self):
        if self.model:
            idem = min(self.model, key=lambda key: int(self.model[key][0]))
            self.box.promise(idem, self.clock)
            self.model[idem] = (self.model[idem][0], self.clock)

    @rule()
    def release_oldest(self):
        items = self.box.items("skin")
        if items:
            payload, _ = self.model.pop(items[0].idem)
            self.model[self.box.release(items[0])] = (payload, None)

    @rule()
    def delete_newest(self):
        items = self.box.items("skin")
        if items:
            self.box.delete(items[-1].idem)
            del self.model[items[-1].idem]

    @rule()
    def reopen(self):
        self.box.close()
        self.box = Outbox(self.path, KEY)

    @invariant()
    def same_items(self):
        assert {item.idem: (item.payload, item.round) for item in self.box.items("skin")} == self.model


OutboxMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=12)
TestOutboxMachine = OutboxMachine.TestCase


KEPT = f"""{BEGIN}
from edgefl_exchange.outbox import Outbox
from edgefl_protocol.envelopes.blob import BLOB_ABOVE_BYTES

root, count = Path(sys.argv[1]), int(sys.argv[2])
with Outbox(root / "outbox.sqlite3", bytes(32)) as outbox:
    for number in range(count):
        size = BLOB_ABOVE_BYTES + 1 if number % 2 else 10  # a larger one lies in a file
        acknowledged(outbox.put("skin", f"kind-{{number}}", bytes(size), number))
"""


def test_an_item_survives_a_power_cut(tmp_path):
    """docs/security.md check 58 on the device: whatever `put` returned is there, whole, when the power comes back."""
    for told, left in cut_after_each(FlushedDisk(tmp_path), KEPT, 5, tmp_path):
        with Outbox(left / "outbox.sqlite3", bytes(32)) as outbox:
            items = list(outbox.items("skin"))
            assert [item.idem for item in items] == told and {len(item.payload) for item in items} <= {10, 2**20 + 1}

"""Files that survive a crash. Source: the design's section on faults; POSIX rename."""

import errno
import os
import shutil
import sqlite3
import stat
import tempfile
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.power_cut import BEGIN, FlushedDisk, cut_after_each

from edgefl_protocol import durable
from edgefl_protocol.durable import foreign_content, has_room, open_bounded, read_bounded, read_private, write_atomic
from edgefl_protocol.errors import StorageError

ROOT = Path(__file__).parents[2]
ROOMS = ("protocol", "edge_client", "coordinator", "trainer", "export")


def test_content_and_mode_arrive_and_no_temporary_file_stays(tmp_path):
    path = tmp_path / "key"
    write_atomic(path, b"one", 0o600)
    write_atomic(path, b"two", 0o600)
    assert path.read_bytes() == b"two" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_is_the_one_asked_for_whatever_the_umask(tmp_path, mode):
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "a", b"x", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failure_at_any_step_leaves_the_old_content(tmp_path, monkeypatch, step):
    """The old bytes or the new bytes, never a mixture; a full disk is one typed sentence."""
    path = tmp_path / "state"
    write_atomic(path, b"old")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if step == "write":
        real = os.fdopen

        class FullFile:
            def __init__(self, descriptor, mode):
                self.file = real(descriptor, mode)
                self.fileno, self.write = self.file.fileno, full

            def __enter__(self):
                return self

            def __exit__(self, *args):
                self.file.close()

        monkeypatch.setattr(durable.os, "fdopen", FullFile)
    elif step == "fsync":
        monkeypatch.setattr(durable.os, "fsync", full)
    else:
        monkeypatch.setattr(durable.Path, "replace", full)
    with pytest.raises(StorageError, match="disk is full") as caught:
        write_atomic(path, b"new content")
    monkeypatch.undo()
    assert caught.value.code == "disk_full"
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["state"]


def test_the_order_is_write_flush_rename_flush_folder(tmp_path, monkeypatch):
    """A rename before the flush, or a folder never flushed, loses the file in a power cut."""
    steps = []
    real_sync, real_replace = os.fsync, durable.Path.replace
    monkeypatch.setattr(
        durable.os,
        "fsync",
        lambda fd: (steps.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"), real_sync(fd))[1],
    )
    monkeypatch.setattr(
        durable.Path, "replace", lambda self, target: (steps.append("rename"), real_replace(self, target))[1]
    )
    write_atomic(tmp_path / "a", b"x")
    assert steps == ["file", "rename", "folder"]


def test_errors_of_the_system_become_one_sentence(tmp_path):
    with pytest.raises(StorageError) as caught:
        write_atomic(tmp_path / "missing" / "a", b"x")
    assert caught.value.code == "missing"
    with pytest.raises(StorageError) as caught:
        read_bounded(tmp_path / "missing", 10)
    assert caught.value.code == "missing" and "\n" not in str(caught.value)


def test_reading_is_bounded_and_refuses_what_is_no_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(StorageError) as caught:
        read_bounded(path, 4)
    assert caught.value.code == "too_large"
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(StorageError):
            read_bounded(odd, 5)


def test_a_bound_of_gigabytes_takes_no_memory(tmp_path):
    """Python allocates what `read` is asked for; a file of /proc tells no size and is read whole all the same."""
    (tmp_path / "small").write_bytes(b"x" * 100_000)
    tracemalloc.start()
    try:
        assert len(read_bounded(tmp_path / "small", 4 * 1024**3)) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert read_bounded("/proc/self/status", 1 << 20).startswith(b"Name:")
    assert len(read_bounded("/proc/self/status", 1 << 20)) > 500


def test_opening_is_bounded_and_a_failing_disk_is_one_sentence(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    with open_bounded(path, 5) as file:
        assert file.read(2) + file.read() == b"12345"
    with pytest.raises(StorageError) as caught, open_bounded(path, 4):
        pass
    assert caught.value.code == "too_large"
    with pytest.raises(StorageError) as caught, open_bounded(path, 5):
        raise OSError(errno.EIO, "Input/output error")
    assert "Input/output error" in str(caught.value)
    for odd in (tmp_path, "/dev/zero", tmp_path / "missing"):
        with pytest.raises(StorageError), open_bounded(odd, 5):
            pass


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_secret_open_to_others_is_refused_with_the_cure(tmp_path, mode):
    """docs/security.md 2.6: mode 0600, refused if group or world readable."""
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    path.chmod(mode)
    with pytest.raises(StorageError, match="chmod 600") as caught:
        read_private(path, 100)
    assert caught.value.code == "permissions"
    path.chmod(0o600)
    assert read_private(path, 100) == b"secret"


def test_what_lies_in_a_folder_is_named_unless_it_is_ours(tmp_path):
    assert foreign_content(tmp_path / "missing", ()) == foreign_content(tmp_path, ("config.toml",)) == ""
    (tmp_path / ".DS_Store").write_bytes(b"")
    assert foreign_content(tmp_path, ("config.toml",)) == ""
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert foreign_content(tmp_path, ("config.toml",)) == "a.txt and 2 more"
    (tmp_path / "part" / "seed-0").mkdir(parents=True)
    (tmp_path / "part" / "seed-0" / "config.toml").write_bytes(b"")
    assert foreign_content(tmp_path, ("config.toml",)) == "a.txt and 3 more"
    assert foreign_content(tmp_path, ("config.toml", "*/seed-*/config.toml")) == ""


KEPT = f"""{BEGIN}
import sqlite3
from edgefl_protocol.durable import keep_commits

root, count = Path(sys.argv[1]), int(sys.argv[2])
database = sqlite3.connect(root / "any.sqlite3", isolation_level=None)
if sys.argv[3:] != ["bare"]:
    keep_commits(database)
database.execute("CREATE TABLE kept (number INTEGER)")
for number in range(count):
    database.execute("INSERT INTO kept VALUES (?)", (number,))
    acknowledged(number)
"""


def kept_after_cuts(folder, *more):
    """How many rows are there after each of five power cuts."""
    return [
        sqlite3.connect(left / "any.sqlite3").execute("SELECT COUNT(*) FROM kept").fetchone()[0]
        for _, left in cut_after_each(FlushedDisk(folder), KEPT, 5, folder, *more)
    ]


def test_a_commit_survives_a_power_cut(tmp_path):
    """docs/security.md check 58: SQLite's usual setting loses the last commit on the same disk."""
    assert kept_after_cuts(tmp_path) == [1, 2, 3, 4, 5]
    (tmp_path / "bare").mkdir()
    assert kept_after_cuts(tmp_path / "bare", "bare") != [1, 2, 3, 4, 5]


def test_every_sqlite_file_keeps_its_commits():
    """Who opens a database to write says so with `keep_commits`; the store has the same in its list of pragmas."""
    texts = {path: path.read_text() for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    set_by_hand = {path.name for path, text in texts.items() if "PRAGMA synchronous" in text}
    assert set_by_hand == {"durable.py", "copies.py", "snapshot.py"}  # copies, of which the backup made is flushed
    opening = {path.name for path, text in texts.items() if "sqlite3.connect(" in text and "keep_commits(" not in text}
    assert opening == {"waiting_items.py", "snapshot.py", "upgrading.py"}  # they read, or copy


def test_whether_a_disk_has_room(tmp_path, monkeypatch):
    """Where little is free by writing; nothing stays. `/dev/full` is the kernel's own full disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    assert has_room(tmp_path, 2**18) and os.listdir(tmp_path) == []
    assert has_room(tmp_path / "missing", 2**18)  # another failure has its own sentence
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    assert not has_room(tmp_path, 2**18)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    assert has_room(tmp_path, 2**18)  # and nothing is written

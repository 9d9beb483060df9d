"""Locks that fall with their process. Source: flock(2)."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgefl_protocol import lock_file
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import LockFile, hold, is_held, share

BUSY = StorageError("another process works here; wait for it", "busy")
HOLDER = """
import sys
from edgefl_protocol.errors import StorageError
from edgefl_protocol.lock_file import LockFile, share
path, way = sys.argv[1:]
print("begun", flush=True)
with share(path) if way == "shared" else LockFile(path, StorageError("busy")):
    print("held", flush=True)
    input()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lock").write_bytes(b"kept")
    return tmp_path / "lock"


@contextlib.contextmanager
def another(path: Path, way: str, upto: tuple[bytes, ...] = (b"begun\n", b"held\n")) -> Iterator[subprocess.Popen]:
    """A process that holds a lock, until a line comes."""
    line = [sys.executable, "-c", HOLDER, str(path), way]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert tuple(holder.stdout.readline() for _ in upto) == upto
            yield holder
        finally:
            holder.kill()


@pytest.mark.parametrize("way", ["alone", "shared"])
def test_it_falls_when_its_process_is_killed(path, way):
    """kill −9: until then a second holder has the caller's error, and there is nothing to remove afterwards."""
    with another(path, way) as holder:
        with pytest.raises(StorageError, match="another process works here; wait for it") as caught:
            LockFile(path, BUSY)
        assert caught.value is BUSY
        assert is_held(path, shared=True) and is_held(path) == (way == "alone")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert not is_held(path, shared=True)
        with LockFile(path, BUSY):
            assert is_held(path)
    assert path.read_bytes() == b"kept"


def test_one_who_waits_has_it_when_the_other_ends(path):
    with another(path, "alone") as holder:
        with pytest.raises(StorageError):
            LockFile(path, BUSY, wait_s=0.2)
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        with LockFile(path, BUSY, wait_s=60.0) as lock:
            assert lock.is_open


def test_a_second_opening_is_a_second_holder(path):
    """Also in one process; what is closed twice, or was refused, is not left open."""
    before = len(os.listdir("/proc/self/fd"))
    first = LockFile(path, BUSY)
    with pytest.raises(StorageError):
        LockFile(path, BUSY)
    with path.open("a+b") as file:
        with pytest.raises(StorageError):
            hold(file.fileno(), BUSY)
        first.close()
        first.close()
        assert not first.is_open
        hold(file.fileno(), BUSY)
        assert is_held(path)
    assert not is_held(path, shared=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_is_made_for_its_owner_alone_or_as_is_asked(tmp_path):
    before = os.umask(0o022)
    try:
        for name, words, mode in (("a", {}, 0o600), ("b", {"mode": 0o644}, 0o644)):
            LockFile(tmp_path / name, BUSY, **words).close()
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    finally:
        os.umask(before)
    with pytest.raises(FileNotFoundError):
        LockFile(tmp_path / "no" / "lock", BUSY)


def test_several_share_a_folder(tmp_path):
    with another(tmp_path, "shared"), share(tmp_path):
        assert is_held(tmp_path, shared=True) and not is_held(tmp_path)
    assert not is_held(tmp_path, shared=True)


def test_who_shares_waits_for_one_alone(path):
    with another(path, "alone") as holder, another(path, "shared", (b"begun\n",)) as waiting:
        time.sleep(0.2)
        assert waiting.poll() is None
        holder.kill()
        assert waiting.stdout.readline() == b"held\n"


@pytest.mark.parametrize("unknown", [True, False])
def test_where_it_cannot_be_told_the_caller_says(path, monkeypatch, unknown):
    """A file that is missing, and a file system without locks: a look answers as asked, a holder is told."""
    assert is_held(path.parent / "missing", unknown=unknown) == unknown

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock_file.fcntl, "flock", refused)
    assert is_held(path, unknown=unknown) == unknown
    with pytest.raises(OSError, match="No locks available"):
        LockFile(path, BUSY)

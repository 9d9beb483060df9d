"""The file of a backup: its form, written here once more from its page, and what is refused of it.

Source: docs/security.md check 67, docs/decisions/0056.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import restoration
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.backups.backup_file import About, BackedUp, read_manifest, unpack, write_backup

ABOUT = About(federation="skin", made_ms=1, program="0.1.0", store=1, rows=0)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A backup of three small files, one of them empty."""
    for name, data in (("a", b"first"), ("b", b""), ("c", os.urandom(40))):
        (tmp_path / name).write_bytes(data)
    sources = [BackedUp(path=f"keys/{name}", file=tmp_path / name) for name in "abc"]
    write_backup(tmp_path / "small", ABOUT, sources)
    return tmp_path / "small"


def all_of(path: Path, folder: Path) -> None:
    unpack(path, read_manifest(path), folder, blobs=False, but="")


def test_the_file_is_as_its_page_says(small: Path, tmp_path: Path) -> None:
    data, third = small.read_bytes(), (tmp_path / "c").read_bytes()
    found = re.fullmatch(rb"edgefl-derm backup 1\nfirst(.{40})(\{.*\})\n(\d{20}) ([0-9a-f]{64})\n", data, re.S)
    assert found and found[1] == third and int(found[3]) == len(found[2])
    assert found[4].decode() == hashlib.sha256(found[2]).hexdigest()
    manifest = json.loads(found[2])
    assert manifest["about"] == {"federation": "skin", "made_ms": 1, "program": "0.1.0", "store": 1, "rows": 0}
    assert [(one["path"], one["bytes"], one["sha256"]) for one in manifest["files"]] == [
        (f"keys/{name}", len(content), hashlib.sha256(content).hexdigest())
        for name, content in (("a", b"first"), ("b", b""), ("c", third))
    ]
    assert stat.S_IMODE(small.stat().st_mode) == 0o600
    all_of(small, tmp_path / "out")
    assert (tmp_path / "out/keys/c").read_bytes() == third


def test_a_backup_cut_or_changed_at_any_byte_is_refused(small: Path, tmp_path: Path) -> None:
    """Each byte changed, each shorter length, a byte more: one sentence, and no file of a wrong content."""
    data, missed = small.read_bytes(), []
    sent = tmp_path / "sent"
    tries = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    for at, changed in enumerate([*tries, *(data[:at] for at in range(len(data))), data + b"\n"]):
        sent.write_bytes(changed)
        try:
            all_of(sent, tmp_path / f"out-{at % 2}")
            missed.append(at)
        except OperatorError as error:
            assert "\n" not in str(error) and str(sent) in str(error)
    assert missed == []


def test_a_path_that_leaves_the_folder_is_refused(small: Path, tmp_path: Path) -> None:
    for path in ("../outside", "/etc/outside", "keys/../../outside", "", "a\0b"):
        small.unlink()
        write_backup(small, ABOUT, [BackedUp(path=path, file=tmp_path / "a")])
        with pytest.raises(OperatorError, match="not whole"):
            read_manifest(small)
    small.unlink()
    write_backup(small, ABOUT, [BackedUp(path="keys/a", file=tmp_path / "a")] * 2)
    with pytest.raises(OperatorError, match="not whole"):
        read_manifest(small)


def test_a_newer_backup_and_another_file_are_told_apart(small: Path, tmp_path: Path, clock: Any, folder: Path) -> None:
    data = small.read_bytes()
    small.write_bytes(data.replace(b"backup 1", b"backup 2", 1))
    with pytest.raises(OperatorError, match="form 2, which a newer version of edgefl-derm made"):
        read_manifest(small)
    small.write_bytes(b"")
    with pytest.raises(OperatorError, match="is no backup; make one with"):
        read_manifest(small)
    small.unlink()
    write_backup(small, msgspec.structs.replace(ABOUT, store=99), [])
    home = CoordinatorHome(folder / "new")
    with pytest.raises(OperatorError, match="store is of version 99; this one knows versions up to"):
        restoration.restore(small, home, None, clock())
    assert not home.root.exists()
    small.unlink()
    write_backup(small, msgspec.structs.replace(ABOUT, made_ms=clock() + 1), [])
    with pytest.raises(OperatorError, match="the clock of this machine is before that"):
        restoration.restore(small, home, None, clock())


def test_memory_does_not_grow_with_the_backup(tmp_path: Path) -> None:
    """A file of 64 MiB goes in and out in pieces: at most 8 MiB of Python's memory."""
    import tracemalloc

    with (tmp_path / "large").open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        write_backup(tmp_path / "backup", ABOUT, [BackedUp(path="blobs/large", file=tmp_path / "large")])
        unpack(tmp_path / "backup", read_manifest(tmp_path / "backup"), tmp_path / "out", blobs=True, but="")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out/blobs/large").stat().st_size == 64 << 20

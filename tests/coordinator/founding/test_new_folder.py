"""A new coordinator's folder: nothing stays of one that could not be made (docs/security.md, keys at rest)."""

import errno
import os
from pathlib import Path

import pytest
from tests.coordinator.conftest import settings_table

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome, load_settings
from edgefl_protocol.errors import StorageError


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("written", [0, 3, 9])
def test_where_the_disk_is_full_the_same_command_can_be_given_again(
    tmp_path: Path, monkeypatch, there: bool, written: int
) -> None:
    """What lay there stays, and nothing else: a folder with half the keys would be refused as somebody's."""
    home, flush, left = CoordinatorHome(tmp_path / "home"), os.fsync, [2 * written]  # of each file, and of its folder
    if there:
        home.root.mkdir()
        (home.root / ".directory").write_text("of a desktop")

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="the disk is full"):
        patch.setattr(os, "fsync", full)
        make_home(home, settings_table())
    assert [path.name for path in tmp_path.rglob("*")] == (["home", ".directory"] if there else [])
    made = make_home(home, settings_table())
    assert load_settings(home) == made

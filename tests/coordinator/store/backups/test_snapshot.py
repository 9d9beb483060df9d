"""What a backup is written from: a moment held still. Source: docs/security.md check 67, docs/decisions/0056."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgefl_coordinator.cli import main
from edgefl_coordinator.commands.options import Operator
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.store.backups import snapshot
from edgefl_coordinator.web.admin import run_operation
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import lock_file
from edgefl_protocol.envelopes.key_files import signing_key_from_pem, signing_key_to_pem
from edgefl_protocol.errors import StorageError


def test_what_a_killed_command_leaves_goes(make_coordinator, clock) -> None:
    """A snapshot whose command was killed: swept when the store opens, and by a later backup after a day."""
    coordinator = make_coordinator()
    home = coordinator.store.home
    left = home.jobs / OPERATIONS["begin_backup"](coordinator, {})["snapshot"]
    OPERATIONS["end_backup"](coordinator, {"snapshot": OPERATIONS["begin_backup"](coordinator, {})["snapshot"]})
    assert left.is_dir()
    os.utime(left, (time.time() - 90_000,) * 2)
    name = OPERATIONS["begin_backup"](coordinator, {})["snapshot"]
    assert [path.name for path in home.jobs.iterdir()] == [name]
    coordinator.store.close()
    make_coordinator().store.close()
    assert list(home.jobs.iterdir()) == []
    with pytest.raises(OperatorError, match="begin the backup anew"):
        snapshot.folder_of(home, name)
    for outside in ("../blobs", "snapshot-../../blobs"):
        snapshot.drop(home, outside)
        with pytest.raises(OperatorError):
            snapshot.folder_of(home, outside)
    assert home.blobs.is_dir()


def test_a_snapshot_that_is_read_is_not_old(coordinator, monkeypatch) -> None:
    """A backup that takes more than a day keeps what it is written from; afterwards a later backup removes it."""
    home = coordinator.store.home
    name = OPERATIONS["begin_backup"](coordinator, {})["snapshot"]

    def later() -> bool:
        """Whether the first snapshot is there after one that is made a day later."""
        os.utime(home.jobs / name, (time.time() - 90_000,) * 2)
        OPERATIONS["end_backup"](coordinator, OPERATIONS["begin_backup"](coordinator, {}))
        return (home.jobs / name).is_dir()

    with snapshot.held(home, name):
        assert later()
    with monkeypatch.context() as on_nfs:  # where a lock of a file that is only read is refused
        on_nfs.setattr(lock_file.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(9, "Bad file descriptor")))
        assert later()
    assert not later()


def test_whoever_opens_the_store_leaves_a_snapshot_that_is_read(make_coordinator) -> None:
    """No server runs: a command of the operator, or a `serve` that starts, meets a backup that is being written."""
    coordinator = make_coordinator()
    home = coordinator.store.home
    name = OPERATIONS["begin_backup"](coordinator, {})["snapshot"]
    coordinator.store.close()
    with snapshot.held(home, name) as folder:
        before = snapshot.files_of(folder)
        run_operation(home, "status", {})
        assert snapshot.files_of(folder) == before
    run_operation(home, "status", {})
    assert not folder.exists()


@pytest.mark.parametrize("when", ["_copied", "_take_files"])
def test_a_backup_that_was_broken_off_is_not_taken(coordinator, tools, monkeypatch, when) -> None:
    """Ctrl-C while the server takes the snapshot: it stops, and nothing is left over."""
    tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    home, goes_on, asked = coordinator.store.home, getattr(snapshot, when), []

    def broken_off(*given: Any) -> Any:
        with pytest.raises(OperatorError, match="begin the backup anew"):
            snapshot.take(coordinator, asked[0]["snapshot"])
        OPERATIONS["end_backup"](coordinator, asked[0])
        return goes_on(*given)

    def run(_: Any, operation: str, **arguments: Any) -> Any:
        asked.append(arguments)
        if operation == "begin_backup":
            with pytest.raises(StorageError), monkeypatch.context() as slow:
                slow.setattr(snapshot, when, broken_off)
                OPERATIONS[operation](coordinator, arguments)
            raise KeyboardInterrupt
        return OPERATIONS[operation](coordinator, arguments)

    monkeypatch.setattr(Operator, "run", run)
    done = CliRunner().invoke(main, ["backup", str(home.root.parent / "b"), "--home", str(home.root)])
    assert done.exit_code == 1 and len(asked) == 2 and asked[0] == asked[1]
    assert list(home.jobs.iterdir()) == [] and not (home.root.parent / "b").exists()


def test_no_key_that_is_not_the_coordinators_is_in_a_backup(coordinator, tmp_path: Path) -> None:
    """docs/guides/backup.md, 1: the root key, also under another name, in another folder, encrypted: each is left out
    and told. Its own keys are in.
    """
    home = coordinator.store.home
    encrypted = signing_key_to_pem(signing_key_from_pem((home.keys / "root.key").read_bytes()), b"words")
    copies = {home.keys / "root.key.old": (home.keys / "root.key").read_bytes(), home.tls / "spare.pem": encrypted}
    for path, data in copies.items():
        path.write_bytes(data)
    (home.tls / "more.pem").write_bytes((home.tls / "ca.pem").read_bytes())
    facts = OPERATIONS["begin_backup"](coordinator, {})
    assert facts["outside"] == [str(path) for path in (home.keys / "root.key", *copies)]
    folder = snapshot.folder_of(home, facts["snapshot"])
    inside = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = {"keys/signing.key", "keys/signing.pub", "keys/sealing.json", "keys/secret.bin", "keys/root.pub"}
    assert inside == {
        *own,
        "config.toml",
        "store.sqlite",
        "tls/server.key",
        "tls/server.pem",
        "tls/ca.pem",
        "tls/more.pem",
    }


def test_a_missing_blob_or_a_full_disk_ends_with_a_sentence(coordinator, tools, tmp_path: Path, monkeypatch) -> None:
    tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    blob = next(coordinator.store.home.blobs.iterdir())
    blob.rename(tmp_path / "away")
    with pytest.raises(StorageError, match="is missing"):
        OPERATIONS["begin_backup"](coordinator, {})
    assert list(coordinator.store.home.jobs.iterdir()) == []
    (tmp_path / "away").rename(blob)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "hardlink_to", full)
    monkeypatch.setattr(snapshot.shutil, "copy", full)
    with pytest.raises(StorageError, match="No space left"):
        OPERATIONS["begin_backup"](coordinator, {})
    assert list(coordinator.store.home.jobs.iterdir()) == []


def test_what_the_settings_name_elsewhere_is_told(coordinator, folder: Path) -> None:
    """A certificate of another folder, and the gate's program, are not in the backup; one in the folder is."""
    home = coordinator.store.home
    (home.keys / "root.key").rename(folder / "root.key")  # to its medium
    for name, place in (("own", folder), ("mine", home.root)):
        (place / name).write_bytes((home.tls / "ca.pem").read_bytes())
    (home.root / "judge").write_text("#!/bin/sh\n")
    (home.root / "judge").chmod(0o700)
    OPERATIONS["set"](coordinator, {"changes": {"ca": "../own", "protection.gate": "judge --hard"}})
    facts = OPERATIONS["begin_backup"](coordinator, {})
    assert facts["outside"] == [str(folder / "own"), str(home.root / "judge")]
    OPERATIONS["set"](coordinator, {"changes": {"ca": "mine", "protection.gate": ""}})
    facts = OPERATIONS["begin_backup"](coordinator, {})
    assert facts["outside"] == []
    assert (snapshot.folder_of(home, facts["snapshot"]) / "mine").is_file()

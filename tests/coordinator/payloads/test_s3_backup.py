"""A backup of a coordinator whose payloads lie in an S3-compatible store, restored in a folder and below a prefix.

Source: docs/security.md check 67; docs/decisions/0061, 0069.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from click.testing import CliRunner
from tests.coordinator.backups import backup_of
from tests.coordinator.payloads.conftest import averaging_worker

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import restoration
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome, load_settings
from edgefl_coordinator.store.backups import snapshot
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.store.store import Store, s3_payloads
from edgefl_coordinator.store.tables import broadcasts, replies, states, uploads
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError


@pytest.fixture
def payloads(gateway: Any) -> Callable[[], str]:
    url: Callable[[], str] = gateway.url
    return url


@pytest.fixture
def restored(folder: Path, clock: Any, database: Callable[[], str]) -> Iterator[Callable[..., Coordinator]]:
    """Restore a backup in a folder of its own, and open it."""
    opened: list[Coordinator] = []

    def restore(path: Path, name: str, url: str = "") -> Coordinator:
        home = CoordinatorHome(folder / name)
        restoration.restore(path, home, None, clock(), database=database(), payloads=url)
        opened.append(open_coordinator(home, clock=clock))
        return opened[-1]

    yield restore
    for coordinator in opened:
        coordinator.store.close()


def below(url: str) -> dict[str, bytes]:
    """Every object below a prefix."""
    held = s3_payloads(url, b"")._store
    paths = [one["path"] for batch in obstore.list(held) for one in batch]
    return {path: bytes(obstore.get(held, path).bytes()) for path in paths}


def named(coordinator: Coordinator, lab: Any) -> dict[str, str]:
    """Digests of all payloads that rows name, by their content."""
    found = [row for table in (replies, states, broadcasts) for row in lab.rows(coordinator, table) if row.blob]
    for row in found:
        assert hashlib.sha256(coordinator.store.get_blob(row.blob)).hexdigest() == row.sha256
    return {row.blob: row.sha256 for row in found}


@pytest.mark.both_databases
def test_payloads_are_in_the_file_and_lie_where_it_is_said(
    federation, pair, lab, gateway, restored, tmp_path: Path
) -> None:
    """From a prefix into a folder, and from there below another one: each payload is there, and the round goes on."""
    first, second = (lab.Blob(lab.reply_of(number).to_bytes()) for number in (1, 2))
    first.put_all(pair[0])
    assert isinstance(first.reply(pair[0]), Payload)
    before = below(federation.settings.payloads)
    on_disk = restored(backup_of(federation, tmp_path / "b"), "on-disk")
    assert {path.stat().st_mode & 0o777 for path in on_disk.store.home.blobs.iterdir()} == {0o600}
    assert load_settings(on_disk.store.home).payloads == "" and named(on_disk, lab) == named(federation, lab) != {}
    again = restored(backup_of(on_disk, tmp_path / "c"), "in-s3", url := gateway.url())
    assert named(again, lab) == named(federation, lab) and list(again.store.home.blobs.iterdir()) == []
    assert load_settings(again.store.home).payloads == url
    assert {path.split("/")[0] for path in below(url)} == {"owner", "payloads"}
    assert below(federation.settings.payloads) == before
    again.store.lead()
    for member in pair:
        member.coordinator = again
    second.put_all(pair[1])
    assert isinstance(second.reply(pair[1]), Payload)
    assert step(again, averaging_worker) and OPERATIONS["status"](again, {})["round"] == 2


@pytest.mark.both_databases
def test_who_names_no_place_hears_what_is_in_the_folder_now(
    federation, pair, gateway, folder, tmp_path, database
) -> None:
    """Each place that the backup's settings named, and the command does not; none where it names all."""
    backup, runner = str(backup_of(federation, tmp_path / "b")), CliRunner()
    for name, given in (("files", []), ("elsewhere", ["--payloads", gateway.url(), "--database", database()])):
        done = runner.invoke(main, ["restore", backup, "--home", str(folder / name), *given])
        assert done.exit_code == 0, done.stderr
        assert ("the store lay in PostgreSQL; it is a file now" in done.stderr) is (
            not given and bool(federation.settings.database)
        )
        assert ("payloads lay in an S3-compatible store; they are files now" in done.stderr) is (not given)


def test_what_is_struck_out_meanwhile_is_in_it(federation, pair, lab, restored, tmp_path: Path, monkeypatch) -> None:
    """A member is revoked while payloads are fetched: its reply is in the backup, and goes from the prefix after it."""
    sent = lab.Blob(lab.reply_of(1).to_bytes())
    sent.put_all(pair[0])
    assert isinstance(sent.reply(pair[0]), Payload)
    kept, fetch = below(federation.settings.payloads), snapshot._fetch_blobs

    def slowly(*given: Any) -> None:
        OPERATIONS["revoke"](federation, {"name": "clinic-a"})
        assert below(federation.settings.payloads) == kept
        fetch(*given)

    monkeypatch.setattr(snapshot, "_fetch_blobs", slowly)
    again = restored(backup_of(federation, tmp_path / "b"), "again")
    assert [row.blob is not None for row in lab.rows(again, replies)] == [True] and named(again, lab)
    assert len(below(federation.settings.payloads)) == len(kept) - 1


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_reply_that_is_lost_keeps_no_backup_from_being_made(
    federation, pair, lab, restored, tmp_path: Path, how
) -> None:
    """Once the round goes on without it; before, the sentence says what to do. The copy on the disk is backed up, too,
    and goes on."""
    for number, member in enumerate(pair):
        sent = lab.Blob(lab.reply_of(number).to_bytes())
        sent.put_all(member)
        assert isinstance(sent.reply(member), Payload)
    lost, kept = (row.blob for row in lab.rows(federation, replies))
    federation.store.payloads.delete([lost])
    if how == "damaged":
        federation.store.payloads.put(lost, b"something else")
    with pytest.raises(StorageError, match=f"{lost} .*: make the backup again; where it says so again, bring"):
        OPERATIONS["begin_backup"](federation, {})
    assert list(federation.store.home.jobs.iterdir()) == []
    assert step(federation, averaging_worker)
    on_disk = restored(backup_of(federation, tmp_path / "b"), "on-disk")
    again = restored(backup_of(on_disk, tmp_path / "c"), "again")
    names = {path.name for path in again.store.home.blobs.iterdir()}
    assert kept in names and lost not in names
    assert step(again, averaging_worker) and OPERATIONS["status"](again, {})["round"] == 2


def test_a_half_sent_reply_begins_again_or_goes_on(federation, pair, lab, gateway, restored, tmp_path: Path) -> None:
    """Its pieces go away whenever it is whole, so none are in a backup of a prefix, and the member hears so. From a
    folder they come along, also below a prefix."""
    sent, other = (lab.Blob(lab.reply_of(number).to_bytes()) for number in (1, 2))
    assert sent.put(pair[0], 0, 2**19) == 2**19
    pair[0].coordinator = pair[1].coordinator = again = restored(backup_of(federation, tmp_path / "b"), "again")
    assert lab.rows(again, uploads) == [] and sent.put(pair[0], 2**19, 2**20) == 0
    assert sent.put(pair[0], 0, 2**20 + 9) == 2**20 + 9 and other.put(pair[1], 0, 0) == 0
    in_s3 = restored(backup_of(again, tmp_path / "c"), "in-s3", gateway.url())
    pair[0].coordinator = pair[1].coordinator = in_s3
    assert sent.put(pair[0], 0, 0) == 2**20 + 9
    for member, blob in zip(pair, (sent, other), strict=True):
        blob.put_all(member)
        assert isinstance(blob.reply(member), Payload)


def test_a_prefix_that_holds_something_is_left_alone(federation, pair, gateway, folder: Path, tmp_path: Path) -> None:
    """That of the original, too, which has the same keys; a URL that is none; a server that is away."""
    backup, runner = backup_of(federation, tmp_path / "b"), CliRunner()
    before = below(federation.settings.payloads)
    for url, why in (
        (federation.settings.payloads, "there are objects below s3://"),
        ("s3://edgefl", "payloads must be s3://BUCKET/PREFIX"),
        ("https://edgefl/x", "payloads must begin with s3://"),
        (gateway.url().replace(f":{gateway.port}", ":9"), "does not answer"),
    ):
        said = runner.invoke(main, ["restore", str(backup), "--home", str(folder / "new"), "--payloads", url])
        assert said.exit_code in (1, 2) and why in said.stderr and said.stderr.count("\n") == 1, said.stderr
        assert not (folder / "new").exists()
    assert below(federation.settings.payloads) == before


@pytest.mark.both_databases
def test_nothing_is_left_over_below_the_prefix(
    federation, pair, gateway, folder: Path, tmp_path: Path, monkeypatch, clock, database
) -> None:
    """Where the last file cannot be written; then it works, in the same places. A payload that is lost is told."""
    backup, url, home = backup_of(federation, tmp_path / "b"), gateway.url(), CoordinatorHome(folder / "new")
    places = {"payloads": url, "database": database()}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(restoration, "write_atomic", full)
        with pytest.raises(StorageError, match="No space left"):
            restoration.restore(backup, home, None, clock(), **places)
    assert below(url) == {} and not home.root.exists()
    restoration.restore(backup, home, None, clock(), **places)
    assert below(url)
    with pytest.raises(OperatorError, match="holds audit-heads"):
        restoration.restore(backup, home, None, clock(), **places)
    store: Store = federation.store
    store.payloads.delete(store.payloads.names())
    with pytest.raises(StorageError, match="there is no"):
        OPERATIONS["begin_backup"](federation, {})
    assert list(store.home.jobs.iterdir()) == []

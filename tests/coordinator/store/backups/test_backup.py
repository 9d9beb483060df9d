"""Backup while running, restored elsewhere: what it holds, what it refuses, and what members and the log say after it.

Source: docs/security.md check 67, docs/decisions/0056.
"""

import hashlib
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import text
from tests.coordinator.backups import backup_of

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import coordinator_keys, restoration
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import audit, audit_heads, revocations
from edgefl_coordinator.store.audit_chain import check_log, read_head
from edgefl_coordinator.store.coordinator import Coordinator, load_keys, open_coordinator
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload, generate_signing_key
from edgefl_protocol.errors import KeyMaterialError
from edgefl_protocol.messages.requests import Refusal, ReplyReply, ReplyRequest

pytestmark = pytest.mark.both_databases


@pytest.fixture
def restored(folder: Path, clock: Any, database: Any) -> Any:
    """Restore a backup in a folder of its own, from a database of PostgreSQL in another, and open it."""
    opened: list[Coordinator] = []

    def restore(path: Path, name: str = "elsewhere", passphrase: bytes | None = None) -> Coordinator:
        home = CoordinatorHome(folder / name)
        restoration.restore(path, home, passphrase, clock(), database=database())
        opened.append(open_coordinator(home, passphrase, clock=clock))
        return opened[-1]

    yield restore
    for coordinator in opened:
        coordinator.store.close()


def events(coordinator: Coordinator) -> list[str]:
    with coordinator.store.transaction() as connection:
        return [row.event for row in audit.kept_rows(connection)]


def test_a_restored_folder_is_the_one_that_was_backed_up(coordinator, tools, restored, tmp_path: Path) -> None:
    """Every row and blob, keys and settings; not the root key. Its log goes on with one row more, signed."""
    members = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "ab"]
    tools.start_rounds(coordinator)
    assert isinstance(members[0].reply(1), Payload)
    coordinator_keys.note_keys(coordinator)  # as `serve` does
    audit_heads.sign(coordinator)
    again = restored(backup_of(coordinator, tmp_path / "backup"))
    old, new = coordinator.store.home, again.store.home
    assert not (new.keys / "root.key").exists() and (old.keys / "root.key").exists()
    config = (old.root / "config.toml").read_text().replace(coordinator.settings.database, again.settings.database)
    assert (new.root / "config.toml").read_text() == config
    for name in ("keys/signing.key", "keys/secret.bin", "keys/root.pub", "tls/server.key"):
        assert (new.root / name).read_bytes() == (old.root / name).read_bytes(), name
        assert (new.root / name).stat().st_mode == (old.root / name).stat().st_mode, name
    assert (new.root / "config.toml").stat().st_mode == (old.root / "config.toml").stat().st_mode
    assert {path.name: path.read_bytes() for path in new.blobs.iterdir()} == {
        path.name: path.read_bytes() for path in old.blobs.iterdir()
    }
    for table in ("members", "windows", "mids", "idempotency", "rounds", "replies", "states"):
        rows = []
        for one in (coordinator, again):
            with one.store.transaction() as connection:
                rows.append(sorted(map(repr, connection.execute(text(f"SELECT * FROM {table}")))))
        assert rows[0] == rows[1] and rows[0], table
    assert events(again) == [*events(coordinator), "restored", "sealing_key"]
    assert OPERATIONS["audit"](again, {})["signed_rows"] == len(events(again))


def test_what_was_sealed_before_is_refused_and_what_was_answered_stays(
    coordinator, tools, restored, clock, tmp_path: Path, caplog
) -> None:
    """Check 67: no message of before the restoration opens, known to the backup or not; work items count once. The log
    says that such a refusal heals by itself."""
    caplog.set_level("INFO", "edgefl_coordinator")
    first, second = (tools.approved_member(coordinator, f"clinic-{letter}") for letter in "ab")
    tools.start_rounds(coordinator)

    def item(member: Any, number: int) -> bytes:
        message = ReplyRequest(idem=f"work-item-{number:08}", reply=tools.maps_payload(number))
        return member.envelope("reply", message.to_payload(), rnd=1)

    before, after = item(first, 1), item(second, 2)
    answer = first.send("reply", before)
    path = backup_of(coordinator, tmp_path / "backup")
    clock.now_ms += 1000
    assert isinstance(second.send("reply", after), Payload)
    invited = tools.Member(coordinator, "clinic-c")
    enrolment = invited.envelope("enrol", invited.enrolment(tools.token_of(coordinator, "clinic-c")).to_payload())
    assert isinstance(invited.send("enrol", enrolment), Payload)
    clock.now_ms += 1000
    again = restored(path)
    recorded = [(first, "reply", before), (second, "reply", after), (invited, "enrol", enrolment)]
    for member, route, sent in recorded:
        member.coordinator = again
        for _ in range(50):
            assert member.send(route, sent) == 401
    assert "reply wrong_recipient (it is sealed for an earlier key: its sender fetches the new one" in caplog.text
    # The same work in new messages: what was acknowledged before the backup gets that answer, the rest is new.
    clock.now_ms += 1000
    assert first.send("reply", item(first, 1)) == answer
    later = second.send("reply", item(second, 2))
    assert isinstance(later, Payload) and ReplyReply.from_payload(later).first_answer_ms == clock.now_ms
    twice = second.send("reply", item(second, 3))
    assert isinstance(twice, Refusal) and twice.code == "already_replied"
    OPERATIONS["set"](again, {"changes": {"rounds.quorum_target": "2"}})
    while step(again, tools.toy_worker):
        pass
    with again.store.transaction() as connection:
        assert connection.scalar(text("SELECT count(*) FROM replies WHERE number = 1")) == 2
        assert connection.scalar(text("SELECT max(number) FROM rounds")) == 2


def test_numbers_of_keys_rise_and_that_of_the_list_of_revoked_keys_waits(
    coordinator, restored, clock, tmp_path: Path
) -> None:
    """docs/security.md 2.6: members refuse a key record or a list of a lower number than they have seen.

    The key record's is above all that were lost, also where the same backup is restored again. The list's is not before
    the operator has revoked again, and says so: one without a stolen key would bring that key back.
    """

    def numbers(one: Coordinator) -> tuple[int, int]:
        with one.store.transaction() as connection:
            return one.keys.ring.number, revocations.listed(connection)[0]

    path = backup_of(coordinator, tmp_path / "backup")
    at_backup, seen = numbers(coordinator), [0]
    for turn in range(3):
        clock.now_ms += 5000
        for number in range(4):
            OPERATIONS["revoke_signer"](coordinator, {"key_id": f"{turn}{number}" * 32})
            OPERATIONS["rotate"](coordinator, {"signing": False})
        lost = numbers(coordinator)
        clock.now_ms += 1000
        coordinator = restored(path, f"turn-{turn}")
        again = numbers(coordinator)
        seen += [lost[0], again[0]]
        assert again[1] == at_backup[1] < lost[1] and not coordinator.keys.ring.previous
    assert all(before < after for before, after in itertools.pairwise(seen))
    OPERATIONS["revoke_signer"](coordinator, {"key_id": "20" * 32})
    OPERATIONS["rotate"](coordinator, {"signing": False})
    assert numbers(coordinator)[1] > lost[1]


def test_heads_of_what_was_lost_are_explained(coordinator, tools, restored, clock, tmp_path: Path) -> None:
    """docs/security.md 2.9: said to be restored, not called fraud; it passes only for a reader who knows of it."""
    tools.approved_member(coordinator, "clinic-a")
    audit_heads.sign(coordinator)
    path = backup_of(coordinator, tmp_path / "backup")
    for name in "bcdefg":
        clock.now_ms += 1000
        tools.approved_member(coordinator, f"clinic-{name}")
        audit_heads.sign(coordinator)
    lost = [read_head(line.encode()) for line in audit_heads.lines_of(coordinator)]
    clock.now_ms += 1000
    again = restored(path)
    for name in "xyz":
        tools.approved_member(again, f"clinic-{name}")
    audit_heads.sign(again)
    with again.store.transaction() as connection:
        rows = list(audit.kept_rows(connection))
    own = [read_head(line.encode()) for line in audit_heads.lines_of(again)]
    row = 1 + [one.event for one in rows].index("restored")
    given: Any = (rows, [*lost, *own], "skin", [again.keys.signing.key_id])
    assert lost[-1].rows > len(rows) > lost[2].rows  # one behind the restored log, one in its middle
    with pytest.raises(OperatorError, match=rf"restored from a backup in row {row}, .* --restored {row}; .* was cut"):
        check_log(*given)
    assert check_log(*given, [row]) == len(rows)
    with pytest.raises(OperatorError, match="--restored"):
        check_log(*given, [row + 1])
    # A cut after the restoration, and rows before it that were written anew, are what they were.
    later = max(own, key=lambda head: head.rows)
    with pytest.raises(OperatorError, match="was cut"):
        check_log(rows[: later.rows - 1], own, "skin", [again.keys.signing.key_id], [row])
    heads = again.store.home.heads
    heads.write_bytes(coordinator.store.home.heads.read_bytes() + heads.read_bytes().splitlines()[-1] + b"\n")
    with pytest.raises(OperatorError, match="was restored from a backup"):
        OPERATIONS["audit"](again, {})
    assert OPERATIONS["audit"](again, {"restored": [row]})["signed_rows"] == len(rows)


def test_restore_overwrites_nothing_and_leaves_nothing(coordinator, tools, clock, folder: Path, tmp_path: Path) -> None:
    """A folder that holds more than hidden files is refused; a changed file or a wrong key leaves it as it was. The
    home of the service's user has hidden ones: PostgreSQL's documentation, "The Password File", and ~/.cache."""
    path, home = backup_of(coordinator, tmp_path / "backup"), CoordinatorHome(folder / "new")
    home.root.mkdir()
    (home.root / "mine").write_text("mine")
    with pytest.raises(OperatorError, match=r"holds mine; choose a new or empty folder"):
        restoration.restore(path, home, None, clock())
    assert [one.name for one in home.root.iterdir()] == ["mine"]
    (home.root / "mine").rename(home.root / ".pgpass")
    (home.root / ".cache").mkdir()
    before = sorted(home.root.iterdir())
    data, draw = path.read_bytes(), random.Random(67)
    for at in (*draw.sample(range(len(data)), 40), len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 128]) + data[at + 1 :])
        with pytest.raises(OperatorError):
            restoration.restore(path, home, None, clock())
        path.write_bytes(data[:at])
        with pytest.raises(OperatorError):
            restoration.restore(path, home, None, clock())
        assert sorted(home.root.iterdir()) == before
    path.write_bytes(data)
    restoration.restore(path, home, None, clock())
    open_coordinator(home, clock=clock).store.close()
    assert (home.root / ".pgpass").read_text() == "mine"


def test_restore_overwrites_no_hidden_file(make_coordinator, clock, folder: Path, tmp_path: Path) -> None:
    """A certificate may be called so, and lie in the backup."""
    coordinator, home = make_coordinator(certificate=".server.pem"), CoordinatorHome(folder / "new")
    (coordinator.store.home.tls / "server.pem").rename(coordinator.store.home.root / ".server.pem")
    path = backup_of(coordinator, tmp_path / "backup")
    home.root.mkdir()
    (home.root / ".server.pem").write_text("mine")
    with pytest.raises(OperatorError, match=r"holds \.server\.pem, and so does the backup"):
        restoration.restore(path, home, None, clock())
    assert [one.read_text() for one in home.root.iterdir()] == ["mine"]


def test_keys_stay_encrypted(folder: Path, tools, clock, restored, tmp_path: Path) -> None:
    """docs/security.md 2.6.7: no key in the file opens without the passphrase, and restoring asks for it."""
    from edgefl_coordinator.founding.folder import make_home

    home = CoordinatorHome(folder / "home")
    make_home(home, tools.settings_table(), b"open sesame")
    coordinator = open_coordinator(home, b"open sesame", clock=clock)
    path = backup_of(coordinator, tmp_path / "backup")
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()
    for secret in (coordinator.keys.signing.seed, coordinator.keys.sealing.secret):
        assert secret not in path.read_bytes()
    coordinator.store.close()
    for wrong in (None, b"another"):
        with pytest.raises(KeyMaterialError):
            restoration.restore(path, CoordinatorHome(folder / "wrong"), wrong, clock())
        assert not (folder / "wrong").exists()
    again = restored(path, passphrase=b"open sesame")
    with pytest.raises(KeyMaterialError):
        load_keys(again.store.home)


def test_nothing_acknowledged_is_missing_while_members_send(coordinator, tools, restored, tmp_path: Path) -> None:
    """Backups while eight threads send: each that had its answer before `backup` began is in it, with its blob."""
    members = [tools.quick_member(coordinator, f"clinic-{number:02}") for number in range(24)]
    tools.start_rounds(coordinator)
    done: list[str] = []
    queue = iter(members)
    lock = threading.Lock()

    def send() -> None:
        while True:
            with lock:
                member = next(queue, None)
            if member is None:
                return
            assert isinstance(member.reply(1), Payload)
            done.append(member.name)

    OPERATIONS["set"](coordinator, {"changes": {"rounds.quorum_target": "99"}})
    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    taken = []
    while len(taken) < 4:
        acknowledged = list(done)
        taken.append((acknowledged, backup_of(coordinator, tmp_path / f"backup-{len(taken)}")))
    for thread in threads:
        thread.join()
    for turn, (acknowledged, path) in enumerate(taken):
        again = restored(path, f"turn-{turn}")
        with again.store.transaction() as connection:
            held = connection.execute(
                text("SELECT members.name, blob, sha256 FROM replies JOIN members USING (skid)")
            ).all()
        assert set(acknowledged) <= {row.name for row in held}
        for row in held:
            assert hashlib.sha256(again.store.get_blob(row.blob)).hexdigest() == row.sha256


def test_what_was_revoked_since_counts_again(coordinator, tools, restored, clock, tmp_path: Path) -> None:
    """What docs/guides/backup.md tells an operator to do again: members, invites and signers."""
    tools.approved_member(coordinator, "clinic-a")
    token, signer = tools.token_of(coordinator, "clinic-b"), generate_signing_key().key_id
    path = backup_of(coordinator, tmp_path / "b")
    for name in ("clinic-a", "clinic-b"):
        OPERATIONS["revoke"](coordinator, {"name": name})
    OPERATIONS["revoke_signer"](coordinator, {"key_id": signer, "force": False})
    again = restored(path)
    status = OPERATIONS["status"](again, {})
    assert [one["state"] for one in status["members"]] == ["approved"]
    assert [one["name"] for one in status["invites"]] == ["clinic-b"]
    with again.store.transaction() as connection:
        assert revocations.listed(connection)[1] == []
    assert tools.Member(again, "clinic-b").enrol(token).state == "pending"


def test_the_commands(make_coordinator, tools, folder: Path, tmp_path: Path) -> None:
    """`backup` and `restore` as they are typed, with text and JSON; the file is not overwritten."""
    coordinator = make_coordinator()
    tools.approved_member(coordinator, "clinic-a")
    coordinator.store.close()
    runner, home = CliRunner(), coordinator.store.home.root
    made = runner.invoke(main, ["backup", str(tmp_path / "b"), "--home", str(home), "--json"])
    assert made.exit_code == 0, made.output
    facts, root_key = json.loads(made.stdout), str(home / "keys/root.key")
    assert (facts["federation"], facts["outside"]) == ("skin", [root_key])
    assert made.stderr == f"warning: {root_key} is not in the backup; keep it, too\n"
    assert facts["bytes"] == (tmp_path / "b").stat().st_size
    assert runner.invoke(main, ["backup", str(tmp_path / "b"), "--home", str(home)]).exit_code == 2
    refused = runner.invoke(main, ["restore", str(tmp_path / "b"), "--home", str(home)])
    assert refused.exit_code == 1 and "choose a new or empty folder" in refused.stderr
    again = runner.invoke(main, ["restore", str(tmp_path / "b"), "--home", str(folder / "there")])
    assert again.exit_code == 0 and "restored skin in" in again.stdout and "revoke again" in again.stderr
    stands = [runner.invoke(main, ["status", "--home", str(one)]).stdout for one in (home, folder / "there")]
    assert ["made at the restoration: its number counts the seconds" in one for one in stands] == [False, True]
    shown = runner.invoke(main, ["log", "--home", str(folder / "there")])
    assert "skin was restored from its backup of 20" in shown.stdout and "a backup of skin was made" in shown.stdout
    told = runner.invoke(main, ["restore", str(tmp_path / "b"), "--home", str(folder / "json"), "--json"])
    assert json.loads(told.stdout)["federation"] == "skin"

"""The coordinator's own keys over time, and the root sets it gives out (docs/security.md 2.6.4 and 2.6.6)."""

import base64
import dataclasses
import json
import shutil

import pytest
from click.testing import CliRunner, Result

from edgefl_coordinator import cli
from edgefl_coordinator.errors import NotAllowedError, OperatorError
from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.store import revocations
from edgefl_coordinator.store.coordinator import load_keys, open_coordinator
from edgefl_coordinator.store.key_ring import KEPT_MS, RENEW_AFTER_MS, load_ring, new_ring, save_ring
from edgefl_coordinator.web.admin import run_operation
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload, SigningKey, generate_signing_key
from edgefl_protocol.envelopes.key_files import (
    read_public_key,
    sealing_key_to_pem,
    signing_key_from_pem,
    signing_key_to_pem,
)
from edgefl_protocol.envelopes.keys import generate_sealing_key
from edgefl_protocol.errors import KeyMaterialError, RecordError
from edgefl_protocol.records.coordinator_records import verify_key_record
from edgefl_protocol.records.root import Root, make_root, split_chain

pytestmark = pytest.mark.both_databases

DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def aged(coordinator, clock):
    """A coordinator whose sealing key was made now, by the clock that the test moves."""
    coordinator.keys.ring = new_ring(1, clock.now_ms)
    save_ring(coordinator.store.home, coordinator.keys.ring)
    return coordinator


def test_the_sealing_key_is_renewed_weekly_and_deleted_on_time(aged, clock, tools) -> None:
    """docs/security.md check 23: the previous key opens messages for two queue lifetimes, then it is on no disk."""
    member = tools.approved_member(aged, "clinic-a")
    first = aged.keys.sealing
    clock.now_ms += RENEW_AFTER_MS - 1
    assert not coordinator_keys.tend_keys(aged) and aged.keys.sealing is first
    clock.now_ms += 1
    assert coordinator_keys.tend_keys(aged) and aged.keys.sealing is not first
    renewed_ms = clock.now_ms

    def ask_under_the_first():
        ring = aged.keys.ring
        aged.keys.ring = type(ring)(number=ring.number, current=first, made_ms=0)  # the member has the old record
        body = member.envelope("task", Payload())
        aged.keys.ring = ring
        return member.send("task", body)

    for offset_ms, opened in ((0, True), (KEPT_MS - 1, True), (KEPT_MS, False), (KEPT_MS + DAY_MS, False)):
        clock.now_ms = renewed_ms + offset_ms
        coordinator_keys.tend_keys(aged)
        assert (ask_under_the_first() != 401) is opened
        stored = load_ring(aged.store.home)
        assert (first.secret in [key.secret for key, _ in stored.previous]) is opened
        assert stored.current.secret == aged.keys.sealing.secret and stored.number == 2
    assert member.call("task", Payload()) != 401
    assert sealing_key_to_pem(first).split(b"\n")[1] not in aged.store.home.sealing_ring.read_bytes()


def test_a_key_record_never_outlives_its_key(aged, clock) -> None:
    """docs/security.md 2.6.4: whoever holds a record in time seals for a key that still opens."""
    for day in range(40):
        clock.now_ms += DAY_MS
        if day % 3:
            coordinator_keys.tend_keys(aged)  # a server that is down from time to time renews late
        found = verify_key_record(aged.key_record(), aged.keys.signing.key_id, "skin", clock.now_ms)
        key = next(key for key in aged.keys.ring.opening(clock.now_ms) if key.public_key == found.sealing)
        at_ms, ring = found.expires_ms, aged.keys.ring
        for until in (clock.now_ms, at_ms - 1):  # renewed at once or as late as possible
            later = ring.renewed(generate_sealing_key(1), max(until, ring.made_ms + RENEW_AFTER_MS))
            assert key.public_key in [one.public_key for one in later.opening(min(at_ms - 1, until + KEPT_MS - 1))]
    assert aged.keys.ring.number == 1 + 5  # in 40 days, some renewals a day or two late


@pytest.mark.parametrize("step", ["before the file", "after the file", "after the audit row"])
def test_a_renewal_killed_at_any_step(aged, make_coordinator, clock, monkeypatch, step) -> None:
    """docs/security.md check 23: killed at any step, the coordinator has one working ring and one audit row each."""
    clock.now_ms += RENEW_AFTER_MS
    note_keys = coordinator_keys.note_keys

    def killed(*given):
        if step == "after the audit row":
            note_keys(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(coordinator_keys, "save_ring" if step == "before the file" else "note_keys", killed)
        with pytest.raises(KeyboardInterrupt):
            coordinator_keys.tend_keys(aged)
    aged.store.close()
    again = open_coordinator(aged.store.home, clock=clock)
    try:
        assert again.keys.ring.number == (1 if step == "before the file" else 2)
        coordinator_keys.tend_keys(again)
        coordinator_keys.note_keys(again)
        assert again.keys.ring.number == 2
        coordinator_keys.note_keys(again)
        with again.store.transaction() as connection:
            rows = connection.exec_driver_sql("SELECT detail FROM audit WHERE event = 'sealing_key'").all()
        assert [json.loads(row.detail)["number"] for row in rows] == [2]
        assert len(again.keys.ring.opening(clock.now_ms)) == 2
    finally:
        again.store.close()


def test_every_cut_of_the_ring_is_a_sentence(aged) -> None:
    """docs/security.md check 60: the file of sealing keys cut at every 64th byte: typed, never another key."""
    home = aged.store.home
    data = home.sealing_ring.read_bytes()
    for cut in range(0, len(data), 64):
        home.sealing_ring.write_bytes(data[:cut])
        with pytest.raises(KeyMaterialError):
            load_ring(home)
    home.sealing_ring.write_bytes(data)
    assert load_ring(home) == aged.keys.ring or load_ring(home).current.secret == aged.keys.sealing.secret
    for changes in ({"number": True}, {"previous": [{}]}, {"previous": 3}, {"format": 2}, {"more": 1}, {"made_ms": -1}):
        home.sealing_ring.write_text(json.dumps({**json.loads(data), **changes}))
        with pytest.raises(KeyMaterialError):
            load_ring(home)


def test_a_home_with_a_single_key_goes_on(aged, clock) -> None:
    """A home from before there was a ring: its key counts, and its file goes with the first renewal."""
    home, old = aged.store.home, aged.keys.sealing
    home.sealing_ring.unlink()
    (home.keys / "sealing.key").write_bytes(sealing_key_to_pem(old))
    (home.keys / "sealing.key").chmod(0o600)
    assert load_keys(home).sealing.secret == old.secret
    aged.keys.ring = load_ring(home)
    coordinator_keys.renew_sealing(aged)
    assert not (home.keys / "sealing.key").exists()
    assert [key.secret for key in load_ring(home).opening(clock.now_ms)][1] == old.secret


def root_key(coordinator) -> SigningKey:
    return signing_key_from_pem((coordinator.store.home.keys / "root.key").read_bytes())


def root_record(coordinator, version: int = 1, key: SigningKey | None = None, **changes) -> bytes:
    signer, now_ms = key or root_key(coordinator), coordinator.clock()
    fields = {
        "federation": "skin", "version": version, "issued_ms": now_ms, "expires_ms": now_ms + 365 * DAY_MS,
        "root_keys": (signer.public_key,), "coordinators": (coordinator.keys.signing.public_key,), **changes,
    }  # fmt: skip
    return make_root(Root(**fields), [signer])


@pytest.fixture
def publish(coordinator, tmp_path):
    def run(record: bytes):
        (tmp_path / "root").write_bytes(record + b"\n")
        return OPERATIONS["publish_root"](coordinator, {"path": str(tmp_path / "root")})

    return run


def test_root_sets_are_published_in_order(coordinator, publish, asgi) -> None:
    """docs/security.md check 26: wrong root, skipped version, fewer than the threshold, rollback: 0 published."""
    client = asgi(coordinator)
    assert client.request("GET", "/v1/root").status == 404
    with pytest.raises(RecordError):
        publish(root_record(coordinator, key=generate_signing_key()))
    with pytest.raises(NotAllowedError, match="no member could trust it"):
        publish(root_record(coordinator, coordinators=(generate_signing_key().public_key,)))
    with pytest.raises(RecordError, match="expired"):
        publish(root_record(coordinator, expires_ms=coordinator.clock() - 1))
    first = root_record(coordinator)
    assert publish(first)["version"] == 1 and publish(first)["version"] == 1
    with pytest.raises(RecordError, match="left out"):
        publish(root_record(coordinator, 3))
    signer = generate_signing_key().public_key
    second = root_record(coordinator, 2, signers=(signer,))
    assert publish(second)["signers"] == 1
    with pytest.raises(OperatorError, match="not above"):
        publish(first)
    answer = client.request("GET", "/v1/root")
    assert (answer.status, split_chain(answer.body)) == (200, [first, second])
    facts = OPERATIONS["status"](coordinator, {})["keys"]
    assert (facts["root_version"], facts["sealing_number"], facts["revoked"]) == (2, 1, 0)


@pytest.mark.parametrize("bound", ["MAX_VERSIONS", "MAX_CHAIN_BYTES"])
def test_no_root_set_is_published_that_would_leave_members_behind(coordinator, publish, monkeypatch, bound) -> None:
    """docs/security.md check 26, endless data: members walk through so many sets, from the first one on."""
    first = root_record(coordinator)
    publish(first)
    monkeypatch.setattr(revocations, bound, {"MAX_VERSIONS": 1, "MAX_CHAIN_BYTES": len(first) + 99}[bound])
    with pytest.raises(OperatorError, match="could not follow"):
        publish(root_record(coordinator, 2))
    assert publish(first)["version"] == 1  # the one that is published may come again


def test_the_signing_key_changes_only_with_the_root_set(coordinator, publish, clock) -> None:
    """docs/security.md 2.6.6: prepared, listed, changed; with it the sealing keys are new and none of before opens."""
    home, old, old_sealing = coordinator.store.home, coordinator.keys.signing, coordinator.keys.sealing
    prepared = OPERATIONS["rotate"](coordinator, {"signing": True})
    assert prepared["state"] == "prepared" and coordinator.keys.signing is old
    with pytest.raises(OperatorError, match="no published root set"):
        OPERATIONS["rotate"](coordinator, {"signing": True})
    following = read_public_key(home.next_public)
    publish(root_record(coordinator, coordinators=(following,)))
    assert OPERATIONS["rotate"](coordinator, {"signing": True})["state"] == "changed"
    assert coordinator.keys.signing.public_key == following == load_keys(home).signing.public_key
    assert not home.next_signing.exists() and read_public_key(home.signing_public) == following
    assert old_sealing.public_key not in [key.public_key for key in coordinator.keys.ring.opening(clock.now_ms)]
    assert verify_key_record(coordinator.key_record(), following.key_id, "skin", clock.now_ms).number == 2


@pytest.mark.parametrize("step", ["save_ring", "write_atomic", "flush_to_disk"])
def test_a_change_of_the_signing_key_killed_at_any_step(coordinator, publish, monkeypatch, step) -> None:
    """docs/security.md check 23: killed before the new ring, before the public and after the private key: the command
    again ends it, and one signing key that the root set lists counts.
    """
    home = coordinator.store.home
    OPERATIONS["rotate"](coordinator, {"signing": True})
    following = read_public_key(home.next_public)
    publish(root_record(coordinator, coordinators=(following,)))

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(coordinator_keys, step, killed)
        OPERATIONS["rotate"](coordinator, {"signing": True})
    coordinator = dataclasses.replace(coordinator, keys=load_keys(home))  # what was in memory is gone
    if step == "flush_to_disk":
        assert coordinator.keys.signing.public_key == following
    else:
        assert OPERATIONS["rotate"](coordinator, {"signing": True})["state"] == "changed"
    assert load_keys(home).signing.public_key == read_public_key(home.signing_public) == following
    coordinator_keys.note_keys(coordinator)  # as `serve` does when it starts
    coordinator_keys.note_keys(coordinator)
    with coordinator.store.transaction() as connection:
        rows = connection.exec_driver_sql("SELECT detail FROM audit WHERE event = 'signing_key'").all()
    assert [json.loads(row.detail)["key_id"] for row in rows].count(following.key_id) == 1


def test_serve_refuses_a_signing_key_of_somebody_else(coordinator, publish) -> None:
    """docs/security.md 2.6.6: members take the pinned one, or one that a root set lists. Heads that another has signed
    break the log, so it is refused before it signs; and still where an earlier version has noted it as its own.
    """
    home, own, foreign = coordinator.store.home, coordinator.keys.signing, generate_signing_key()

    def with_key(key: SigningKey):
        return dataclasses.replace(coordinator, keys=dataclasses.replace(coordinator.keys, signing=key))

    def refused(key: SigningKey, words: str) -> None:
        with pytest.raises(OperatorError, match=words):
            coordinator_keys.check_signing(with_key(key))

    coordinator_keys.check_signing(with_key(foreign))  # nothing tells of one before it was served
    coordinator_keys.note_keys(coordinator)
    coordinator_keys.check_signing(coordinator)
    refused(foreign, rf"signing.key is not the key {own.key_id} that this coordinator used until now: put it back from")
    publish(root_record(coordinator))
    coordinator_keys.note_keys(with_key(foreign))
    refused(foreign, f"{own.key_id} that this coordinator used until now and its root set lists: put it back")
    coordinator_keys.check_signing(coordinator)
    OPERATIONS["rotate"](coordinator, {"signing": True})
    following = signing_key_from_pem(home.next_signing.read_bytes())
    publish(root_record(coordinator, 2, coordinators=(following.public_key,)))
    coordinator_keys.check_signing(coordinator)  # until the change
    coordinator_keys.check_signing(with_key(following))  # killed before its audit row
    OPERATIONS["rotate"](coordinator, {"signing": True})
    coordinator_keys.check_signing(coordinator)
    refused(own, f"is not the key {following.key_id} that")


def test_a_passphrase_guards_the_new_keys_too(folder, tools, clock) -> None:
    """docs/security.md 2.6.7: a renewed key is encrypted as the first was, and each signing key under scrypt."""
    from edgefl_coordinator.founding.folder import make_home
    from edgefl_coordinator.settings import CoordinatorHome

    home = CoordinatorHome(folder / "secret")
    make_home(home, tools.settings_table(), b"correct horse", clock.now_ms)
    coordinator = open_coordinator(home, b"correct horse", clock)
    coordinator_keys.renew_sealing(coordinator)
    coordinator.store.close()
    with pytest.raises(KeyMaterialError):
        load_keys(home)
    assert load_keys(home, b"correct horse").ring.number == 2
    scrypt = bytes.fromhex("06092b06010401da47040b")  # RFC 7914 7: 1.3.6.1.4.1.11591.4.11
    files = {file.name: file.read_text() for file in home.keys.glob("*.key")}
    assert {"signing.key", "root.key"} <= files.keys()
    assert all(scrypt in base64.b64decode("".join(pem.splitlines()[1:-1])) for pem in files.values())


def test_commands_with_a_passphrase_work_as_they_are_printed(folder, tools, clock) -> None:
    """What is printed names the file of the passphrase; without it a server that is down is still what `status` says,
    and the sentence names the folder of the keys and both ways to give a passphrase."""
    from edgefl_coordinator.founding.folder import make_home
    from edgefl_coordinator.settings import CoordinatorHome

    home, file = CoordinatorHome(folder / "secret"), folder / "pass"
    make_home(home, tools.settings_table(), b"correct horse", clock.now_ms)
    file.write_text("correct horse")
    file.chmod(0o600)

    def status(*words: object) -> Result:
        return CliRunner().invoke(cli.main, ["status", "--check", "--home", str(home.root), *map(str, words)])

    found = status("--passphrase-file", file)
    command = f"edgefl-coordinator serve --home {home.root}"
    assert found.exit_code == 1 and f"run: {command} --passphrase-file {file}\n" in found.stdout
    locked = status()
    assert (
        locked.exit_code == 1
        and f"the server is not running, so members cannot reach it; run: {command}" in locked.stderr
    )
    for named in (str(home.keys), "--passphrase-file", "EDGEFL_KEY_PASSPHRASE"):
        assert named in locked.stderr


def run(*arguments: object, code: int = 0) -> str:
    """What a command of the operator prints."""
    result = CliRunner().invoke(cli.main, [str(one) for one in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def test_the_commands(coordinator, tmp_path) -> None:
    """docs/guides/federation.md, keys over time: every command, while nobody serves."""
    home = coordinator.store.home
    coordinator.store.close()
    rotated = run("rotate", "--home", home.root)
    assert "sealing key 2 is in use" in rotated and "0 keys are revoked; if you have restored a backup" in rotated
    second = generate_signing_key()
    for name, key in (("second", second), ("bundles", generate_signing_key())):
        (tmp_path / f"{name}.pub").write_text(key.public.hex())
    keys = home.keys
    offline = tmp_path / "offline"
    shutil.copytree(keys, offline)
    made = run(
        "root", "make", "-o", tmp_path / "root-1", "--federation", "skin", "--root-key", keys / "root.pub",
        "--root-key", tmp_path / "second.pub", "--threshold", 2, "--coordinator", keys / "signing.pub",
        "--signer", tmp_path / "bundles.pub", "--sign", offline / "root.key",
    )  # fmt: skip
    assert "1 more is needed" in made
    refused = run("root", "publish", tmp_path / "root-1", "--home", home.root, code=3)
    assert "but 2 must" in refused
    (tmp_path / "second.key").write_bytes(signing_key_to_pem(second))
    (tmp_path / "second.key").chmod(0o600)
    run("root", "sign", tmp_path / "root-1", "--key", tmp_path / "second.key", "-o", tmp_path / "root-1b")
    assert json.loads(run("root", "show", tmp_path / "root-1b", "--json"))["threshold"] == 2
    whole = (tmp_path / "root-1b").read_bytes()
    again = ("root", "sign", tmp_path / "root-1", "--key")
    assert "root-1b exists; name another file" in run(*again, offline / "root.key", "-o", tmp_path / "root-1b", code=2)
    assert (tmp_path / "root-1b").read_bytes() == whole
    idle = (*again, offline / "signing.key", "-o", tmp_path / "root-1c")
    assert "signature would not count; if it is one of the previous set's, name that set" in run(*idle, code=2)
    assert "would not count\n" in run(*idle, "--after", tmp_path / "root-1b", code=2)
    assert not (tmp_path / "root-1c").exists()
    by_id = run("root", "show", tmp_path / "root-1b")
    assert second.key_id in by_id and second.public.hex() not in by_id  # as everything else names it
    assert "published root set 1" in run("root", "publish", tmp_path / "root-1b", "--home", home.root)
    run("root", "make", "-o", tmp_path / "root-2", "--after", tmp_path / "root-1b", "--no-signers", "--sign",
        offline / "root.key", "--sign", tmp_path / "second.key")  # fmt: skip
    shown = json.loads(run("root", "show", tmp_path / "root-2", "--json"))
    assert (shown["version"], shown["signers"], shown["threshold"]) == (2, [], 2)
    assert "is revoked" in run("revoke", "--signer", tmp_path / "bundles.pub", "--home", home.root)
    run("revoke", "--home", home.root, code=2)
    run("root", "make", "-o", tmp_path / "x", "--sign", offline / "root.key", code=2)
    facts = run_operation(home, "status", {})["keys"]
    assert (facts["revoked"], facts["root_version"]) == (1, 1)
    again = ("root", "make", "-o", tmp_path / "root-2", "--after", tmp_path / "root-1b")
    assert "exists" in run(*again, "--sign", offline / "root.key", code=2)
    idle = ("root", "make", "-o", tmp_path / "root-3", "--after", tmp_path / "root-1b")
    assert "signature would not count" in run(*idle, "--sign", offline / "signing.key", code=2)
    run("rotate", "--signing", "--home", home.root)
    run(*idle, "--coordinator", home.next_public, "--sign", offline / "root.key", "--sign", tmp_path / "second.key")
    told = run("root", "publish", tmp_path / "root-3", "--home", home.root)
    assert f"next: edgefl-coordinator rotate --signing --home {home.root}" in told
    assert f"edgefl-coordinator rotate --signing --home {home.root}" in run(
        "status", "--check", "--home", home.root, code=1
    )

"""Bundles over the sealed routes: index, fetch, what may be published (docs/security.md, model bundles, check 26)."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator import cli
from edgefl_coordinator.errors import NotAllowedError, OperatorError
from edgefl_coordinator.store import publishing
from edgefl_coordinator.store.audit_words import event_words
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.envelopes.key_files import signing_key_from_pem
from edgefl_protocol.envelopes.keys import SigningKey, generate_signing_key
from edgefl_protocol.errors import BundleError, RecordError
from edgefl_protocol.messages.key_messages import IndexReply
from edgefl_protocol.messages.requests import BroadcastRequest, BundleReply, BundleRequest, Refusal
from edgefl_protocol.records.coordinator_records import Index, verify_index
from edgefl_protocol.records.root import Root, make_root

pytestmark = pytest.mark.both_databases

BUNDLE_SIGNER = SigningKey(bytes(range(32))).public  # tests/vectors/bundles/README.md
BUNDLE = Path(__file__).parents[2] / "vectors" / "bundles" / "format1.edgefl"


def publish(coordinator: Any, line: str, version: int, data: bytes) -> None:
    blob = coordinator.store.put_blob(data)
    with coordinator.store.transaction() as connection:
        publishing.publish(
            connection, coordinator.clock(), line=line, task="nevus", version=version, bundle_id=line, blob=blob
        )


def index_of(member: Any) -> Index:
    record = IndexReply.from_payload(member.call("index", Payload())).index
    key = member.coordinator.keys.signing.public_key
    return verify_index(record, key, "skin", member.coordinator.clock())


def test_index_and_fetch(coordinator, clock, tools) -> None:
    """The signed index names the newest version of each line; the named bytes come back whole; it expires in a day."""
    member = tools.approved_member(coordinator, "clinic-a", "device")
    assert index_of(member).entries == ()
    for line, version in (("main", 1), ("main", 3), ("trial", 2)):
        publish(coordinator, line, version, f"{line}-{version}".encode() * 100_000)
    index = index_of(member)
    assert [(entry.line, entry.version) for entry in index.entries] == [("main", 3), ("trial", 2)]
    request = BundleRequest(line="main", task="nevus", version=3).to_payload()
    data = BundleReply.from_payload(member.call("bundle", request)).bundle
    assert data == b"main-3" * 100_000 and len(data) == index.current("main", "nevus").size
    record = IndexReply.from_payload(member.call("index", Payload())).index
    with pytest.raises(RecordError):
        verify_index(record, coordinator.keys.signing.public_key, "skin", clock.now_ms + 24 * 3_600_000 + 1)
    older = member.call("bundle", BundleRequest(line="main", task="nevus", version=1).to_payload())
    assert isinstance(older, Payload)  # older versions stay for whoever is in the middle of a pull
    missing = member.call("bundle", BundleRequest(line="main", task="nevus", version=9).to_payload())
    assert isinstance(missing, Refusal) and (missing.code, missing.status) == ("not_found", 404)


def test_versions_only_rise(coordinator) -> None:
    """Check 26, rollback: the same or a lower version is not published."""
    publish(coordinator, "main", 2, b"two")
    for version in (1, 2):
        with pytest.raises(OperatorError, match="not above version 2"):
            publish(coordinator, "main", version, b"again")


def test_the_same_bundle_again_is_called_published(coordinator, tools) -> None:
    """Not a version that has to be raised; it stays for members to fetch."""
    publish(coordinator, "main", 2, b"two")
    with pytest.raises(OperatorError, match="this very bundle is published already, as version 2 of main/nevus"):
        publish(coordinator, "main", 2, b"two")
    request = BundleRequest(line="main", task="nevus", version=2).to_payload()
    member = tools.approved_member(coordinator, "clinic-a", "device")
    assert BundleReply.from_payload(member.call("bundle", request)).bundle == b"two"


def test_a_check_that_was_forgotten_can_be_made_afterwards(make_coordinator) -> None:
    """`publish FILE` without --trust, then with it: the very bundle is checked and not refused as published already."""
    coordinator = make_coordinator(federation="demo")
    first = OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": []})
    assert (first["verified"], first["already"]) == (False, False)
    again = OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": [BUNDLE_SIGNER.hex()]})
    assert again == {**first, "verified": True, "already": True}
    with pytest.raises(BundleError, match="did not sign the bundle"):
        OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": ["11" * 32]})
    with pytest.raises(OperatorError, match="is published already"):
        OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": []})
    assert len(blob_names(coordinator.store)) == 1


def test_publishing_a_real_bundle(make_coordinator, folder) -> None:
    """A real bundle file is taken; a damaged one, an untrusted one and one of another federation are not."""
    with pytest.raises(OperatorError, match="federation demo"):
        OPERATIONS["publish"](make_coordinator("other"), {"path": str(BUNDLE), "trust": []})
    coordinator = make_coordinator(federation="demo")
    data = BUNDLE.read_bytes()
    facts = OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": []})
    assert (facts["bytes"], facts["verified"]) == (len(data), False)
    with pytest.raises(BundleError):
        OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": ["11" * 32]})
    cut = folder / "cut.edgefl"
    cut.write_bytes(data[:-10])
    with pytest.raises(BundleError):
        OPERATIONS["publish"](coordinator, {"path": str(cut), "trust": []})
    assert len(blob_names(coordinator.store)) == 1


CREATED_MS, EXPIRES_MS = 1_790_000_000_000, 1_800_000_000_000  # of BUNDLE: tests/vectors/bundles/make.py


@pytest.mark.parametrize("trust", [[], [BUNDLE_SIGNER.hex()]], ids=["unverified", "verified"])
def test_what_devices_would_refuse_by_its_dates_is_not_published(make_coordinator, clock, trust) -> None:
    """docs/security.md, model bundles: ten minutes ahead, and expired from the millisecond on."""
    coordinator = make_coordinator(federation="demo")
    for now_ms, code in ((CREATED_MS - 600_001, "from_future"), (EXPIRES_MS, "expired")):
        clock.now_ms = now_ms
        with pytest.raises(BundleError) as caught:
            OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": trust})
        assert caught.value.code == code and not blob_names(coordinator.store)
    clock.now_ms = CREATED_MS - 600_000
    assert OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": trust})["version"] == 3


@pytest.mark.parametrize(("bundle_of", "word"), [(None, "no federation"), ("another", "federation another")])
def test_a_bundle_of_another_federation_is_not_published(bundle_of, word, coordinator, tmp_path, monkeypatch) -> None:
    """No device of this federation could pull it, and its version number would be used up."""
    manifest = SimpleNamespace(federation=bundle_of, line="main", task="nevus", version=1)
    monkeypatch.setattr("edgefl_coordinator.web.bundle_operations.unverified_manifest", lambda data: (manifest, []))
    with pytest.raises(
        OperatorError, match=f"made for {word}, but this is the federation skin: export it with --federation skin"
    ):
        OPERATIONS["publish"](coordinator, {"path": str(BUNDLE), "trust": []})


def test_the_round_stands_in_header_and_payload(coordinator, tools) -> None:
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    refused = member.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=2)
    assert isinstance(refused, Refusal) and refused.code == "bad_message"


def test_without_the_extra(monkeypatch, tmp_path) -> None:
    """docs/design.md 2: without its extra a command exits 2 with one sentence."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sqlalchemy" else find(name))
    result = CliRunner().invoke(cli.main, ["status", "--home", str(tmp_path)])
    assert result.exit_code == 2 and "edgefl-derm[coordinator]" in result.stderr


def test_the_only_signer_is_not_revoked_by_accident(coordinator, tools) -> None:
    """docs/guides/federation.md 8: refused with what falls and for how many; nothing was changed; --force does it."""
    good, stolen = "a" * 64, "b" * 64
    for name, role in (("clinic-a", "device"), ("clinic-b", "device"), ("hospital", "site")):
        tools.approved_member(coordinator, name, role)

    def signed(line: str, version: int, *signers: str) -> None:
        blob = coordinator.store.put_blob(f"{line} {version}".encode())
        with coordinator.store.transaction() as connection:
            publishing.publish(connection, 0, line=line, task="nevus", version=version, bundle_id="x", blob=blob,
                               signers=signers)  # fmt: skip

    def revoke(**more: bool) -> dict[str, Any]:
        return dict(OPERATIONS["revoke_signer"](coordinator, {"key_id": stolen, **more}))

    signed("main", 2, stolen)
    signed("trial", 1, stolen)
    signed("trial", 2, good)
    before = OPERATIONS["audit"](coordinator, {})
    with pytest.raises(
        NotAllowedError, match=r"main/nevus version 2, and .* 2 devices would stop .*--force"
    ) as refused:
        revoke()
    assert "trial" not in str(refused.value)
    status = OPERATIONS["status"](coordinator, {})
    assert OPERATIONS["audit"](coordinator, {}) == before and status["keys"]["revoked"] == 0
    told = revoke(force=True)
    assert told["bundles"] == [{"line": "main", "task": "nevus", "version": 2}] and told["devices"] == 2
    signed("main", 3, good)
    assert revoke()["bundles"] == []  # another took its place
    (row,) = [one for one in OPERATIONS["log"](coordinator, {"from_ms": 0, "most": 99})["shown"]
              if one["event"] == "key_revoked"]  # fmt: skip
    assert event_words("key_revoked", row["subject"], row["detail"]) == f"the key {stolen} of a signer was revoked"


def signed_by(coordinator: Any, version: int, signer: Any) -> None:
    blob = coordinator.store.put_blob(f"version {version}".encode())
    with coordinator.store.transaction() as connection:
        publishing.publish(connection, 0, line="main", task="nevus", version=version, bundle_id="x", blob=blob,
                           signers=[signer.key_id])  # fmt: skip


def publish_root(coordinator: Any, version: int, *signers: Any) -> None:
    key = signing_key_from_pem((coordinator.store.home.keys / "root.key").read_bytes())
    now_ms, path = coordinator.clock(), coordinator.store.home.root / f"root-{version}"
    keys = {"root_keys": (key.public_key,), "coordinators": (coordinator.keys.signing.public_key,)}
    times = {"issued_ms": now_ms, "expires_ms": now_ms + 1_000_000}
    root = Root(federation="skin", version=version, threshold=1, **times, **keys, signers=signers)
    path.write_bytes(make_root(root, [key]))
    OPERATIONS["publish_root"](coordinator, {"path": str(path)})


def test_the_remedy_for_a_stolen_key_needs_a_bundle_that_members_take(coordinator, tools) -> None:
    """docs/guides/federation.md 8: a bundle of a signer whom the root set does not list is none that devices take
    (docs/security.md 2.6.6), so it neither counts as one in the place of another, nor stands in `status` as a good one.
    """
    tools.approved_member(coordinator, "clinic-a", "device")
    stolen, other = (generate_signing_key().public_key for _ in range(2))

    def revoke() -> dict[str, Any]:
        return dict(OPERATIONS["revoke_signer"](coordinator, {"key_id": stolen.key_id}))

    def told() -> str | None:
        (bundle,) = OPERATIONS["status"](coordinator, {})["bundles"]
        return bundle["not_taken"]

    signed_by(coordinator, 1, stolen)
    assert told() == "no root set is published"
    publish_root(coordinator, 1, stolen)
    assert told() is None
    signed_by(coordinator, 4, other)
    assert told() == "root set 1 lists 0 of its signers, and 1 must have signed"
    with pytest.raises(NotAllowedError, match=r"main/nevus version 1, .* 1 device would stop"):
        revoke()
    publish_root(coordinator, 2, stolen, other)
    assert told() is None
    done = revoke()
    assert (done["bundles"], done["devices"], done["known"]) == ([], 0, True)
    assert told() is None
    unused = OPERATIONS["revoke_signer"](coordinator, {"key_id": generate_signing_key().public_key.key_id})
    assert unused["known"] is False


def test_what_the_commands_say_of_signers(make_coordinator, tmp_path) -> None:
    """`publish` warns of a bundle that members do not take, and names who signed one that --trust does not fit;
    `status` shows it; `revoke --signer` remarks on a key that nothing names."""
    coordinator = make_coordinator(federation="demo")
    home = coordinator.store.home.root
    coordinator.store.close()
    (tmp_path / "other.pub").write_text(generate_signing_key().public.hex())

    def run(*words: object) -> Any:
        return CliRunner().invoke(cli.main, [*map(str, words), "--home", str(home)])

    refused = run("publish", BUNDLE, "--trust", tmp_path / "other.pub")
    assert refused.exit_code == 3 and "--trust did not sign" in refused.stderr and "trust add" not in refused.stderr
    done = run("publish", BUNDLE)
    assert done.exit_code == 0 and "warning: no root set is published, so members take it only where" in done.stderr
    assert ": no root set is published, so members take it only where" in run("status").stdout
    assert "was another key meant?" in run("revoke", "--signer", tmp_path / "other.pub").stderr


def test_without_a_device_none_stops_scoring(coordinator) -> None:
    """Nobody is counted who is not there: neither "0 devices" nor a device."""
    signer = "b" * 64
    blob = coordinator.store.put_blob(b"bundle")
    with coordinator.store.transaction() as connection:
        named = {"line": "main", "task": "nevus", "version": 1, "bundle_id": "x"}
        publishing.publish(connection, 0, **named, blob=blob, signers=[signer])
    with pytest.raises(NotAllowedError, match="no device could fetch one; first publish"):
        OPERATIONS["revoke_signer"](coordinator, {"key_id": signer})

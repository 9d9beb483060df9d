"""Whose bundles a device takes: by hand, by the root set, never the revoked; names of python-tuf's where they fit.

Source: docs/security.md 2.6.5, 2.6.6 and 2.8, checks 24 and 26; TUF, mix-and-match and fast-forward attacks.
"""

import json

import pytest

from edgefl_client.home import Home
from edgefl_client.trust import models
from edgefl_protocol import SigningKey
from edgefl_protocol.records.invite import encode_invite
from edgefl_protocol.records.revocation import make_revoked
from edgefl_protocol.records.root import Root, make_root

ROOT = SigningKey(b"r" * 32)
THIEF = SigningKey(b"t" * 32)
OTHER = SigningKey(b"o" * 32)
DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def rooted(run, live, lab, labelled):
    """Enrolled and approved under an invite that pins the root key; nobody is trusted by hand."""
    live.root_key_id = ROOT.key_id
    assert run("enrol", encode_invite(live.invite(), live.now_ms))[0] == 0
    live.approve()
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    return labelled


@pytest.fixture
def publish_root(live, lab):
    def publish(*signers, keys=(ROOT,), **changes):
        fields = {
            "federation": "skin", "version": len(live.roots) + 1, "issued_ms": live.now_ms,
            "expires_ms": live.now_ms + 365 * DAY_MS, "root_keys": (ROOT.public_key,),
            "coordinators": (live.signing.public_key,), "signers": tuple(key.public_key for key in signers), **changes,
        }  # fmt: skip
        live.roots.append(make_root(Root(**fields), keys))

    return publish


def version_in_use(run, folder):
    code, out, _ = run("score", folder / "0.png", "--json")
    return json.loads(out)["model"]["version"] if code == 0 else None


def test_a_signer_of_the_root_set_needs_no_hand(run, rooted, live, lab, publish_root):
    """docs/security.md check 26: bundle signers count when the root-signed set lists them; no trust on first use."""
    code, _, err = run("pull")  # for most owners the operator mends it, not a key compared by hand
    assert (
        code == 3 and "published no root set" in err and "ask the operator to publish one, then run edgefl sync" in err
    )
    assert "edgefl trust add" in err and "ask the operator to publish a root set" in run("doctor", "--offline")[1]
    publish_root(OTHER)
    code, _, err = run("pull")
    assert code == 3 and lab.SIGNER.key_id in err
    publish_root(OTHER, lab.SIGNER)
    assert run("pull")[0] == 0
    assert version_in_use(run, rooted) == 1
    told = json.loads(run("trust", "list", "--json")[1])
    assert told["keys"] == told["revoked"] == []
    assert {one["key_id"] for one in told["root_set"]} == {OTHER.key_id, lab.SIGNER.key_id}
    assert json.loads(run("status", "--json", "--offline")[1])["trusted_signers"] == 2


def test_new_targets_unsigned(run, rooted, live, lab, publish_root):
    """docs/security.md check 26: a signer that the newest set leaves out counts no more, for the one in use neither."""
    publish_root(lab.SIGNER)
    assert run("pull")[0] == 0
    publish_root(OTHER)
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    assert run("pull")[0] == 3
    code, _, err = run("score", rooted / "0.png")
    assert code == 3 and "edgefl trust add" in err
    live.bundles["main", "all", 3] = lab.bundle_bytes(version=3, signer=OTHER)
    assert run("pull")[0] == 0 and version_in_use(run, rooted) == 3


@pytest.mark.parametrize("signed", [(), (OTHER,), (THIEF,)], ids=["nobody", "another key", "a thief"])
def test_trusted_root_unsigned(run, rooted, live, lab, publish_root, signed):
    """docs/security.md check 26: a set that the pinned root key did not sign adds no signer."""
    keys = signed or (THIEF,)
    publish_root(lab.SIGNER, keys=keys, root_keys=tuple(key.public_key for key in keys))
    assert run("pull")[0] == 3


def test_threshold_of_signers_not_reached(run, rooted, live, lab, publish_root):
    """docs/security.md check 26: threshold k-1: one signature of the two that the federation asks for."""
    publish_root(lab.SIGNER, OTHER, signer_threshold=2)
    code, _, err = run("pull")
    assert code == 3 and "asks for 2" in err
    from edgefl_protocol.bundle.archive import read_archive, write_archive
    from edgefl_protocol.bundle.manifest import SIGNING_LABEL, Signature, parse_signatures, write_signatures

    members = read_archive(live.bundles["main", "all", 1])
    one = parse_signatures(members["signatures.json"])[0]
    second = Signature(OTHER.key_id, "ed25519", OTHER.sign(SIGNING_LABEL, members["manifest.json"]))
    members["signatures.json"] = write_signatures(sorted([one, second], key=lambda found: found.keyid))
    live.bundles["main", "all", 1] = write_archive(members)
    assert run("pull")[0] == 0


def test_the_root_set_speaks_for_its_federation_alone(run, rooted, lab, publish_root, tmp_path):
    """docs/security.md 2.6.6: a bundle for nobody in particular needs a signer that the owner added by hand."""
    publish_root(lab.SIGNER)
    assert run("pull")[0] == 0
    (tmp_path / "free.edgefl").write_bytes(lab.bundle_bytes(federation=None))
    code, _, err = run("score", rooted / "0.png", "--model", tmp_path / "free.edgefl")
    assert code == 3 and "for the federation skin only" in err
    assert (
        run("score", rooted / "0.png", "--model", tmp_path / "free.edgefl", "--trust", lab.SIGNER.public.hex())[0] == 0
    )


def test_new_targets_fast_forward_recovery(run, rooted, live, lab, publish_root):
    """docs/security.md check 26: a thief's highest number binds nobody once the root set leaves its key out."""
    publish_root(lab.SIGNER, THIEF)
    assert run("pull")[0] == 0
    live.bundles["main", "all", 2**31] = lab.bundle_bytes(version=2**31, signer=THIEF)
    assert run("pull")[0] == 0 and version_in_use(run, rooted) == 2**31
    del live.bundles["main", "all", 2**31]
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    assert run("pull")[0] == 3  # no rollback while the thief's key counts
    publish_root(lab.SIGNER)
    assert run("pull")[0] == 0 and version_in_use(run, rooted) == 2
    assert models.last_seen(Home(run.home), {lab.SIGNER.key_id}) == {("skin", "main", "all"): 2}
    del live.bundles["main", "all", 2]  # and the honest signer's own numbers still never fall
    assert run("pull")[0] == 3


def test_a_revoked_signer_counts_nowhere(run, device, live, lab):
    """docs/security.md check 24: also one that was added by hand, for new bundles and for the one in use."""
    assert run("pull")[0] == 0 and version_in_use(run, device) == 1
    live.revoked = [lab.SIGNER.key_id]
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    code, _, err = run("pull")
    assert code == 3 and "revoked" in err
    assert json.loads(run("trust", "list", "--json")[1])["revoked"] == [lab.SIGNER.key_id]
    assert "REVOKED" in run("trust", "list")[1]
    code, out, err = run("score", device / "0.png")
    assert (code, out) == (3, "") and "revoked" in err
    assert run("trust", "add", OTHER.public.hex())[0] == 0
    live.bundles["main", "all", 3] = lab.bundle_bytes(version=3, signer=OTHER)
    assert run("pull")[0] == 0 and version_in_use(run, device) == 3


def test_revocation_allows_no_rollback_of_others(run, device, live, lab):
    """docs/security.md check 26: a coordinator that was taken over revokes one signer: another's numbers still hold."""
    run("trust", "add", OTHER.public.hex())
    live.bundles["main", "all", 5] = lab.bundle_bytes(version=5, signer=OTHER)
    assert run("pull")[0] == 0
    live.bundles["main", "all", 6] = lab.bundle_bytes(version=6)
    assert run("pull")[0] == 0
    live.revoked = [lab.SIGNER.key_id]
    for key in (("main", "all", 5), ("main", "all", 6), ("main", "all", 1)):
        live.bundles.pop(key, None)
    live.bundles["main", "all", 4] = lab.bundle_bytes(version=4, signer=OTHER)
    code, _, err = run("pull")
    assert code == 3 and "version 5" in err


def test_a_revocation_reaches_a_device_that_only_syncs(run, device, live, lab):
    """docs/security.md check 24: `sync` fetches the list each time, with the index of bundles."""
    assert run("pull")[0] == 0
    live.revoked = [lab.SIGNER.key_id]
    del live.bundles["main", "all", 1]  # the coordinator's index names it no more
    code, out, err = run("sync")
    assert code == 3 and "round" in out
    assert "the model in use was revoked by the federation, and no other is published" in err
    code, _, err = run("score", device / "0.png")
    assert code == 3 and "revoked" in err
    assert "revoked by the federation: this device cannot score" in run("status")[1]  # not as a model in order
    assert json.loads(run("status", "--json", "--offline")[1])["model"]["revoked"] is True


@pytest.mark.parametrize(("age_h", "taken"), [(23, True), (25, False)])
def test_freeze_by_an_old_list_of_revoked_keys(run, device, live, lab, age_h, taken):
    """docs/security.md check 24: a list older than 24 h: no new bundle, the sentence says why, scoring goes on."""
    assert run("pull")[0] == 0
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    issued_ms = live.now_ms - age_h * 3_600_000
    live.revoked_record = make_revoked(live.signing, "skin", 1, [], issued_ms, issued_ms + DAY_MS)
    code, out, err = run("pull")
    if taken:
        assert code == 0 and version_in_use(run, device) == 2
    else:
        assert (code, out) == (3, "") and "revoked keys is older than 24 hours" in err and len(err.splitlines()) == 1
        assert version_in_use(run, device) == 1


def test_a_file_put_in_by_hand_is_judged_by_the_newest_list_there_is(run, device, live, lab, tmp_path):
    """docs/security.md check 24: `edgefl use` asks nobody, so an old list is not refused; whom it names is."""
    assert run("trust", "add", OTHER.public.hex())[0] == 0
    live.revoked = [OTHER.key_id]
    assert run("pull")[0] == 0
    live.now_ms += 2 * DAY_MS
    for version, signer, code in ((2, OTHER, 3), (3, lab.SIGNER, 0)):
        (tmp_path / "carried.edgefl").write_bytes(lab.bundle_bytes(version=version, signer=signer))
        assert run("use", tmp_path / "carried.edgefl")[0] == code
    assert version_in_use(run, device) == 3


def test_new_snapshot_hash_mismatch(run, device, live, lab, monkeypatch):
    """docs/security.md check 26, mix-and-match: the index of one moment with the bundle of another: not taken."""
    assert run("pull")[0] == 0
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    other = lab.bundle_bytes(version=2, refer_above=0.5)
    genuine = live._bundle

    def swapped(skid, opened, payload):
        from edgefl_protocol.messages.requests import BundleReply

        genuine(skid, opened, payload)
        return BundleReply(bundle=other).to_payload()

    monkeypatch.setattr(live, "_bundle", swapped)
    code, _, err = run("pull")
    assert code == 3 and "signed index" in err and version_in_use(run, device) == 1


def test_damaged_vouching_files_are_sentences(run, rooted, live, lab, publish_root):
    """docs/security.md check 60: root set and list cut at every 64th byte: typed, never another signer."""
    publish_root(lab.SIGNER)
    assert run("pull")[0] == 0
    home = Home(run.home)
    for name in ("root.record", "revoked.record"):
        path = run.home / "member" / name
        data = path.read_bytes()
        for cut in range(0, len(data), 64):
            path.write_bytes(data[:cut])
            code, out, err = run("score", rooted / "0.png")
            assert (code, out) == (1, "") and "damaged" in err and len(err.splitlines()) == 1
        path.write_bytes(data)
    assert version_in_use(run, rooted) == 1 and home.current_file.exists()


@pytest.mark.parametrize("name", ["trust.json", "member/root.record", "member/revoked.record"])
def test_what_cannot_be_reached_is_not_taken_for_missing(run, device, live, lab, publish_root, name):
    """docs/security.md 2.6.5: a list behind a broken folder may name the very signer: no score, and one sentence."""
    live.root_key_id = ROOT.key_id
    assert run("pull")[0] == 0 and version_in_use(run, device) == 1
    path = run.home / name
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)  # a link to itself, which even root cannot follow
    code, out, err = run("score", device / "0.png")
    assert (code, out, len(err.splitlines())) == (1, "", 1) and str(path) in err


def test_rotate_by_hand_and_by_sync(run, device, live):
    """docs/guides/federation.md, keys over time: `edgefl rotate`; `sync` changes keys of 30 days."""
    assert json.loads(run("sync", "--json")[1])["keys_changed"] is False
    before = json.loads(run("status", "--json", "--offline")[1])["membership"]["fingerprint"]
    code, out, _ = run("rotate", "--json")
    assert code == 0 and json.loads(out)["fingerprint"] != before
    assert json.loads(run("status", "--json")[1])["membership"]["fingerprint"] == json.loads(out)["fingerprint"]
    record = json.loads((run.home / "member" / "membership.json").read_text())
    record["keys_made_ms"] = live.now_ms - 30 * DAY_MS
    (run.home / "member" / "membership.json").write_text(json.dumps(record))
    assert json.loads(run("sync", "--json")[1])["keys_changed"] is True
    assert json.loads(run("sync", "--json")[1])["keys_changed"] is False

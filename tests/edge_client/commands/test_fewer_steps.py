"""From nothing to a score and to a contribution in few commands: `use`, `sync` that fetches, `contribute --send`.

Source: docs/guides/first-steps.md; docs/security.md 2.6.1, 2.6.6 and 2.8, checks 21, 26 and 33.
"""

import dataclasses
import datetime
import hashlib
import json
import ssl
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from edgefl_client.cli import advanced, cli
from edgefl_client.home import Home
from edgefl_client.trust import models
from edgefl_coordinator.web.tls import make_development_certificate
from edgefl_protocol import Payload, SigningKey
from edgefl_protocol.messages.requests import Refusal
from edgefl_protocol.records.invite import encode_invite
from edgefl_protocol.records.root import Root, make_root

ROOT, OTHER = SigningKey(b"r" * 32), SigningKey(b"o" * 32)


def version_in_use(run, folder):
    code, out, _ = run("score", folder / "0.png", "--json")
    return json.loads(out)["model"]["version"] if code == 0 else None


@pytest.fixture
def file(lab, tmp_path):
    """A bundle of no federation, as it comes on a stick."""

    def make(name="a.edgefl", **options):
        path = tmp_path / name
        path.write_bytes(lab.bundle_bytes(**{"federation": None, **options}))
        return path

    return make


# use


def test_a_bundle_is_in_use_after_one_command(run, labelled, lab, file):
    """Its signer is named with it, as with `trust add`; from then on no option is needed."""
    code, out, _ = run("use", file(), "--trust", lab.SIGNER.public.hex(), "--json")
    told = json.loads(out)
    assert code == 0 and told["changed"] and told["signers"] == [lab.SIGNER.key_id]
    assert version_in_use(run, labelled) == 1
    assert json.loads(run("use", file(), "--json")[1])["changed"] is False
    assert [key["key_id"] for key in json.loads(run("trust", "list", "--json")[1])["keys"]] == [lab.SIGNER.key_id]


@pytest.mark.parametrize(("federation", "name"), [(None, "main/all"), ("skin", "skin/main/all")])
def test_status_and_doctor_name_the_model_in_use(run, lab, file, federation, name):
    """Two models of version 1 are told apart; where there is no federation, none is named."""
    assert run("use", file(version=4, federation=federation), "--trust", lab.SIGNER.public.hex())[0] == 0
    said = run("status", "--offline")[1]
    assert f"model: {name} version 4, published " in said and "-/" not in said
    model = json.loads(run("status", "--offline", "--json")[1])["model"]
    assert (model["name"], model["id"]) == (name, f"{federation or '-'}/main/all")
    assert model["classes"] == list(lab.CLASSES) and f"classes: {', '.join(lab.CLASSES[:-1])}" in said
    assert f"{name} version 4 scores a drawn picture" in run("doctor", "--offline", "--no-measure")[1]


def test_a_signer_without_a_name_is_listed_once(run, lab, file):
    """Who names no signer reads its key id, whole and once; a name stands before it."""
    key_id = lab.SIGNER.key_id
    assert run("use", file(), "--trust", lab.SIGNER.public.hex())[0] == 0
    assert run("trust", "list")[1].count(key_id[:16]) == 1
    assert run("trust", "add", lab.SIGNER.public.hex(), "--name", "lab")[0] == 0
    assert run("trust", "list")[1].startswith(f"lab  {key_id}  added ")


def test_there_is_no_trust_on_first_use(run, labelled, lab, file):
    """docs/security.md 2.6.6: a file brings no trust of its own, and a refused one leaves none behind."""
    code, out, err = run("use", file())
    assert (code, out) == (3, "") and lab.SIGNER.key_id in err
    code, _, err = run("use", file(), "--trust", OTHER.public.hex())
    assert code == 3 and lab.SIGNER.key_id in err
    assert json.loads(run("trust", "list", "--json")[1])["keys"] == [] and version_in_use(run, labelled) is None


def test_an_older_version_is_refused_offline_too(run, labelled, lab, file):
    """docs/security.md check 26: the highest version seen of a line binds, whoever brings the file."""
    assert run("use", file(version=3), "--trust", lab.SIGNER.public.hex())[0] == 0
    assert run("use", file("old.edgefl", version=2))[0] == 3
    assert version_in_use(run, labelled) == 3
    out = run("use", file("new.edgefl", version=4))[1]
    assert "version 3, to which this device never goes back" in out and version_in_use(run, labelled) == 4


def test_a_person_may_change_to_another_line_and_not_back_in_time(run, labelled, lab, file):
    """`use` is a choice, unlike an update; each line keeps its highest version."""
    assert run("use", file(version=3), "--trust", lab.SIGNER.public.hex())[0] == 0
    out = run("use", file("night.edgefl", line="night"))[1]
    assert "it replaces main/all version 3, which is no longer kept here: to go back, edgefl use with its file" in out
    assert run("use", file("old.edgefl", version=2))[0] == 3
    assert run("use", file(version=3))[0] == 0 and version_in_use(run, labelled) == 3


@pytest.mark.parametrize("federation", [None, "other"])
def test_a_member_uses_its_federations_bundles_only(run, device, lab, file, federation):
    assert run("sync")[0] == 0
    code, _, err = run("use", file(federation=federation, version=9))
    assert code == 3 and "--model FILE" in err
    assert run("use", file(federation="skin", version=9))[0] == 0 and version_in_use(run, device) == 9
    assert run("use", file("line.edgefl", federation="skin", line="night", version=10))[0] == 3


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"PK\x05\x06" + bytes(18)])
def test_what_is_no_bundle_is_one_sentence(run, tmp_path, content):
    (tmp_path / "x.edgefl").write_bytes(content)
    code, out, err = run("use", tmp_path / "x.edgefl")
    assert (code, out) == (3, "") and err.count("\n") == 1
    assert run("use", tmp_path / "none.edgefl")[0] == 1


def test_a_graph_that_does_not_load_is_not_put_into_use(run, labelled, lab, file, monkeypatch):
    """docs/security.md check 33: what cannot score must not take the place of what can."""
    from edgefl_client.scoring import network
    from edgefl_protocol.errors import BundleError

    assert run("use", file(), "--trust", lab.SIGNER.public.hex())[0] == 0

    def cannot(*_, **__):
        raise BundleError("the graph cannot be loaded", "graph_load")

    with monkeypatch.context() as broken:
        broken.setattr(network.Network, "__init__", cannot)
        assert run("use", file("b.edgefl", version=2))[0] == 1
    assert version_in_use(run, labelled) == 1


# sync


def test_sync_brings_the_model(run, device, live, lab):
    """Once, and a newer one when there is one."""
    told = json.loads(run("sync", "--json")[1])["bundle"]
    assert (told["changed"], told["version"]) == (True, 1) and version_in_use(run, device) == 1
    assert json.loads(run("sync", "--json")[1])["bundle"]["changed"] is False
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2)
    assert "version 2 is now in use" in run("sync")[1] and version_in_use(run, device) == 2


def test_sync_without_a_published_model_is_no_failure(run, device, live):
    live.bundles.clear()
    code, out, _ = run("sync", "--json")
    assert code == 0 and json.loads(out)["bundle"] is None


@pytest.mark.parametrize("words", [("sync",), ("sync", "--labels", "labels.csv")])
def test_a_member_is_told_that_no_model_is_published(run, device, live, words):
    """Its operator has to act; it can neither install one nor join."""
    live.bundles.clear()
    live.broadcasts[1] = Payload({}, {})
    code, out, err = run(*words)
    assert code == 0 and out.count("the operator has published no model yet") == 1 and "edgefl use" not in out + err
    code, out, err = run("score", "0.png")
    assert code == 1 and "once its operator has published one" in err and "edgefl enrol" not in err


def test_a_bundle_that_is_refused_keeps_nothing_else_back(run, device, live, lab):
    """docs/security.md check 26: what waits is sent, the model in use stays, and the refusal is said: 3."""
    assert run("sync")[0] == 0
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    live.bundles["main", "all", 2] = lab.bundle_bytes(version=2, signer=OTHER)
    code, out, err = run("sync", "--json")
    report = json.loads(out)
    assert code == 3 and [one["outcome"] for one in report["sent"]] == ["accepted"]
    assert report["bundle"]["error"]["message"] in err and version_in_use(run, device) == 1


def test_a_model_of_ones_own_gives_way_to_the_federations(run, live, lab, labelled, file):
    """A model that was tried before joining is no obstacle; the federation's own line is kept from then on."""
    assert run("use", file(version=7), "--trust", lab.SIGNER.public.hex())[0] == 0
    assert run("enrol", encode_invite(live.invite(), live.now_ms))[0] == 0
    live.approve()
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    assert run("sync")[0] == 0 and version_in_use(run, labelled) == 1
    assert models.last_seen(Home(run.home))["skin", "main", "all"] == 1


def root_set(live, lab, key) -> bytes:
    """A root set of the federation, signed by a root key, with the signer of the test bundles."""
    fields = {
        "federation": "skin", "version": 1, "issued_ms": live.now_ms, "expires_ms": live.now_ms + 86_400_000,
        "root_keys": (key.public_key,), "coordinators": (live.signing.public_key,),
        "signers": (lab.SIGNER.public_key,),
    }  # fmt: skip
    return make_root(Root(**fields), [key])


def test_the_root_set_names_the_signers(run, live, lab, labelled):
    """docs/security.md 2.6.6: enrol, sync, score; no `trust add`: the root key that the invite pins has signed."""
    live.root_key_id = ROOT.key_id
    live.roots.append(root_set(live, lab, ROOT))
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    assert run("enrol", encode_invite(live.invite(), live.now_ms))[0] == 0
    live.approve()
    assert run("sync")[0] == 0 and version_in_use(run, labelled) == 1
    assert json.loads(run("trust", "list", "--json")[1])["keys"] == []


def test_a_root_set_of_another_root_key_counts_nothing(run, live, lab, labelled):
    """docs/security.md 2.6.1: a coordinator that hands out a set of its own makes nobody trusted."""
    live.root_key_id = ROOT.key_id
    live.roots.append(root_set(live, lab, OTHER))
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    assert run("enrol", encode_invite(live.invite(), live.now_ms))[0] == 0
    live.approve()
    assert run("sync")[0] == 3 and version_in_use(run, labelled) is None


# contribute --send


def test_a_contribution_is_sent_at_once(run, device, live):
    assert run("sync")[0] == 0
    code, out, _ = run("contribute", "--labels", device / "labels.csv", "--send", "--json")
    report = json.loads(out)
    assert code == 0 and [one["outcome"] for one in report["sync"]["sent"]] == ["accepted"]
    assert len(live.effects) == 1 and json.loads(run("status", "--json")[1])["waiting"] == 0


def test_what_the_owner_did_not_allow_is_not_sent(run, device, live):
    """docs/security.md 4: `--send` asks the policy as `sync` does; 3."""
    assert run("sync")[0] == 0 and run("policy", "deny", "maps")[0] == 0
    code, _, err = run("contribute", "--labels", device / "labels.csv", "--send")
    assert code == 3 and live.effects == [] and "policy" in err


def test_what_cannot_be_sent_now_waits(run, device, live):
    assert run("sync")[0] == 0
    live.refuse["task"] = Refusal(code="busy", message="later")
    code, out, err = run("contribute", "--labels", device / "labels.csv", "--send")
    assert code == 1 and "in the outbox" in out and "later" in err
    live.refuse.clear()
    assert json.loads(run("sync", "--json")[1])["sent"][0]["outcome"] == "accepted" and len(live.effects) == 1


def test_a_dry_run_sends_nothing(run, device, live):
    code, _, err = run("contribute", "--labels", device / "labels.csv", "--send", "--dry-run")
    assert code == 2 and "--dry-run" in err and live.effects == []


# The certificate in the invite


@pytest.fixture(scope="module")
def authorities():
    """Two authorities as `edgefl-coordinator init` makes them, PEM."""
    now = datetime.datetime.now(datetime.UTC)
    return [make_development_certificate([], now).ca.decode() for _ in range(2)]


@pytest.fixture(scope="module")
def der(authorities):
    return ssl.PEM_cert_to_DER_cert(authorities[0])


def carrying(invite, der):
    return dataclasses.replace(invite, certificate=der, tls_sha256=hashlib.sha256(der).hexdigest())


def test_enrol_needs_no_file_beside_the_invite(run, live, der):
    """docs/security.md 2.6.1: from then on exactly that certificate is trusted for this coordinator."""
    assert run("enrol", encode_invite(carrying(live.invite(), der), live.now_ms))[0] == 0
    kept = (run.home / "member/ca.pem").read_text()
    assert ssl.PEM_cert_to_DER_cert(kept) == der and kept.count("BEGIN") == 1
    assert json.loads((run.home / "member/membership.json").read_text())["own_ca"] is True


def test_a_file_given_beside_it_must_be_the_same(run, live, der, authorities, tmp_path):
    """`--ca` is checked, not ignored: who names another file is told."""
    text = encode_invite(carrying(live.invite(), der), live.now_ms)
    (tmp_path / "ca.pem").write_text(authorities[1])
    code, _, err = run("enrol", text, "--ca", tmp_path / "ca.pem")
    assert code == 3 and "that the invite names" in err and not (run.home / "member/ca.pem").exists()
    (tmp_path / "ca.pem").write_text(authorities[1] + authorities[0])
    assert run("enrol", text, "--ca", tmp_path / "ca.pem")[0] == 0


def test_an_invite_from_before_works_with_the_file(run, live, der, authorities, tmp_path):
    """It holds the certificate's hash alone; without the file, one sentence says what to do."""
    pinned = live.invite(tls_sha256=hashlib.sha256(der).hexdigest())
    text = encode_invite(pinned, live.now_ms)
    code, out, err = run("enrol", text)
    assert (code, out) == (3, "") and "--ca FILE" in err and err.count("\n") == 1
    (tmp_path / "ca.pem").write_text(authorities[0])
    assert run("enrol", text, "--ca", tmp_path / "ca.pem")[0] == 0


def test_a_cut_invite_says_so(run, live, der):
    text = encode_invite(carrying(live.invite(), der), live.now_ms)
    for cut in (text[:-1], text[: len(text) // 2], text + "A" * 9000):
        code, out, err = run("enrol", cut)
        assert (code, out) == (1, "") and "invite" in err and err.count("\n") == 1


def test_an_invite_may_be_a_file(run, live, der, tmp_path):
    """`edgefl enrol clinic-1.invite`: what a person types first; a name without a file stays a bad invite."""
    file = tmp_path / "clinic-1.invite"
    code, _, err = run("enrol", file)
    assert code == 1 and f"there is no file {file}, and an invite starts with efl1-" in err
    file.write_text("\n")
    code, _, err = run("enrol", file)
    assert code == 1 and f"{file} is empty" in err
    file.write_text(encode_invite(carrying(live.invite(), der), live.now_ms) + "\n")
    code, out, _ = run("enrol", file)
    assert code == 0 and "is pending in skin" in out and ", pending\n" in run("status")[1]


# enrol --wait


@pytest.fixture
def approving(live, monkeypatch):
    """The operator approves while the device waits for the third time; what was waited, in seconds."""
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            live.approve()

    monkeypatch.setattr("edgefl_client.sharing.sync.time", SimpleNamespace(sleep=sleep))
    return waited


def test_enrol_waits_and_brings_the_model(run, live, invite, lab, labelled, approving):
    """One command from the invite to a device that scores; the fingerprint is told before it waits."""
    live.bundles["main", "all", 1] = lab.bundle_bytes()
    assert run("trust", "add", lab.SIGNER.public.hex())[0] == 0
    code, out, err = run("enrol", invite, "--wait")
    assert code == 0 and "fingerprint" in out.splitlines()[0] and "version 1 is now in use" in out.splitlines()[3]
    assert "Waiting" in err and len(approving) == 3
    assert version_in_use(run, labelled) == 1


def test_waiting_outlasts_a_line_that_is_cut(run, live, invite, net, approving):
    inner, cut = live.send, []

    def send(request):
        if len(approving) == 1 and not cut:
            cut.append(request)
            return net.lost_request(request, inner)
        return inner(request)

    live.send = send
    code, out, err = run("enrol", invite, "--wait", "--json")
    told = json.loads(out)
    assert code == 0 and told["state"] == "approved" and told["fingerprint"] in err and cut


def test_a_device_that_is_shut_out_does_not_wait(run, live, invite, approving):
    """docs/security.md check 21: a refusal is an answer."""
    live.refuse["task"] = Refusal(code="revoked", message="this member is revoked")
    assert run("enrol", invite, "--wait")[0] in (1, 3) and approving == []


def test_waiting_ends_for_a_device_whose_keys_count_no_more(run, live, invite, monkeypatch):
    """Shut out while pending, it reads an unsigned 401 for ever (docs/security.md, order of checks): after a few
    questions with growing waits there is one sentence. One such answer between others ends nothing."""
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 1:
            live.keys, live.members = live.members, {}
        elif len(waited) == 2:
            live.members = live.keys
        elif len(waited) == 3:
            live.members = {}

    monkeypatch.setattr("edgefl_client.sharing.sync.time", SimpleNamespace(sleep=sleep))
    code, _, err = run("enrol", invite, "--wait")
    last = err.splitlines()[-1]
    assert code == 1 and "ask its operator whether the device was shut out" in last
    assert waited == [5.0, 10.0, 20.0, 30.0, 30.0, 30.0]
    assert "pending when the coordinator last said so" in run("status")[1]


# advanced


@pytest.mark.parametrize("name", ["outbox", "personal", "pull", "rotate"])
def test_rare_commands_have_their_old_names_too(name):
    """docs/design.md 5: scripts go on; the list of commands does not show them twice."""
    shown = CliRunner().invoke(cli, ["--help"]).output
    assert f"\n  {name} " not in shown and "\n  advanced " in shown
    assert name in advanced.commands
    for words in ([name], ["advanced", name]):
        result = CliRunner().invoke(cli, [*words, "--help"])
        assert result.exit_code == 0 and "Usage:" in result.output

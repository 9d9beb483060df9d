"""`edgefl contribute`: what becomes a map, under which class, and what is left out."""

import dataclasses
import datetime
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from edgefl_client.commands.train import _membership
from edgefl_client.home import Home
from edgefl_client.scoring.pictures import PictureReader
from edgefl_client.sharing.policy import Policy, save_policy
from edgefl_client.trust.trusted_keys import remove_trusted
from edgefl_protocol import Payload
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.errors import MapsError
from edgefl_protocol.messages.requests import TaskReply


def test_contribute_before_the_task_is_known(run, live, invite, lab, tmp_path):
    run("enrol", invite)
    run("policy", "allow", "maps")
    live.approve()
    (tmp_path / "m.edgefl").write_bytes(lab.bundle_bytes())
    (tmp_path / "a.png").write_bytes(lab.encoded(lab.photo()))
    (tmp_path / "labels.csv").write_text("image,label\na.png,MEL\n")
    options = (
        "--labels",
        tmp_path / "labels.csv",
        "--model",
        tmp_path / "m.edgefl",
        "--trust",
        lab.SIGNER.public.hex(),
    )
    code, _, err = run("contribute", *options)
    assert code == 1
    assert "edgefl sync" in err
    assert run("sync")[0] == 0
    assert run("contribute", *options)[0] == 0
    live.classes = ("A", "B", "C")
    run("sync")
    assert "the federation has A, B, C" in run("contribute", *options)[2]
    live.classes, live.tokens = lab.CLASSES, 49
    run("sync")
    assert "the federation's task has 49" in run("contribute", *options)[2]


def test_the_very_same_contribution_is_known_again(run, device, live):
    """docs/reference/sharing.md: it was sent again without a word. Nothing is said before, or of another one."""
    run("pull")
    maps = ("contribute", "--labels", device / "labels.csv", "--json")
    code, out, err = run(*maps)
    assert (code, json.loads(out)["sent_before"], "very contribution" in err) == (0, None, False)
    run("sync")
    code, out, err = run(*maps)
    assert (code, json.loads(out)["sent_before"]) == (0, 1)
    assert "This very contribution was sent for round 1" in err
    table = device / "labels.csv"
    table.write_text(table.read_text().replace("5.png,NV\n", ""))
    assert json.loads(run(*maps)[1])["sent_before"] is None


def test_classes_are_numbered_as_the_federation_does(run, device, live, lab):
    """docs/methods.md, 1.1: maps.<k> is the class at index k of the task, whatever the bundle's order."""
    live.classes = ("BCC", "NV", "MEL")
    run("pull")
    report = json.loads(run("contribute", "--labels", device / "labels.csv", "--json")[1])
    assert set(report["arrays"]) == {"maps.1", "maps.2"}


def test_of_every_class_the_mean_leaves_where_the_task_asks_for_it(run, device, live, monkeypatch):
    """docs/methods.md 1.5: one map a class. The owner is told of how many pictures, and sees all of them."""
    told = type(live)._task

    def task(one, *words):
        found = TaskReply.from_payload(told(one, *words))
        return dataclasses.replace(found, settings={"sent_maps": asked}).to_payload()

    maps = ("contribute", "--labels", device / "labels.csv")
    run("pull")
    each = json.loads(run(*maps, "--dry-run", "--json")[1])
    monkeypatch.setattr(type(live), "_task", task)
    asked = "mean"
    assert run("sync", "--no-learn")[0] == 0
    mean = json.loads(run(*maps, "--dry-run", "--json")[1])
    assert (each["sent_maps"], mean["sent_maps"]) == ("each", "mean")
    assert set(mean["maps"].values()) == {1} and min(each["maps"].values()) > 1
    assert [one["image"] for one in mean["made_of"]] == [one["image"] for one in each["made_of"]]
    assert {one["row"] for one in mean["made_of"]} == {0}
    assert all(array["shape"][0] == 1 for array in mean["arrays"].values())
    counts = ", ".join(f"{number} of {name}" for name, number in each["maps"].items())
    _, out, err = run(*maps, "--dry-run", "--sheets", device / "sheets")
    assert f"of every class the mean of attention maps ({counts})" in out + err
    asked = "median"
    assert run("sync", "--no-learn")[0] == 0
    code, _, err = run(*maps)
    assert code == 1 and "sets sent_maps to median, which this version does not know" in err


def test_maps_of_another_form_are_neither_given_nor_taken(run, device, live, school, monkeypatch, capsys):
    """Decision 0028: a map of another rollout means something else; a bundle that tells its form is held against the
    task, before a picture is read. `train` learns without the others' maps, and says so."""
    live.broadcasts[1] = Payload(
        {"maps.0.0": np.ones((1, 36), np.float16)}, {"phase": "train", "round": 1, "rounds": 5}
    )
    live.bundles["main", "all", 1] = school.learning_bytes()
    told = type(live)._task

    def task(one, *words):
        found = TaskReply.from_payload(told(one, *words))
        return dataclasses.replace(found, settings={"rollout": "sink"}, train_rounds=5).to_payload()

    assert run("pull")[0] == 0 and run("sync", "--no-learn")[0] == 0
    assert run("contribute", "--labels", device / "labels.csv", "--dry-run")[0] == 0
    assert _membership(Home(run.home), school.learning_bundle())[1] is not None
    monkeypatch.setattr(type(live), "_task", task)
    assert run("sync", "--no-learn")[0] == 0
    code, out, err = run("contribute", "--labels", device / "labels.csv")
    assert (code, out, len(err.splitlines())) == (1, "", 1) and "the federation's rollout is sink" in err
    assert _membership(Home(run.home), school.learning_bundle()) == ("device-1", None)
    assert capsys.readouterr().err.startswith("The others' maps are left out: the federation's rollout is sink")


def test_broadcasts_of_networks_are_not_read_for_maps(run, device, live, school, monkeypatch):
    """They may be far above an envelope's 32 MiB (docs/security.md 2.2), and hold no maps."""
    live.broadcasts[1] = Payload({"network": np.zeros(9, np.float32)}, {"phase": "train", "round": 1, "rounds": 5})
    live.bundles["main", "all", 1] = school.learning_bytes()
    told = type(live)._task

    def task(one, *words):
        found = TaskReply.from_payload(told(one, *words))
        return dataclasses.replace(found, tokens=0, maps_per_class=0).to_payload()

    monkeypatch.setattr(type(live), "_task", task)
    assert run("pull")[0] == 0 and run("sync", "--no-learn")[0] == 0
    (newest,) = Home(run.home).broadcasts.glob("*.payload")
    with newest.open("r+b") as file:
        file.truncate(33 * 2**20)
    assert _membership(Home(run.home), school.learning_bundle()) == ("device-1", None)


def test_the_others_maps_are_learned_under_their_own_class(run, device, live, lab):
    """docs/methods.md, 1.1: maps.<k> is the class at index k of the task; a bundle may order its classes otherwise."""
    live.classes = ("BCC", "NV", "MEL")
    live.broadcasts[1] = Payload(
        {"maps.0.0": np.full((1, 36), 0.25, np.float16), "maps.0.2": np.full((2, 36), 0.5, np.float16)},
        {"phase": "train", "round": 1, "rounds": 5},
    )
    run("pull")
    run("sync")
    home = Home(run.home)
    bundle = load_bundle(lab.bundle_bytes(), [lab.SIGNER.public], lab.NOW_MS)
    name, others = _membership(home, bundle)
    assert name == "device-1"
    assert {key: float(value[0, 0]) for key, value in others.arrays.items()} == {"maps.0.2": 0.25, "maps.0.0": 0.5}
    elsewhere = load_bundle(lab.bundle_bytes(line="other"), [lab.SIGNER.public], lab.NOW_MS)
    assert _membership(home, elsewhere) == ("device-1", None)
    live.classes = ("BCC", "NV")
    run("sync")
    with pytest.raises(MapsError, match="the federation has BCC, NV: fetch its bundle"):
        _membership(home, bundle)
    assert _membership(Home(device / "nobody"), bundle) == (None, None)


def test_what_the_gate_refers_gives_no_map(run, device, live, lab):
    """docs/reference/picture-gate.md: such pictures teach nobody; the others' maps travel, and the number is told."""
    run("pull")
    (device / "0.png").write_bytes(lab.encoded(np.full((40, 50, 3), 128, np.uint8)))  # grey and flat
    (device / "1.png").write_bytes(lab.encoded(lab.photo(20, 40)))
    code, out, err = run("contribute", "--labels", device / "labels.csv", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["images"] == 4
    assert report["maps"] == {"MEL": 2, "NV": 2}
    assert report["left_out"] == {"images": 2, "reasons": {"blur": 1, "dark_corners": 1, "not_skin": 1, "size": 1}}
    assert "2 pictures give no map (the picture is blurred: 1;" in err
    (device / "labels.csv").write_text("image,label\n0.png,MEL\n")
    code, _, err = run("contribute", "--labels", device / "labels.csv", "--dry-run")
    assert code == 1
    assert "none of 1 picture passes the gate" in err


def test_contributed_pictures_may_be_of_other_kinds(run, device, lab):
    """`--formats` means the same for score, train and contribute."""
    run("pull")
    (device / "0.png").write_bytes(lab.encoded(lab.photo(50, 40), "TIFF"))
    code, _, err = run("contribute", "--labels", device / "labels.csv", "--dry-run")
    assert code == 1
    assert "give --formats jpeg,png,tiff" in err
    options = ("--dry-run", "--formats", "png,tiff", "--json")
    assert json.loads(run("contribute", "--labels", device / "labels.csv", *options)[1])["images"] == 6


def test_a_damaged_picture_stops_a_contribution(run, device):
    run("pull")
    (device / "3.png").write_bytes(b"rubbish")
    code, _, err = run("contribute", "--labels", device / "labels.csv")
    assert code == 1
    assert "3.png" in err
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0


def test_what_was_shown_is_what_leaves(run, device, live):
    """docs/reference/sharing.md: the dry run names the very bytes that the coordinator gets later."""
    run("pull")
    sheets = device / "sheets"
    shown = json.loads(
        run("contribute", "--labels", device / "labels.csv", "--dry-run", "--sheets", sheets, "--json")[1]
    )
    assert not (run.home / "outbox.sqlite3").exists()
    assert [Path(shown["sheets"][key]).is_file() for key in ("leaves", "stays")] == [True, True]
    kept = json.loads(run("contribute", "--labels", device / "labels.csv", "--json")[1])
    assert run("sync")[0] == 0
    ((_, _, data),) = live.effects
    assert hashlib.sha256(data).hexdigest() == shown["sha256"] == kept["sha256"]
    sent = Payload.from_bytes(data)
    assert (shown["travels"], shown["bytes"], shown["scalars"]) == (["maps"], len(data), dict(sent.scalars))
    for name, array in sent.arrays.items():
        one = shown["arrays"][name]
        assert (one["min"], one["max"], one["bytes"]) == (float(array.min()), float(array.max()), array.nbytes)
    for one in shown["made_of"]:  # tells the owner which picture; the payload holds no such word
        assert Path(one["image"]).is_file() and Path(one["image"]).name.encode() not in data
    code, out, _ = run("contribute", "--labels", device / "labels.csv", "--dry-run")
    assert code == 0 and f"in all {len(data)} bytes, SHA-256 {shown['sha256']}" in out


def test_nothing_enters_the_outbox_that_the_owner_did_not_allow(run, device):
    """docs/reference/sharing.md: refused before any picture is read, one sentence, exit 3."""
    run("pull")
    assert run("policy", "deny", "maps")[0] == 0
    (device / "labels.csv").write_text("no table at all")
    code, out, err = run("contribute", "--labels", device / "labels.csv")
    assert (code, out, len(err.splitlines())) == (3, "", 1)
    assert "edgefl policy allow maps" in err
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0


def test_a_reply_that_is_too_large_for_the_policy_is_not_kept(run, device):
    run("pull")
    run("policy", "limit", "--bytes-per-round", "100")
    code, _, err = run("contribute", "--labels", device / "labels.csv")
    assert code == 3 and "--bytes-per-round" in err
    shown = json.loads(run("contribute", "--labels", device / "labels.csv", "--dry-run", "--json")[1])
    assert shown["policy"]["allowed"] is False and shown["policy"]["code"] == "round_too_large"
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0


def test_consent_withdrawn_holds_what_waits(run, device, live):
    """What lies in the outbox when the owner changes their mind stays here: 3, nothing sent, nothing lost."""
    run("pull")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    run("policy", "deny", "maps")
    code, out, err = run("sync", "--json")
    report = json.loads(out)
    assert code == 3 and live.effects == []
    assert [(one["outcome"], one["code"]) for one in report["sent"]] == [("held", "not_allowed")]
    assert report["waiting"] == 1 and "edgefl policy allow maps" in err
    (run.home / "policy.toml").write_text("format = 1\n[allowed]\nmapz = 2030-01-01\n")
    assert run("sync")[0] == 3 and live.effects == []
    (run.home / "policy.toml").unlink()
    run("policy", "allow", "maps")
    assert run("sync")[0] == 0 and len(live.effects) == 1


def test_consent_that_ended_holds_what_was_put_before(run, device, live):
    """An item of the consent's last day does not leave the day after, by the coordinator's clock; renewed, it does."""
    run("pull")
    today = datetime.datetime.fromtimestamp(live.now_ms / 1000, datetime.UTC).date()
    save_policy(Home(run.home), Policy(allowed={"maps": today}))
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    live.now_ms += 36 * 3_600_000
    code, out, err = run("sync", "--json")
    assert [(one["outcome"], one["code"]) for one in json.loads(out)["sent"]] == [("held", "consent_expired")]
    assert code == 3 and live.effects == [] and "edgefl policy allow maps" in err
    run("policy", "allow", "maps")
    assert run("sync")[0] == 0 and len(live.effects) == 1


def test_a_federation_that_takes_no_maps_is_given_none(run, device, live):
    """docs/methods.md: FedCLF shares features and weights; its task has no patches of a map."""
    live.tokens, live.method = 0, "fedclf"
    run("pull")
    code, out, err = run("contribute", "--labels", device / "labels.csv")
    assert (code, out) == (1, "") and "learns fedclf, which uses no maps" in err
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0


def test_a_days_limit_waits_and_is_no_failure(run, device, live, monkeypatch):
    """A round more than the owner allows in 24 hours stays in the outbox: exit 0, and it leaves a day later."""
    run("pull")
    run("policy", "limit", "--rounds-per-day", "1")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    assert run("sync")[0] == 0
    live.round = 2
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    for _ in range(2):
        code, out, err = run("sync", "--json")
        assert code == 0 and "--rounds-per-day" in err
        assert [(one["outcome"], one["code"]) for one in json.loads(out)["sent"]] == [("held", "too_many_rounds")]
    assert [effect[1] for effect in live.effects] == [1]
    spent = json.loads((run.home / "spent.json").read_text())
    spent["left"][0]["at_ms"] -= 86_400_000
    (run.home / "spent.json").write_text(json.dumps(spent))
    assert run("sync")[0] == 0
    assert [effect[1] for effect in live.effects] == [1, 2]


def test_a_retry_is_spent_once(run, device, live, net):
    """The answer is cut: the same item goes again under the same key, and counts once."""
    run("pull")
    run("policy", "limit", "--rounds-per-day", "1")
    assert run("contribute", "--labels", device / "labels.csv")[0] == 0
    good, cuts = live.send, iter([True] * 4)

    def cut(request):
        return net.cut_answer(request, good) if request.path == "/v1/reply" and next(cuts, False) else good(request)

    live.send = cut
    assert run("sync")[0] == 1  # four envelopes, no answer
    found = json.loads(run("policy", "show", "--json")[1])["last_24_hours"]
    assert found["rounds"] == 1 and found["bytes"] > 0
    assert run("sync")[0] == 0
    assert json.loads(run("policy", "show", "--json")[1])["last_24_hours"] == found
    assert len(live.effects) == 1


def test_what_was_not_sent_is_not_called_sent(run, device, live):
    """A device that was shut out: "edgefl sync sends it" stood first, and the refusal after it."""
    run("pull")
    known, live.members = live.members, {}
    code, out, err = run("contribute", "--labels", device / "labels.csv", "--send")
    assert code == 1 and out.startswith("not sent, it waits in the outbox: ") and "sends it" not in out
    assert "edgefl advanced outbox lists it and can drop it" in out and "shut out" in err
    live.members = known
    (waiting,) = json.loads(run("outbox", "--json")[1])["items"]
    assert run("outbox", "drop", waiting["id"][:8])[0] == 0 and run("sync")[0] == 0 and live.effects == []


def test_no_map_is_offered_that_a_bundle_made_which_counts_no_more(run, device, lab, after):
    """docs/security.md 2.6.5: its signer was removed while pictures were read: one sentence, and nothing waits."""
    assert run("pull")[0] == 0
    after(3, PictureReader, "decode", lambda: remove_trusted(Home(run.home), lab.SIGNER.key_id))
    code, out, err = run("contribute", "--labels", device / "labels.csv")
    assert (code, out) == (3, "") and "no signer is trusted" in err.splitlines()[-1]
    assert json.loads(run("outbox", "--json")[1])["items"] == []

"""`edgefl contribute`: what becomes a map, under which class, and what is left out."""

import json

import numpy as np
import pytest

from edgefl_client.home import Home
from edgefl_client.learning.errors import LearningError
from edgefl_client.train_command import _membership
from edgefl_protocol import Payload
from edgefl_protocol.bundle import load_bundle


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
    assert "the federation A, B, C" in run("contribute", *options)[2]
    live.classes, live.tokens = lab.CLASSES, 49
    run("sync")
    assert "the federation's task 49" in run("contribute", *options)[2]


def test_classes_are_numbered_as_the_federation_does(run, device, live, lab):
    """docs/methods.md, 1.1: maps.<k> is the class at index k of the task, whatever the bundle's order."""
    live.classes = ("BCC", "NV", "MEL")
    run("pull")
    report = json.loads(run("contribute", "--labels", device / "labels.csv", "--json")[1])
    assert set(report["arrays"]) == {"maps.1", "maps.2"}


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
    with pytest.raises(LearningError, match="the federation BCC, NV: pull its bundle"):
        _membership(home, bundle)
    assert _membership(Home(device / "nobody"), bundle) == (None, None)


def test_what_the_gate_refers_gives_no_map(run, device, live, lab):
    """docs/device.md, the gate: such pictures teach nobody; the others' maps travel, and the number is told."""
    run("pull")
    (device / "0.png").write_bytes(lab.encoded(np.full((40, 50, 3), 128, np.uint8)))  # grey and flat
    (device / "1.png").write_bytes(lab.encoded(lab.photo(20, 40)))
    code, out, err = run("contribute", "--labels", device / "labels.csv", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["images"] == 4
    assert report["maps"] == {"MEL": 2, "NV": 2}
    assert report["left_out"] == {"images": 2, "reasons": {"blur": 1, "not_skin": 1, "size": 1}}
    assert "2 pictures give no map (the picture is blurred: 1;" in err
    (device / "labels.csv").write_text("image,label\n0.png,MEL\n")
    code, _, err = run("contribute", "--labels", device / "labels.csv", "--dry-run")
    assert code == 1
    assert "none of the 1 pictures passes the gate" in err


def test_contributed_pictures_may_be_of_other_kinds(run, device, lab):
    """`--formats` means the same for score, train and contribute."""
    run("pull")
    (device / "0.png").write_bytes(lab.encoded(lab.photo(50, 40), "TIFF"))
    code, _, err = run("contribute", "--labels", device / "labels.csv", "--dry-run")
    assert code == 1
    assert "name tiff in --formats" in err
    options = ("--dry-run", "--formats", "png,tiff", "--json")
    assert json.loads(run("contribute", "--labels", device / "labels.csv", *options)[1])["images"] == 6


def test_a_damaged_picture_stops_a_contribution(run, device):
    run("pull")
    (device / "3.png").write_bytes(b"rubbish")
    code, _, err = run("contribute", "--labels", device / "labels.csv")
    assert code == 1
    assert "3.png" in err
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0

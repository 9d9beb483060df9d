"""A device that replies to no round says so, and what its owner does: sync, status, doctor.

Source: docs/reference/device-learning.md, keys of `sync --json`.
"""

import json

import pytest
from tests.edge_client.doctor.conftest import diagnosed
from tests.edge_client.learning.contrast_lab import contrast_bytes, contrast_plan
from tests.edge_client.page_keys import keys_of

NAMING = (
    "this device learns in no round, because no pictures are named, or those that were named were refused: run {}, and "
    "from then on edgefl sync replies"
)
TABLE = NAMING.format("edgefl train --labels TABLE")
CONTRIBUTE = "edgefl contribute --labels TABLE --send gives maps of labelled pictures instead"


@pytest.fixture(autouse=True)
def unprobed(monkeypatch):
    """Doctor without its second process."""
    monkeypatch.setattr("edgefl_client.doctor.checks.probe", lambda *_, **__: iter(()))


@pytest.fixture
def learns(device, live, school):
    """The federation's bundle brings its training step."""
    live.bundles["main", "all", 1] = school.learning_bytes()
    return device


def told(run, *options):
    """What a sync says, which `status` says too, with and without the coordinator."""
    code, out, _ = run("sync", "--json", *options)
    report = json.loads(out)
    said = report["silent"]
    assert code == 0 and report.keys() == keys_of("sync")
    for offline in ((), ("--offline",)):
        assert json.loads(run("status", "--json", *offline)[1])["silent"] == said
    return said


def test_a_device_without_pictures_says_so_everywhere(run, learns):
    """Its sync told it to run sync, and doctor said nothing."""
    assert told(run) == TABLE and run("sync")[1].splitlines()[-1] == TABLE
    assert TABLE in run("status")[1].splitlines()
    found = diagnosed(run)[1]["rounds"]
    assert (found["state"], f"{found['found']}: {found['advice']}") == ("warn", TABLE)


def test_pictures_that_were_refused_are_as_good_as_none(run, learns):
    """Six are too few: nothing is remembered of them, so the sentence must not say that none was ever named."""
    assert run("sync")[0] == 0 and run("train", "--labels", learns / "labels.csv")[0] == 1
    assert told(run) == TABLE


def test_named_pictures_and_given_maps_end_it(run, learns, school, tmp_path):
    """A contribution is a reply, waiting or there; with pictures a sync says itself what it learned or why not."""
    assert run("sync")[0] == 0 and run("contribute", "--labels", learns / "labels.csv")[0] == 0
    assert json.loads(run("status", "--json", "--offline")[1])["silent"] is None  # it waits
    assert told(run) is None and "rounds" not in diagnosed(run)[1]  # it is there
    run("sync", "--labels", school.table(tmp_path / "own"))
    assert json.loads(run("status", "--json")[1])["silent"] is None


def test_in_the_next_round_too(run, learns, live):
    assert run("sync")[0] == run("contribute", "--labels", learns / "labels.csv", "--send")[0] == 0
    assert told(run) is None
    live.round = 2
    assert told(run) == TABLE


def test_a_model_that_only_scores_contributes(run, device, live):
    """Nothing is amiss on such a device, so doctor warns of nothing."""
    assert told(run) == f"this device learns in no round, because its model does not learn fedevprompt: {CONTRIBUTE}"
    found = diagnosed(run)[1]["rounds"]
    assert found["state"] == "ok" and CONTRIBUTE in found["found"]
    assert run("contribute", "--labels", device / "labels.csv", "--send")[0] == 0 and told(run) is None


def test_a_method_without_labels_takes_a_folder(run, device, live, lab):
    live.bundles["main", "all", 1] = contrast_bytes(lab, contrast_plan())
    live.method, live.travels, live.tokens = "fedclf", ("features", "weights"), 0
    assert told(run) is None  # its owner allowed maps alone
    assert run("policy", "allow", "features", "weights")[0] == 0
    assert told(run) == NAMING.format("edgefl sync --pictures DIR")


def nothing_allowed(run, live):
    run("policy", "deny", "maps")


def other_kinds(run, live):
    live.travels = ("weights",)


def the_end(run, live):
    live.state = "done"


def no_bundle(run, live):
    live.bundles.clear()


def no_maps(run, live):
    live.method, live.tokens = "fedavg", 0


def other_line(run, live):
    run("sync")
    live.line = "other"
    live.bundles.clear()


@pytest.mark.parametrize("asks", [nothing_allowed, other_kinds, the_end, no_bundle, no_maps, other_line])
def test_nobody_is_told_of_whom_nothing_is_asked(run, learns, live, asks):
    """Advice that cannot help is worse than none: owner, federation or operator asks nothing of this device."""
    asks(run, live)
    assert told(run) is None and "rounds" not in diagnosed(run)[1]


def test_whoever_learns_nothing_on_purpose_is_not_told(run, learns):
    assert json.loads(run("sync", "--no-learn", "--json")[1])["silent"] is None

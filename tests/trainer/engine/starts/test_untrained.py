"""A network in which nothing was learned stays one, whichever name it is given: a run, a file, a run behind a run.

docs/decisions/0004: an untrained network is frozen for a trial only, and a trial says so wherever it is shown.
"""

import json
import shutil
from pathlib import Path

import pytest
from tests.shared import Shared
from tests.trainer.conftest import MAE, TINY, edgefl_train

from edgefl_protocol.tensors import read_tensors, write_tensors
from edgefl_trainer.engine.first_run import has_learned, stays_untrained
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.models.backbone_names import BACKBONE_FILE, learned_in_file

ROUND = (*TINY, "--rounds", 1, "--epochs", 1)
WORDS = "this trial shows the steps, not what a model can do"


@pytest.fixture(scope="module")
def bare(shared: Shared, ward: str) -> Path:
    """A finished trial on the untrained `tiny`, and `second` beside it, which stands on that run's network."""

    def make(root: Path) -> None:
        for name, backbone in (("first", "tiny"), ("second", f"run:{root / 'first'}")):
            asked = ("run", "local", "--data", ward, "--backbone", backbone, "--out", root / name)
            outcome = edgefl_train(*asked, *ROUND)
            assert outcome.code == 0, outcome.err
            assert f"warning: backbone {backbone} is untrained: {WORDS}" in outcome.err
            assert f"backbone {backbone}, for images of 36 px: untrained, stays as it is" in outcome.err

    return shared.made("bare", make)


def older(run: Path, folder: Path) -> Path:
    """A copy of a run whose backbone file does not say whether it learned, as files from before that do not."""
    shutil.copytree(run, folder)
    file = folder / BACKBONE_FILE
    arrays, metadata = read_tensors(file.read_bytes(), max_bytes=1 << 30)
    facts = json.loads(metadata["backbone"])
    del facts["learned"]
    file.write_bytes(write_tensors(arrays, {"backbone": json.dumps(facts)}))
    assert learned_in_file(file) is None
    return folder


@pytest.mark.parametrize("name", ["run:{bare}/first", "file:{bare}/first/backbone.safetensors", "run:{bare}/second"])
def test_an_untrained_network_is_frozen_for_a_trial_only_whatever_its_name(name, bare, ward, tmp_path):
    backbone = name.format(bare=bare)
    asked = ("run", "local", "--data", ward, "--backbone", backbone, "--out", tmp_path / "run", "--device", "cpu")
    told = edgefl_train(*asked, "--preset", "bench84").sentence()
    assert told.startswith(f"backbone {backbone} is untrained, and nothing is learned on a frozen random network")


def test_it_says_so_in_every_table_report_and_score(bare, finished, ward, tmp_path):
    run = bare / "second"
    told = edgefl_train("table", run, finished["fedavg"]).out
    assert f"UNTRAINED NETWORK of local (tiny, 1 round): {WORDS}" in told
    assert f"is untrained: {WORDS}" in edgefl_train("evaluate", run, "--data", ward).err
    assert edgefl_train("report", run, "--out", tmp_path / "page.html").code == 0
    assert f"The network was never trained: {WORDS}." in (tmp_path / "page.html").read_text()
    picture = next(Path(ward.removeprefix("folder:")).rglob("*.png"))
    said = edgefl_train("predict", run, picture, "--site", "east", "--json").json()["model"]["warnings"]
    assert said[0] == f"The network below this model was never trained: {WORDS}."


def test_a_run_knows_it_of_its_own_network_when_its_source_is_gone(bare, tmp_path):
    shutil.copytree(bare / "second", tmp_path / "moved")
    config = tmp_path / "moved/config.toml"
    config.write_text(config.read_text().replace(str(bare), "/nowhere"))
    moved = open_run(tmp_path / "moved")
    assert moved.settings.backbone == "run:/nowhere/first" and has_learned(moved.settings.backbone) is None
    assert stays_untrained(moved.settings, moved.folder)


def test_a_file_from_before_is_as_the_run_that_left_it(bare, mae, tmp_path):
    first, second = older(bare / "first", tmp_path / "first"), older(bare / "second", tmp_path / "second")
    config = second / "config.toml"
    config.write_text(config.read_text().replace(str(bare), str(tmp_path)))  # two runs to follow
    for name in (f"run:{first}", f"file:{first / BACKBONE_FILE}", f"run:{second}"):
        assert has_learned(name) is False
    assert has_learned(f"run:{older(mae, tmp_path / 'mae')}") is True
    shutil.copy(first / BACKBONE_FILE, tmp_path / "alone.safetensors")
    assert has_learned(f"file:{tmp_path / 'alone.safetensors'}") is None  # nobody says
    config.write_text(config.read_text().replace(f"run:{first}", f"run:{second}"))
    assert has_learned(f"run:{second}") is None  # a circle


def test_methods_that_train_a_network_leave_a_trained_one(mae, finished, ward, tmp_path):
    assert learned_in_file(mae / BACKBONE_FILE) is True
    assert learned_in_file(finished["local"] / BACKBONE_FILE) is True  # a copy of it
    data = ("--data", ward, "--backbone", "tiny")
    apart, none, tuned = (tmp_path / name for name in ("apart", "none", "tuned"))
    for method, folder, more in (
        ("local-cl", apart, (*MAE[:2],)),
        ("random-init", none, ()),
        ("finetune", tuned, ()),
    ):
        assert edgefl_train("run", method, *data, *ROUND, *more, "--out", folder).code == 0
    assert learned_in_file(apart / BACKBONE_FILE) is True
    assert {learned_in_file(file) for file in (apart / "networks").iterdir()} == {True}
    assert learned_in_file(none / BACKBONE_FILE) is False  # it learns nothing
    # Fine-tuning leaves each site's network in `models/`, and beside them the one that all began with.
    assert learned_in_file(tuned / BACKBONE_FILE) is False
    run = open_run(tuned)
    assert not stays_untrained(run.settings, run.folder)

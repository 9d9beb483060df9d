"""Runs that start from runs: what a table takes for repetitions of one another.

docs/guides/learn-without-labels.md, fine-tuning.
"""

import json
import shutil

import pytest
from tests.trainer.conftest import MAE, TINY, edgefl_train
from tests.trainer.engine.test_run import summary

from edgefl_trainer.engine.first_run import learned_by, other_colour_line, repetition_digest
from edgefl_trainer.engine.settings import resolve

QUICK = ("--preset", "tiny", "--rounds", 1, "--device", "cpu", "--json")


def tuned_from(root, name: str, *asked: object) -> tuple:
    """A run of one round without labels and, after it, one with labels; both in folders of their own."""
    first, second = root / f"{name}-first", root / name
    one_round = (*TINY, *MAE, "--rounds", 1)
    assert edgefl_train("run", "fedmae", "--out", first, "--backbone", "tiny", *one_round, *asked).code == 0
    assert edgefl_train("finetune", first, "--mode", "local", "--labels", 0.4, "--out", second, *QUICK).code == 0
    return first, second


@pytest.fixture(scope="module")
def seeds(tmp_path_factory, ward):
    root = tmp_path_factory.mktemp("seeds")
    return [tuned_from(root, f"seed-{seed}", "--data", ward, "--seed", seed) for seed in (0, 1)]


def test_seeds_of_two_stages_share_a_row_that_names_the_first(seeds):
    table = edgefl_train("table", *(second for _, second in seeds), "--format", "json").json()
    [row] = table["rows"]
    assert row["method"] == "finetune of fedmae, local, 0.4 of labels" and row["seeds"] == [0, 1]
    assert row["spread_over"] == "seeds"


def test_another_first_run_is_another_row(seeds, ward, tmp_path):
    _, other = tuned_from(tmp_path, "other", "--data", ward, "--seed", 1, "--set", "mask_ratio=0.5")
    table = edgefl_train("table", seeds[0][1], other, "--format", "json").json()
    assert [row["seeds"] for row in table["rows"]] == [[0], [1]]


def test_the_folder_of_the_first_run_does_not_count(seeds, tmp_path):
    first, second = seeds[0]
    shutil.copytree(first, tmp_path / "moved")
    again = edgefl_train(
        "finetune", tmp_path / "moved", "--mode", "local", "--labels", 0.4, "--out", tmp_path / "again", *QUICK
    )
    for name in ("settings_sha256", "state_sha256"):
        assert again.json()[name] == summary(second)[name]


def test_a_run_with_labels_is_passed_over(seeds, ward, tmp_path):
    """It keeps a copy of the network it started from: what learned that network counts, whoever hands it on."""
    _, second = seeds[0]
    asked = ("--data", ward, "--image-px", 36, "--labels", 0.4, "--select", "tune", "--set", "mode=local", *QUICK)
    again = ("--backbone", f"run:{second}", "--out", tmp_path / "again")
    found = edgefl_train("run", "finetune", *asked, *again).json()
    assert found["pretraining"] == "fedmae"
    assert found["settings_sha256"] == summary(second)["settings_sha256"]


def test_a_network_that_no_run_learned_has_no_first_run(ward, tmp_path):
    """Fresh weights, and those that a run with labels started from."""
    asked = ("--data", ward, *TINY, "--rounds", 1, "--set", "mode=local", "--json")
    for name, backbone in (("fresh", "tiny"), ("handed-on", f"run:{tmp_path / 'fresh'}")):
        found = edgefl_train("run", "finetune", "--backbone", backbone, "--out", tmp_path / name, *asked).json()
        assert "pretraining" not in found
    [row, other] = edgefl_train("table", tmp_path / "fresh", tmp_path / "handed-on", "--format", "json").json()["rows"]
    assert (row["method"], other["method"]) == (
        "finetune, local, backbone=tiny",
        "finetune, local, backbone=run:fresh",
    )


@pytest.mark.parametrize("damage", ["gone", "damaged", "circle"])
def test_what_cannot_be_followed_counts_by_its_name(damage, tmp_path):
    folder = tmp_path / "lab"
    folder.mkdir()
    if damage != "gone":
        (folder / "summary.json").write_text(json.dumps({"method": "local", "state_sha256": "0" * 64}))
        (folder / "config.toml").write_text("rounds = [")
    settings = resolve("local", {"data": ("folder:x",), "backbone": f"run:{folder}"}, None, [])
    if damage == "circle":
        (folder / "config.toml").write_text(settings.to_toml())
    first = learned_by(settings.backbone)
    assert first is None and repetition_digest(settings, first) == settings.digest_but_seed()


@pytest.mark.parametrize(("before", "now", "told"), [
    ("none", "shades_of_grey_6", True), ("shades_of_grey_6", "none", True), ("none", "none", False),
    ("shades_of_grey_6", "shades_of_grey_6", False),
])  # fmt: skip
def test_a_network_that_learned_from_otherwise_coloured_pictures_is_told(before, now, told, tmp_path):
    """docs/decisions/0057: a run whose network learned in coloured light gave it pictures without, in silence."""
    first = resolve("fedmae", {"data": ("folder:x",), "colour": before}, None, [])
    (tmp_path / "config.toml").write_text(first.to_toml())
    (tmp_path / "summary.json").write_text(json.dumps({"method": "fedmae", "state_sha256": "0" * 64}))
    asked = {"data": ("folder:x",), "colour": now, "backbone": f"run:{tmp_path}"}
    said = other_colour_line(resolve("local", asked, None, []))
    assert bool(said) is told
    assert not told or f"learned with --colour {before}, and this run gives it pictures with --colour {now}" in said

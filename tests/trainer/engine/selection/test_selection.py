"""`--select tune`: docs/design.md 5, rows (`tune` selects, stops and calibrates) and docs/decisions/0015."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.trainer.conftest import TINY, edgefl_train, make_ward
from tests.trainer.engine.test_run import metrics, summary
from tests.trainer.engine.test_sites import rows_of, site

from edgefl_trainer.contract import State
from edgefl_trainer.engine import selection
from edgefl_trainer.engine.selection import selecting_sites, tune_judge

ROUNDS = 3


@pytest.fixture(scope="module")
def large(tmp_path_factory, cached) -> str:
    """180 images a site: 135 lesions learn, 20 of them are tune rows."""
    counts = {name: {"nevus": 90, "other": 90} for name in ("east", "west")}
    return f"folder:{make_ward(tmp_path_factory.mktemp('large'), counts)}"


def command(method, folder, data, mae, *more):
    backbone = ("--backbone", f"run:{mae}", "--set", "readout=cls")
    return ("run", method, "--data", data, "--out", folder, *backbone, *TINY, "--rounds", ROUNDS, *more)


def script(monkeypatch, east, west):
    """Tune figures of each round, in the order in which sites are judged."""
    figures = iter([figure for pair in zip(east, west, strict=True) for figure in pair])
    monkeypatch.setattr(selection, "shares_of_right", lambda *_, **__: {"balanced_accuracy": next(figures)})


@pytest.mark.parametrize(
    "method", ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedevprompt"))]
)
def test_the_best_round_is_saved_calibrated_and_reported(method, tmp_path, large, mae, monkeypatch):
    """The model of round 1 at east is what a run of one round ends with; west's best round is the last."""
    script(monkeypatch, east=(0.9, 0.5, 0.6), west=(0.5, 0.6, 0.7))
    found = edgefl_train(*command(method, tmp_path / "a", large, mae, "--select", "tune", "--json")).json()
    script(monkeypatch, east=(0.5,), west=(0.5,))
    short = edgefl_train(*command(method, tmp_path / "b", large, mae, "--rounds", 1, "--json")).json()
    script(monkeypatch, east=(0.9, 0.5, 0.6), west=(0.5, 0.6, 0.7))
    whole = edgefl_train(*command(method, tmp_path / "c", large, mae, "--json")).json()
    assert (found["select"], whole["select"]) == ("tune", "last")
    assert {name: one["selected_round"] for name, one in found["sites"].items()} == {"east": 1, "west": 3}
    assert {one["selected_round"] for one in whole["sites"].values()} == {3}
    assert found["state_sha256"] == whole["state_sha256"] != short["state_sha256"]
    for name, reference in (("east", short), ("west", whole)):
        folder = tmp_path / ("b" if name == "east" else "c")
        assert found["sites"][name]["brier"] == reference["sites"][name]["brier"]
        file = f"models/{name}.safetensors"
        assert (tmp_path / "a" / file).read_bytes() == (folder / file).read_bytes()
        mine, theirs = (
            json.loads((f / "calibration.json").read_text())["sites"][name] for f in (tmp_path / "a", folder)
        )
        assert mine == theirs
    assert found["sites"]["east"]["brier"] != whole["sites"]["east"]["brier"]


def test_fedavgs_selected_model_is_the_average_of_that_round(tmp_path, large, mae, monkeypatch):
    """What a site scores with lies in the broadcast there: the last state's weights would be other ones."""
    script(monkeypatch, east=(0.9, 0.5, 0.6), west=(0.9, 0.6, 0.7))
    edgefl_train(*command("fedavg", tmp_path / "a", large, mae, "--select", "tune", "--json")).json()
    models = [load_file(tmp_path / "a" / "models" / f"{name}.safetensors") for name in ("east", "west")]
    np.testing.assert_array_equal(models[0]["head.weight"], models[1]["head.weight"])
    latest = json.loads((tmp_path / "a" / "checkpoints" / "latest.json").read_text())
    server = load_file(tmp_path / "a" / "checkpoints" / latest["server"])
    assert not np.array_equal(models[0]["head.weight"], server["head.weight"])


def test_a_fine_tuned_model_stands_for_selection_too(tmp_path, large, mae, monkeypatch):
    """docs/methods.md 4.1: `fedavgpers` is judged after its last phase as round R + 1; east keeps that one."""
    script(monkeypatch, east=(0.5, 0.6, 0.6, 0.9), west=(0.9, 0.5, 0.5, 0.6))
    found = edgefl_train(*command("fedavgpers", tmp_path / "a", large, mae, "--select", "tune", "--json")).json()
    assert {name: one["selected_round"] for name, one in found["sites"].items()} == {"east": ROUNDS + 1, "west": 1}
    assert {name: one["selected_phase"] for name, one in found["sites"].items()} == {"east": "final", "west": "train"}
    latest = json.loads((tmp_path / "a" / "checkpoints" / "latest.json").read_text())
    for name, fine_tuned in (("east", True), ("west", False)):
        state = load_file(tmp_path / "a" / "checkpoints" / latest["sites"][name])
        model = load_file(tmp_path / "a" / "models" / f"{name}.safetensors")
        assert np.array_equal(model["prompts.t"], state["prompts.t"]) == fine_tuned


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "phase-0001/east.metrics.json",
        "phase-0001/west.broadcast.safetensors",
        "phase-0001/server.safetensors",
        "checkpoints/latest.json",
        "models/east.safetensors",
    ],
)
def test_kill_9_and_resume_keep_the_selection(moment, tmp_path, large, mae, kill_after, undisturbed):
    arguments = command("fedevprompt", tmp_path / "run", large, mae, "--select", "tune", "--set", "lr_head=0.3")
    kill_after(moment, *arguments)
    found = edgefl_train(*arguments, "--resume", "--json").json()
    expected = summary(undisturbed)
    for key in ("state_sha256", "sites", "select"):
        assert found[key] == expected[key]
    for name in ("calibration.json", "models/east.safetensors", "models/west.safetensors", "checkpoints/latest.json"):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, large, mae):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    outcome = edgefl_train(*command("fedevprompt", folder, large, mae, "--select", "tune", "--set", "lr_head=0.3"))
    assert outcome.code == 0, outcome.err
    return folder


def test_the_selected_round_has_the_highest_figure_of_the_metrics(undisturbed):
    for name, found in summary(undisturbed)["sites"].items():
        rounds = {
            line["tune_balanced_accuracy"]: line["round"] for line in metrics(undisturbed) if line["site"] == name
        }
        assert found["selected_round"] == rounds[max(rounds)]  # a later line of the same figure replaced the earlier


def test_too_few_tune_rows_select_nothing(tmp_path, ward, mae):
    """Two tune rows a site say nothing about a round: its last model stays."""
    found = edgefl_train(*command("local", tmp_path / "run", ward, mae, "--select", "tune", "--json")).json()
    assert {one["selected_round"] for one in found["sites"].values()} == {ROUNDS}


@pytest.mark.parametrize(
    ("labels", "selects"), [([0] * 10 + [1] * 10, True), ([0] * 10 + [1] * 9, False), ([0] * 30, False)]
)
def test_a_site_selects_on_twenty_tune_rows_of_two_classes(labels, selects):
    assert selecting_sites({"east": site(labels)}) == ({"east"} if selects else set())


def test_a_selecting_run_judges_every_tune_row(monkeypatch):
    """A draw of 200 is watched; selection reads all, for the error of a draw is as large as what rounds differ by."""
    here = replace(site([0, 1]), tune=rows_of([0, 1] * 150))
    seen = []
    monkeypatch.setattr(selection, "call_predictor", lambda *_: Scores)
    monkeypatch.setattr(selection, "predict_rows", lambda predictor, rows, device: seen.append(len(rows)) or Scores)
    monkeypatch.setattr(selection, "shares_of_right", lambda *_, **__: {"balanced_accuracy": 0.5, "open_accuracy": 0.4})
    for most in (200, None):
        judge = tune_judge(Scores, {"east": here}, most=most)
        told = {"tune_balanced_accuracy": 0.5, "tune_open_accuracy": 0.4, "tune_rows": most or 300}
        assert judge("east", State(), None) == told
    assert seen == [200, 300]


class Scores:
    """Stands for a method, its predictor and its scores."""

    probabilities = predicted = vacuity = None

    @staticmethod
    def predictor(site, state, broadcast):
        return Scores


def test_another_selection_cannot_resume(tmp_path, undisturbed, large, mae):
    arguments = command("fedevprompt", undisturbed, large, mae, "--select", "last", "--set", "lr_head=0.3")
    outcome = edgefl_train(*arguments, "--resume")
    assert outcome.code == 2 and "has select = 'tune', but this command has 'last'" in outcome.sentence()
    maps = edgefl_train(
        *arguments[:-4], "--select", "tune", "--set", "lr_head=0.3", "--set", "select=random", "--resume"
    )
    assert maps.code == 2 and "has --set select = 'vacuity', but this command has 'random'" in maps.sentence()

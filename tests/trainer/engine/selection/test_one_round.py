"""`--select pooled`: one round for all sites (arXiv 2208.11278 section V-B: "the best global model is selected on the
validation set"), and each site's own beside it. Source: docs/methods.md 3.4, docs/decisions/0064."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.trainer.conftest import TINY, edgefl_train, make_ward
from tests.trainer.engine.judging.test_further import without_threshold
from tests.trainer.engine.test_run import metrics

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase
from edgefl_trainer.engine import selection
from edgefl_trainer.engine.checkpoint import Best
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.engine.selection import better_for_all, pooled_figure, right_of
from edgefl_trainer.errors import SettingError
from edgefl_trainer.experiments.files import Column
from edgefl_trainer.experiments.measured import Measurement, cell_of

ROUNDS = 3


@pytest.fixture(scope="module")
def large(tmp_path_factory, cached) -> str:
    """180 images a site: 135 lesions learn, 20 of them are tune rows."""
    counts = {name: {"nevus": 90, "other": 90} for name in ("east", "west")}
    return f"folder:{make_ward(tmp_path_factory.mktemp('large'), counts)}"


def command(folder, data, mae, *more):
    backbone = ("--backbone", f"run:{mae}", "--set", "readout=cls")
    return ("run", "fedavg", "--data", data, "--out", folder, *backbone, *TINY, "--rounds", ROUNDS, "--json", *more)


def script(monkeypatch, east, west):
    """Right answers of twenty, ten of each class, in the order in which sites are judged."""
    told = iter([right for pair in zip(east, west, strict=True) for right in pair])

    def figures(*_, **__):
        first, second = next(told)
        monkeypatch.setattr(selection, "right_of", lambda *_: f"{first}/10 {second}/10")
        return {"balanced_accuracy": (first + second) / 20}

    monkeypatch.setattr(selection, "shares_of_right", figures)


@pytest.fixture
def found(tmp_path, large, mae, monkeypatch):
    """East is best in round 1, west in round 3, both together in round 2."""
    script(monkeypatch, east=[(9, 9), (8, 8), (2, 2)], west=[(2, 2), (7, 7), (8, 8)])
    return edgefl_train(*command(tmp_path / "run", large, mae, "--select", "pooled")).json()


def test_all_sites_keep_the_round_that_is_best_for_all(tmp_path, found):
    assert {name: one["selected_round"] for name, one in found["sites"].items()} == {"east": 2, "west": 2}
    own = found["further"]["own_round"]["sites"]
    assert {name: one["selected_round"] for name, one in own.items()} == {"east": 1, "west": 3}
    models = {name: load_file(tmp_path / "run/models" / f"{name}.safetensors") for name in ("east", "west")}
    np.testing.assert_array_equal(models["east"]["head.weight"], models["west"]["head.weight"])  # one model, FedAvg's
    assert open_run(tmp_path / "run").further == ("own_round",)


def test_a_held_out_site_gets_the_round_that_all_keep(tmp_path, large, mae, monkeypatch):
    """docs/methods.md 8.4: FedAvg sends every site the same; the newcomer has the head of round 2, not the last one."""
    counts = {name: {"nevus": 90, "other": 90} for name in ("east", "north", "west")}
    spec = f"folder:{make_ward(tmp_path / 'three', counts)}"
    file = tmp_path / "without_north.json"
    dealt = edgefl_train("partition", "--data", spec, "--scheme", "natural", "--hold-out", "north", "-o", file)
    assert dealt.code == 0, dealt.err
    for run, select in (("run", "pooled"), ("last", "last")):
        script(monkeypatch, east=[(9, 9), (8, 8), (2, 2)], west=[(2, 2), (7, 7), (8, 8)])
        done = edgefl_train(*command(tmp_path / run, spec, mae, "--partition", file, "--select", select)).json()
        assert done["sites"]["north"]["held_out"]
    heads = {
        (run, name): load_file(tmp_path / run / "models" / f"{name}.safetensors")["head.weight"]
        for run in ("run", "last")
        for name in ("east", "north")
    }
    np.testing.assert_array_equal(heads["run", "north"], heads["run", "east"])
    np.testing.assert_array_equal(heads["last", "north"], heads["last", "east"])
    assert not np.array_equal(heads["run", "north"], heads["last", "north"])


def test_own_rounds_are_those_of_select_tune(tmp_path, found, large, mae, monkeypatch):
    """What stands beside is what `--select tune` reports, model for model."""
    script(monkeypatch, east=[(9, 9), (8, 8), (2, 2)], west=[(2, 2), (7, 7), (8, 8)])
    each = edgefl_train(*command(tmp_path / "own", large, mae, "--select", "tune")).json()
    assert found["further"]["own_round"]["sites"] == without_threshold(each["sites"])
    assert found["state_sha256"] == each["state_sha256"]
    for name in ("east", "west"):
        beside = tmp_path / "run/models/own_round" / f"{name}.safetensors"
        assert load_file(beside).keys() == load_file(tmp_path / "own/models" / f"{name}.safetensors").keys()
    again = edgefl_train("evaluate", tmp_path / "run", "--data", large, "--json").json()
    rounds = {name: one["selected_round"] for name, one in again["further"]["own_round"]["sites"].items()}
    assert rounds == {"east": 1, "west": 3}


def test_sites_that_sat_out_count_too(tmp_path, large, mae):
    """With half of the sites in each round, all are judged after each: else rounds would compare different rows."""
    found = edgefl_train(*command(tmp_path / "run", large, mae, "--select", "pooled", "--participation", 0.5)).json()
    assert len({one["selected_round"] for one in found["sites"].values()}) == 1
    lines = metrics(tmp_path / "run")
    assert {line["phase"] for line in lines if "tune_right_of" in line} == {"train"}
    latest = json.loads((tmp_path / "run/checkpoints/latest.json").read_text())
    assert set(latest["together"]) == {"east", "west"}


def test_too_few_tune_rows_keep_the_last_round(tmp_path, ward, mae):
    """Two sites of two tune rows each: four rows say nothing of a round."""
    found = edgefl_train(*command(tmp_path / "run", ward, mae, "--select", "pooled")).json()
    assert {one["selected_round"] for one in found["sites"].values()} == {ROUNDS} and "further" not in found


def test_the_figure_is_balanced_accuracy_of_the_rows_together():
    """Recalls 12/20 and 5/8 of the rows of both sites; the mean of the sites' own figures would be another."""
    target, said = np.array([0, 0, 1, 2]), np.array([0, 1, 1, -1])
    assert right_of(said, target, 3) == "1/2 1/1 0/1"
    east, west = {"tune_right_of": "10/10 1/4"}, {"tune_right_of": "2/10 4/4"}
    assert pooled_figure({"east": east, "west": west}) == pytest.approx((12 / 20 + 5 / 8) / 2)
    assert pooled_figure({"east": {"tune_right_of": "9/10 0/0"}, "west": {"tune_right_of": "9/10 0/0"}}) is None
    assert pooled_figure({"east": {"tune_right_of": "9/10 9/9"}}) is None and pooled_figure({}) is None


def test_answers_that_no_training_row_has_count_as_wrong():
    """docs/methods.md 11.4: of 25 questions five have such an answer."""
    target = np.array([0] * 12 + [1] * 8 + [-2] * 5)
    assert right_of(np.zeros(25, dtype=np.int64), target, 2) == "12/12 0/8"
    told = {"tune_right_of": "12/12 0/8", "tune_accuracy": 0.48, "tune_rows": 25}
    assert pooled_figure({"chest": told}) == pytest.approx(12 / 25)


def test_ties_go_to_the_later_round():
    figures = {"east": {"tune_right_of": "8/10 8/10"}}
    best = {"east": Best(1, 0.8, "state", "broadcast")}
    assert better_for_all(Phase("train", 2), figures, {"east": Payload({}, {})}, best)["east"].round == 2
    worse = {"east": {"tune_right_of": "8/10 7/10"}}
    assert better_for_all(Phase("train", 2), worse, {"east": Payload({}, {})}, best) == {}


def test_a_method_that_learns_a_backbone_refuses_it(tmp_path, ward):
    words = ("run", "fedmae", "--data", ward, "--out", tmp_path / "run", "--select", "pooled")
    assert "whose round a probe chooses" in edgefl_train(*words).sentence()


def test_a_column_may_be_of_the_further_answers():
    """`further` in a column of an experiment: figures of each site's own round, nothing where a run has none."""
    own = {"sites": {"east": {"accuracy": 0.9}, "west": {"accuracy": 0.7}}, "pooled": {"accuracy": 0.85}}
    first = {"sites": {"east": {"accuracy": 0.6}, "west": {"accuracy": 0.8}}, "pooled": {"accuracy": 0.75}}
    runs = [Measurement(seed=0, summary={**first, "further": {"own_round": own}}, lines=())]
    column = {"name": "x", "further": "own_round"}
    assert cell_of(Column(figure="mean", **column), "accuracy", "seeds", runs).value == pytest.approx(0.8)
    assert cell_of(Column(figure="pooled", **column), "accuracy", "seeds", runs).value == 0.85
    assert cell_of(Column(name="x", figure="mean"), "accuracy", "seeds", runs).value == pytest.approx(0.7)
    plain = [Measurement(seed=0, summary=first, lines=())]
    assert cell_of(Column(figure="mean", **column), "accuracy", "seeds", plain).value is None
    with pytest.raises(SettingError, match="further answers have figures over sites or pooled"):
        Column(figure="rounds", target=0.5, **column)

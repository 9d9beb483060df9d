"""Methods that answer in more than one way: docs/methods.md 4.3, head and nearest prototype of the same run."""

import json

import pytest
from tests.trainer.conftest import edgefl_train, run

from edgefl_trainer.contract import declared
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.methods import METHODS

THRESHOLD = {"refer_above", "referral"}


@pytest.fixture(scope="module")
def both(tmp_path_factory, ward, mae):
    """Two `fedproto` runs of one seed: the head answers first, or the nearest prototype does."""
    root = tmp_path_factory.mktemp("proto")
    for way in ("head", "nearest"):
        outcome = run("fedproto", ward, root / way, f"run:{mae}", "--set", f"predict={way}", "--json")
        assert outcome.code == 0, outcome.err
    return root


def figures(summary: dict) -> dict:
    """All but what needs a kept threshold, which the first answer alone has."""
    kept = ("mean_balanced_accuracy", "std_balanced_accuracy", "pooled", "mean_balanced_accuracy_interval")
    return {"sites": without_threshold(summary["sites"]), **{key: summary[key] for key in kept}}


def without_threshold(sites: dict) -> dict:
    return {site: {k: v for k, v in found.items() if k not in THRESHOLD} for site, found in sites.items()}


def test_one_run_reports_head_and_nearest_prototype(both):
    """Each stands beside the other, with the figures it has as first answer: per site, pooled, over sites."""
    first, other = (json.loads((both / way / "summary.json").read_text()) for way in ("head", "nearest"))
    assert first["state_sha256"] == other["state_sha256"]
    assert list(first["further"]) == ["nearest"]
    assert list(other["further"]) == ["head"]
    assert figures(first["further"]["nearest"]) == figures(other)
    assert figures(other["further"]["head"]) == figures(first)
    assert figures(first) != figures(other)


def test_evaluation_judges_every_answer(both, ward):
    summary = json.loads((both / "head" / "summary.json").read_text())
    found = edgefl_train("evaluate", both / "head", "--data", ward, "--json").json()
    assert figures(found) == figures(summary)
    assert figures(found["further"]["nearest"]) == figures(summary["further"]["nearest"])
    said = edgefl_train("evaluate", both / "head", "--data", ward).out
    assert f"further answers, nearest: mean {100 * found['further']['nearest']['mean_balanced_accuracy']:.1f} %" in said


def test_the_table_has_a_row_for_each_answer(both):
    found = edgefl_train("table", both / "head", "--format", "json").json()
    summary = json.loads((both / "head" / "summary.json").read_text())
    rows = {row["method"]: row["mean"]["mean"] for row in found["rows"]}
    assert rows == {
        "fedproto": summary["mean_balanced_accuracy"],
        "fedproto, nearest": summary["further"]["nearest"]["mean_balanced_accuracy"],
    }


def test_a_further_model_is_no_site_and_can_be_read(both):
    opened = open_run(both / "head")
    assert (opened.sites, opened.further) == (("east", "west"), ("nearest",))
    assert opened.predictor("east").module.options.output == "evidential"
    assert opened.predictor("east", "nearest").module.options.output == "softmax"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_who_offers_answers_classifies(name):
    kind = METHODS[name]
    assert not (declared(kind).further_predictors and declared(kind).encoder)


def test_a_last_phase_at_home_is_named(tmp_path, ward, mae):
    """`fedavgpers` under `--select last`: the model is that of the final phase, R + 1; of `fedavg` that of round R."""
    found = {name: run(name, ward, tmp_path / name, f"run:{mae}", "--json").json() for name in ("fedavg", "fedavgpers")}
    kept = {
        name: {(site["selected_phase"], site["selected_round"]) for site in one["sites"].values()}
        for name, one in found.items()
    }
    assert kept == {"fedavg": {("train", 2)}, "fedavgpers": {("final", 3)}}
    said = edgefl_train("evaluate", tmp_path / "fedavgpers", "--data", ward).out
    assert said.count("final phase") == 2

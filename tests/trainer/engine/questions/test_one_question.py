"""A site with a single question, from end to end: docs/methods.md 11.2, docs/reference/data.md."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from tests.trainer.conftest import edgefl_train, make_asked

from edgefl_trainer.engine.models import open_run

TINY = ("--preset", "tiny", "--image-px", "36", "--backbone", "tiny", "--device", "cpu", "--rounds", "2")
SMALL = ("--set", "width=32", "--set", "heads=2", "--set", "batch=8")
METHODS = ("local", "pfl-vqa")


@pytest.fixture(scope="module")
def lone(tmp_path_factory, cached) -> Path:
    """Two sites, and `rad-abdomen` with one open question about one picture."""
    root = make_asked(tmp_path_factory.mktemp("lone"), {"HEAD": 10, "CHEST": 9, "ABD": 1})
    asked = json.loads((root / "trainset.json").read_text())
    kept = [one for one in asked if one["image_organ"] != "ABD" or one["answer_type"] == "OPEN"]
    (root / "trainset.json").write_text(json.dumps(kept))
    return root


@pytest.fixture(scope="module")
def ran(lone, tmp_path_factory):
    """What `run` said of each method, and where."""
    folder = tmp_path_factory.mktemp("lone-runs")
    found = {}
    for method in METHODS:
        found[method] = edgefl_train(
            "run", method, "--data", f"vqa-rad:{lone}", *TINY, *SMALL, "--out", folder / method
        )
        assert found[method].code == 0, found[method].err
    return folder, found


def test_the_survey_warns_of_it(lone):
    assert (
        "site rad-abdomen has 1 question: too few to learn from and to judge on"
        in edgefl_train("data", f"vqa-rad:{lone}").err
    )


@pytest.mark.parametrize("method", METHODS)
def test_it_learns_from_its_question_and_is_judged_on_none(method, ran):
    folder, said = ran
    found = json.loads((folder / method / "summary.json").read_text())
    one, *others = (found["sites"][name] for name in ("rad-abdomen", "rad-chest", "rad-head"))
    assert (one["n_train"], one["n_test"], one["accuracy"], one["accuracy_interval"]) == (1, 0, None, None)
    assert one["took_part"] == {"rounds": 2, "of": 2} and one["classes_learned"] == 1
    assert found["mean_accuracy"] == pytest.approx(np.mean([site["accuracy"] for site in others]))
    assert found["sites_without_figures"] == 1
    assert "warning: site rad-abdomen has no test row, so it has no figures" in said[method].err
    [line] = [line for line in said[method].out.splitlines() if line.startswith("rad-abdomen")]
    assert "no test question" in line
    judged = edgefl_train("table", folder / method)
    assert judged.code == 0 and f"| {method} | – |" in judged.out


@pytest.mark.parametrize("method", METHODS)
def test_its_model_has_no_threshold_and_can_say_one_answer(method, ran):
    """Nothing is left to choose a temperature or a threshold on: the largest entropy there is refuses no answer."""
    run = open_run(ran[0] / method)
    assert run.calibration["sites"]["rad-abdomen"] == {"temperature": 1.0, "refer_above": math.log(5)}
    assert sum(run.predictor("rad-abdomen").seen) == 1


@pytest.mark.parametrize("method", METHODS)
def test_evaluate_judges_it_on_questions_of_another_file(method, ran, lone, tmp_path):
    """One test question is a figure without an interval; the other sites have none in this file."""
    [first] = [one for one in json.loads((lone / "trainset.json").read_text()) if one["image_organ"] == "ABD"]
    (tmp_path / "testset.json").write_text(json.dumps([first]))
    found = edgefl_train(
        "evaluate", ran[0] / method, "--data", f"vqa-rad:{lone}", "--data", f"vqa-rad:{tmp_path}@split=test", "--json"
    )
    assert found.code == 0, found.err
    assert "site rad-abdomen has one answer in its training rows, " in found.err and "one class" not in found.err
    sites = found.json()["sites"]
    assert {name: site["n_test"] for name, site in sites.items()} == {"rad-abdomen": 1, "rad-chest": 0, "rad-head": 0}
    assert (sites["rad-abdomen"]["accuracy"], sites["rad-abdomen"]["accuracy_interval"]) == (1.0, None)
    again = edgefl_train("evaluate", ran[0] / method, "--data", f"vqa-rad:{lone}", "--json").json()["sites"]
    kept = json.loads((ran[0] / method / "summary.json").read_text())["sites"]
    assert {name: site["accuracy"] for name, site in again.items()} == {n: s["accuracy"] for n, s in kept.items()}

"""Figures of answers against counts by hand, and the usual answer's row in a table. Source: docs/methods.md 11.4."""

import json

import numpy as np
import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.evaluate.answer_figures import answer_figures, answer_summary, usual_answers, usual_runs
from edgefl_trainer.evaluate.intervals import AskedRows, Scored, pooled
from edgefl_trainer.evaluate.site_figures import figures_of_sites
from edgefl_trainer.evaluate.tables.rows import usual_metric
from edgefl_trainer.evaluate.tables.shares import share_text
from edgefl_trainer.evaluate.tables.text import render_table


def scored(target: list[int], predicted: list[int], closed: list[bool], usual: list[int], images: str) -> Scored:
    probabilities = np.full((len(target), 4), 0.25, np.float32)
    asked = AskedRows(np.array(closed), np.array(usual))
    return Scored(probabilities, np.array(target), np.array(predicted), None, tuple(images), asked)


ONE = scored([0, 1, 2, 3], [0, 1, 0, 0], [True, True, False, False], [0, 0, 2, 2], "aabb")
OTHER = scored([0, 0], [0, 0], [True, True], [1, 0], "cd")


def test_shares_are_those_of_each_kind_of_question():
    found = answer_figures(ONE)
    assert (found["accuracy_open_questions"], found["accuracy_closed_questions"]) == (0.0, 1.0)
    assert (found["n_open_questions"], found["n_closed_questions"]) == (2, 2)
    usual = found["usual_answer"]
    assert (usual["accuracy"], usual["accuracy_open_questions"], usual["accuracy_closed_questions"]) == (0.5, 0.5, 0.5)
    assert answer_figures(OTHER)["accuracy_open_questions"] is None
    assert answer_figures(OTHER)["accuracy_open_questions_interval"] is None


def test_intervals_draw_pictures_with_all_their_questions():
    """Of two pictures, whose questions are all right or all wrong, a quarter of the draws holds one of them alone."""
    rows = scored([0, 0, 0, 0], [0, 0, 1, 1], [True] * 4, [1] * 4, "aabb")
    assert answer_figures(rows)["accuracy_closed_questions_interval"] == [0.0, 1.0]


def test_answers_that_are_all_wrong_have_an_interval_of_the_pictures_they_are_about():
    """Not 0 to 0: of two pictures nobody knows more than that fewer than five in six are right. Of one, nothing."""
    wrong = scored([0, 0, 0, 0], [1, 1, 1, 1], [True] * 4, [0] * 4, "aabb")
    assert answer_figures(wrong)["accuracy_closed_questions_interval"] == pytest.approx([0.0, 1 - 0.025**0.5])
    assert answer_figures(wrong)["usual_answer"]["accuracy_interval"] == pytest.approx([0.025**0.5, 1.0])
    one_open = scored([0, 0, 0], [1, 0, 1], [True, True, False], [1] * 3, "aba")
    assert answer_figures(one_open)["accuracy_open_questions_interval"] is None
    assert answer_figures(one_open)["accuracy_closed_questions_interval"] == [0.0, 1.0]


def test_means_count_each_site_once():
    """Site b has no open question: it counts in the mean of the others alone."""
    sites = figures_of_sites({"a": ONE, "b": OTHER}, {"a": {}, "b": {}})["sites"]
    found = answer_summary(sites)
    assert (found["mean_accuracy"], found["worst_accuracy"]) == (0.75, 0.5)
    assert (found["mean_accuracy_open_questions"], found["mean_accuracy_closed_questions"]) == (0.0, 1.0)
    assert found["usual_answer"]["mean_accuracy"] == 0.5
    assert answer_summary({"a": {"accuracy": 1.0}}) == {}


def test_rows_of_several_sites_keep_what_was_asked():
    together = pooled([ONE, OTHER])
    assert together.asked.closed.tolist() == [True, True, False, False, True, True]
    assert together.take(np.array([5, 2])).asked.usual.tolist() == [0, 2]
    assert answer_figures(together)["usual_answer"]["accuracy"] == 0.5


def test_the_usual_answer_is_the_most_frequent_of_its_kind():
    """Of equal ones the first; of a kind that was never learned, the most frequent of all."""
    answers, kinds = np.array([2, 1, 1, 3, 0, 2, 2]), ["PRES", "PRES", "PRES", "SIZE", "SIZE", "PLANE", "PLANE"]
    assert usual_answers(answers, kinds, ["SIZE", "PRES", "PLANE", "COLOR"]).tolist() == [0, 1, 2, 2]
    assert usual_answers(np.zeros(0, np.int64), [], ["SIZE"]).tolist() == [-1]


def summary(seed: int) -> dict:
    report = figures_of_sites({"a": ONE, "b": OTHER}, {"a": {}, "b": {}})
    head = {"method": "pfl-vqa", "task": "all", "seed": seed, "rounds": 2, "preset": "tiny", "reported_rows": "test"}
    return {**head, **report, **answer_summary(report["sites"])}


def test_the_usual_answer_is_a_row_of_a_table():
    runs = [summary(0), summary(1), *({**summary(seed), "method": "local"} for seed in (0, 1))]
    assert [run["seed"] for run in usual_runs(runs)] == [0, 1]
    lines = render_table(runs, metric=usual_metric(runs)).splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines if line.startswith("|")}
    assert rows["pfl-vqa"].startswith("0.500") and rows["usual answer"].startswith("0.500") and "local" in rows
    assert "usual answer" not in render_table(
        [{"method": "local", "task": "all", "sites": {"a": {"balanced_accuracy": 0.5}}}]
    )


def row_of(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return line.split("|")


def test_a_table_of_answers_shows_accuracy(asked, tmp_path):
    given = ("--data", asked, "--preset", "tiny", "--image-px", "36", "--backbone", "tiny", "--device", "cpu")
    small = ("--set", "width=32", "--set", "heads=2", "--set", "batch=8", "--rounds", "1")
    for method in ("fedavg", "pfl-vqa"):
        done = edgefl_train("run", method, *given, *small, "--out", tmp_path / method)
        assert done.code == 0, done.err
        assert "usual" in done.out and "closed" in done.out
    done = edgefl_train("table", tmp_path)
    assert done.code == 0 and "Accuracy per site" in done.out and "| usual answer" in done.out
    done = edgefl_train("table", tmp_path, "--metric", "accuracy_open_questions")
    assert done.code == 0 and "Accuracy open questions per site" in done.out
    shares, cells = {}, {}
    for method in ("fedavg", "pfl-vqa"):
        found = json.loads((tmp_path / method / "summary.json").read_text())
        shares[method] = found["share_of_models"]
        cells[method] = [part.strip() for part in row_of(done.out, method)]
        assert share_text(found["share_of_models"]) in cells[method]
        assert share_text(found["share_of_full_models"]) in cells[method]
        assert 0 < found["share_of_full_models"] < found["share_of_models"]
    assert shares["fedavg"] == pytest.approx(1, abs=0.1) and shares["pfl-vqa"] < 0.1
    assert row_of(done.out, "usual answer").count(" 0 % ") == 2 and "`of what learns` is up / round" in done.out

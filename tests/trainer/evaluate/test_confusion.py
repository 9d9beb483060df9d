"""Which class is taken for which: counted by hand, and against scikit-learn's confusion matrix and recall."""

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, recall_score

from edgefl_trainer.evaluate.confusion import (
    MAX_CLASSES,
    confusions,
    pooled_matrix,
    recall_lines,
    recalls,
)
from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.tables.recalls import render_recall

CLASSES = ("MEL", "NV", "BCC")


def scored(target, predicted, classes=3) -> Scored:
    probabilities = np.full((len(target), classes), 1 / classes, np.float32)
    return Scored(probabilities, np.array(target), np.array(predicted), None, tuple(map(str, range(len(target)))))


def test_counts_are_scikit_learns_with_one_more_column_for_no_answer():
    rng = np.random.default_rng(0)
    target, predicted = rng.integers(0, 3, 200), rng.integers(-1, 3, 200)
    found = np.array(confusions({"a": scored(target, predicted)})["a"])
    np.testing.assert_array_equal(
        found, confusion_matrix(target, np.where(predicted < 0, 3, predicted), labels=[0, 1, 2, 3])[:3]
    )
    recalls = recall_score(target, predicted, labels=[0, 1, 2], average=None)
    for line, name, recall in zip(recall_lines(found, CLASSES), CLASSES, recalls, strict=True):
        assert line.split()[0] == name and f"{recall:.1%}" in line


def test_sites_add_up_and_a_line_says_what_a_class_is_taken_for():
    found = confusions({"a": scored([0, 0, 1], [1, 1, 1]), "b": scored([0, 1, 1], [0, -1, 1])})
    matrix = pooled_matrix(found)
    assert matrix.tolist() == [[1, 2, 0, 0], [0, 2, 0, 1], [0, 0, 0, 0]]
    assert recall_lines(matrix, CLASSES) == [
        "  MEL    33.3% of 3   most often taken for NV: 66.7%",
        "  NV     66.7% of 3   most often taken for no answer: 33.3%",
        "  BCC  no test picture",
    ]
    assert recall_lines(matrix, CLASSES, kind="val")[2] == "  BCC  no val picture"


def test_classes_that_share_the_place_are_all_named() -> None:
    matrix = np.array([[2, 1, 1, 0], [0, 4, 0, 0], [1, 1, 1, 1]])
    assert recall_lines(matrix, CLASSES) == [
        "  MEL    50.0% of 4   most often taken for NV and BCC: 25.0% each",
        "  NV    100.0% of 4",
        "  BCC    25.0% of 4   most often taken for MEL, NV and no answer: 25.0% each",
    ]


def test_a_line_says_how_sure_a_recall_is_or_why_nobody_knows():
    """docs/methods.md 8.4: few lesions, or rows that are all alike, give no interval."""
    matrix = np.array([[20, 10, 0, 0], [0, 30, 0, 0], [2, 0, 1, 0]])
    assert recall_lines(matrix, CLASSES, [[0.5, 0.8], None, None]) == [
        "  MEL    66.7% (50.0% to 80.0%)               of 30   most often taken for NV: 33.3%",
        "  NV    100.0% (no interval: all are right)   of 30",
        "  BCC    33.3% (no interval: too few lesions) of 3   most often taken for MEL: 66.7%",
    ]


def test_recalls_stand_beside_the_other_figures():
    rng = np.random.default_rng(0)
    rows = scored(rng.integers(0, 2, 80), rng.integers(-1, 2, 80))
    found = recalls(rows)
    wanted = recall_score(rows.target, rows.predicted, labels=[0, 1], average=None)
    assert found["recall"] == [*map(pytest.approx, wanted), None]
    assert found["recall_interval"][2] is None
    assert all(low < share < high for share, (low, high) in zip(wanted, found["recall_interval"][:2], strict=True))
    assert set(recalls(scored([0], [0], MAX_CLASSES + 1)).values()) == {None}


def test_many_classes_are_not_kept():
    assert confusions({"a": scored([0], [0], MAX_CLASSES + 1)}) is None


def test_runs_stand_with_their_recalls_in_one_table():
    run = {
        "method": "local", "seed": 0, "sites": {}, "classes": list(CLASSES),
        "confusion": {"a": [[1, 1, 0, 0], [0, 3, 0, 1], [0] * 4]},
        "pooled": {"balanced_accuracy": 0.625, "balanced_accuracy_interval": [0.25, 1.0]},
    }  # fmt: skip
    assert "| local | 0 | 0.500 | 0.750 | – | 0.625 (0.250 to 1.000) |" in render_recall([run])
    assert render_recall([{**run, "confusion": None}]) == ""
    assert render_recall([run, {**run, "classes": ["a", "b", "c"]}]) == ""

"""What a federation gives as a referral: lines drawn on tune rows, areas and shares by hand."""

import numpy as np
import pytest
from benchmarks.federation.referred_diagnoses import Arm, area, referred, spared_line, table
from sklearn.metrics import roc_auc_score

from edgefl_trainer.engine.judging.suspicion import KeptScores
from edgefl_trainer.evaluate.intervals import Scored

CLASSES = ("NV", "MEL", "BKL")
ASKS = np.array([False, True, False])


def scored(melanoma: list[float], target: list[int]) -> Scored:
    """Rows whose probability of melanoma is given; of the rest nevus has two thirds."""
    p = np.array(melanoma)
    probabilities = np.stack([(1 - p) * 2 / 3, p, (1 - p) / 3], axis=1)
    lesions = tuple(map(str, range(len(p))))
    return Scored(probabilities, np.array(target), probabilities.argmax(axis=1), None, lesions)


FIRST = scored([0.9, 0.3, 0.2, 0.6, 0.1], [1, 1, 0, 0, 2])
SECOND = scored([0.2, 0.1, 0.7], [1, 0, 0])


def test_four_in_five_benign_tune_rows_lie_at_or_below_the_line() -> None:
    """Ten benign rows, 0.0 to 0.9, and a melanoma at 1.0 that has no say: the line is at 0.7 or between it and 0.8."""
    p = np.array([*np.arange(10) / 10, 1.0])
    probabilities = np.stack([1 - p, p, 0 * p], axis=1).astype(np.float32)
    tune = KeptScores(probabilities, probabilities.argmax(axis=1), np.array([0] * 10 + [1]))
    line = spared_line(tune, ASKS)
    assert (p[:10] <= line + 1e-6).sum() in (8, 9)
    with pytest.raises(ValueError, match="no benign"):
        spared_line(KeptScores(probabilities, tune.predicted, np.ones(11, int)), ASKS)


def test_the_rule_of_the_product_refers_a_named_melanoma_below_its_line() -> None:
    """Row 0 of the first centre is named melanoma, row 3 too; the line of 0.95 would refer nobody."""
    arm = Arm({"a": FIRST}, {"a": 0.95}, {"a": 0.25})
    assert referred(arm, ASKS, by_product=True).tolist() == [True, False, False, True, False]
    assert referred(arm, ASKS, by_product=False).tolist() == [True, True, False, True, False]


def test_an_area_is_the_mean_of_the_centres_and_not_that_of_all_rows() -> None:
    arm = Arm({"a": FIRST, "b": SECOND}, {}, {})
    value, draws = area(arm, ASKS)
    each = [roc_auc_score(one.target == 1, one.probabilities[:, 1]) for one in (FIRST, SECOND)]
    both = roc_auc_score(
        np.r_[FIRST.target, SECOND.target] == 1, np.r_[FIRST.probabilities, SECOND.probabilities][:, 1]
    )
    assert value == pytest.approx(100 * np.mean(each)) and value != pytest.approx(100 * both)
    assert np.nanmin(draws) >= 0 and np.nanmax(draws) <= 100


def test_a_shift_of_all_scores_changes_what_is_named_and_no_area_nor_the_equal_line() -> None:
    """The point of the table: an arm that only draws its line elsewhere differs by nothing at the same line."""
    shifted = scored([0.9 * p for p in (0.9, 0.3, 0.2, 0.6, 0.1)], [1, 1, 0, 0, 2])
    one = Arm({"a": FIRST}, {"a": 0.5}, {"a": 0.25})
    other = Arm({"a": shifted}, {"a": 0.5}, {"a": 0.225})
    lines = [
        [cell.strip() for cell in text.strip("|").split("|")]
        for text in table(CLASSES, [[one], [other], [other]]).splitlines()[2:]
    ]
    assert [line[-2].split(" ")[0] for line in lines if line[0].startswith("area") or "80%" in line[0]] == ["+0.0"] * 5
    assert lines[2][:2] == ["referred by the rule of `edgefl score`: suspicious", "2"]
    assert lines[2][2:5] == ["50.0", "50.0", "50.0"]
    assert lines[4][2:5] == ["66.7", "66.7", "66.7"]


def test_of_two_seeds_a_line_is_drawn_for_each() -> None:
    """By one seed both melanomas are referred, by the other one of them; the fitted arm has the first seed twice."""
    low, high = Arm({"a": FIRST}, {"a": 0.5}, {"a": 0.25}), Arm({"a": FIRST}, {"a": 0.5}, {"a": 0.5})
    lines = [
        [cell.strip() for cell in text.strip("|").split("|")]
        for text in table(CLASSES, [[low, high], [low, high], [low, low]]).splitlines()[2:]
    ]
    (found,) = [line for line in lines if line[0].startswith("referred where 80%") and line[0].endswith("MEL")]
    assert found[1:5] == ["2", "75.0", "75.0", "100.0"]
    assert found[5].startswith("+25.0 [") and found[6] == "+0.0, +50.0"

"""The risk-coverage curve and what a threshold refers, by ten explicit lines and by scikit-learn.

Source: Geifman and El-Yaniv, arXiv 1705.08500; Mann and Whitney 1947.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.metrics import area_under_risk_coverage, expected_calibration_error
from edgefl_trainer.evaluate.risk_coverage import CURVE, curves_of, referral_figures, risk_at, told_apart

levels = st.integers(0, 4).map(float)
rows = st.lists(st.tuples(levels, st.booleans(), st.integers(0, 3)), min_size=1, max_size=20).filter(
    lambda found: sum(weight for *_, weight in found) > 0
)


def explicit_risk(uncertainty, wrong, weights, coverage) -> float:
    """Walk up the levels; of the last one take as much of its mean error as is still wanted."""
    wanted = left = coverage * sum(weights)
    errors = 0.0
    for level in sorted(set(uncertainty)):
        here = [i for i, value in enumerate(uncertainty) if value == level]
        many, bad = sum(weights[i] for i in here), sum(weights[i] for i in here if wrong[i])
        part = min(1.0, left / many) if many else 0.0
        errors, left = errors + part * bad, left - part * many
    return errors / wanted


@given(rows, st.sampled_from([0.05, 0.3, 0.7, 0.9, 1.0]))
def test_the_risk_is_that_of_a_walk_up_the_levels(found, coverage):
    uncertainty, wrong, weights = (list(side) for side in zip(*found, strict=True))
    risk = risk_at(np.array(uncertainty), np.array(wrong), np.array([weights], dtype=float), [coverage])
    assert risk == pytest.approx(explicit_risk(uncertainty, wrong, weights, coverage), abs=1e-9)


def test_the_mean_over_all_coverages_is_the_area_under_the_curve():
    """`aurc`, methods.md 8.4, is the mean risk at coverages i/B."""
    rng = np.random.default_rng(0)
    uncertainty, wrong = rng.random(40), rng.random(40) < 0.3
    risk = risk_at(uncertainty, wrong, np.ones((1, 40)), [i / 40 for i in range(1, 41)])
    assert risk.mean() == pytest.approx(area_under_risk_coverage(uncertainty, ~wrong))


@given(rows, rows)
def test_pictures_are_told_apart_as_scikit_learn_says(inside, outside):
    values, repeats = ([[row[i] for row in side] for side in (inside, outside)] for i in (0, 2))
    area = told_apart(*map(np.array, values), *(np.array([weights], dtype=float) for weights in repeats))
    told = [np.repeat(*pair) for pair in zip(values, repeats, strict=True)]
    foreign = np.repeat([0, 1], [len(one) for one in told])
    assert area[0] == pytest.approx(roc_auc_score(foreign, np.concatenate(told)))


def scored(vacuity, right) -> Scored:
    target = np.zeros(len(vacuity), dtype=np.int64)
    predicted = np.where(right, 0, 1)
    probabilities = np.tile([0.7, 0.3], (len(vacuity), 1))
    return Scored(probabilities, target, predicted, np.array(vacuity), tuple(map(str, range(len(vacuity)))))


def test_a_threshold_refers_what_lies_above_it_and_the_rest_has_its_own_error():
    """Of 10 rows 4 lie above 0.5, and one of the other 6 is wrong; one at the threshold stays."""
    found = referral_figures(scored([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9], [0] + [1] * 7 + [0, 0]), 0.5)
    assert (found["above"], found["referred"], found["error"]) == (0.5, 0.4, pytest.approx(1 / 6))
    for name in ("referred", "error"):
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high and low < high


def test_what_has_no_evidence_is_referred_whatever_the_threshold():
    """methods.md 1.8: from a vacuity of 0.999 nothing is predicted."""
    assert referral_figures(scored([0.5, 0.9995], [1, 1]), 0.9999)["referred"] == 0.5


def test_nothing_left_and_no_row_have_no_error():
    assert referral_figures(scored([0.5, 0.6], [1, 0]), 0.1)["error"] is None
    empty = Scored(np.zeros((0, 2)), np.zeros(0, np.int64), np.zeros(0, np.int64), None, ())
    assert referral_figures(empty, 0.5) == {"above": 0.5} | dict.fromkeys(
        ["referred", "referred_interval", "error", "error_interval"]
    )
    assert curves_of(empty) is None


def test_a_kept_curve_ends_at_the_error_and_its_bins_make_the_calibration_error():
    rng = np.random.default_rng(1)
    top = rng.uniform(0.5, 1, 60)
    right = rng.random(60) < top
    target = np.zeros(60, dtype=np.int64)
    given = Scored(np.stack([top, 1 - top], 1), target, np.where(right, 0, 1), 1 - top, tuple(map(str, range(60))))
    found = curves_of(given)
    assert len(found["risk"]) == len(CURVE) and found["risk"][-1] == pytest.approx(1 - right.mean())
    error = sum(count * abs(said - hit) for count, said, hit in found["reliability"]) / 60
    assert error == pytest.approx(expected_calibration_error(top, right))

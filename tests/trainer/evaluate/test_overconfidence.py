"""Overconfidence: docs/methods.md 8.4 and docs/decisions/0075, by hand and on rows whose calibration is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.metrics import expected_calibration_error
from edgefl_trainer.evaluate.overconfidence import overconfidence
from edgefl_trainer.evaluate.site_figures import figures_of_sites


def scored(probabilities, target, lesions=None, predicted=None):
    """Rows that name the likeliest class where nothing else is given; each its own lesion where none are named."""
    names = tuple(f"L{i}" for i in (range(len(target)) if lesions is None else lesions))
    named = np.asarray(probabilities).argmax(axis=1) if predicted is None else np.asarray(predicted)
    return Scored(np.asarray(probabilities), np.asarray(target), named, None, names)


def drawn(rows, seed, shift=0.0):
    """Rows of two classes that are right as often as the probability of class 0 says, but for a shift."""
    draws = np.random.default_rng(seed)
    first = draws.uniform(0.55, 0.9, rows)
    target = (draws.uniform(size=rows) >= first).astype(int)
    return scored(np.stack([first + shift, 1 - first - shift], axis=1), target)


def test_by_hand():
    """Named classes have 0.9, 0.6 and 0.8, and the first two are right: 2.3/3 - 2/3. Three lesions have no interval."""
    found = overconfidence(scored([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1]))
    assert found["overconfidence"] == pytest.approx(2.3 / 3 - 2 / 3) and found["overconfidence_interval"] is None
    assert found["shown_probability"] == pytest.approx(2.3 / 3)


def test_it_is_of_the_class_that_is_named_and_of_rows_with_an_answer():
    """The likeliest class was never seen at the site: the first is named, with 0.375, and right. One row abstains."""
    rows = np.tile([0.375, 0.208, 0.417], (21, 1))
    found = overconfidence(scored(rows, np.zeros(21, int), predicted=[0] * 20 + [-1]))
    assert found["shown_probability"] == pytest.approx(0.375)
    assert found["overconfidence"] == pytest.approx(0.375 - 1) and found["overconfidence_interval"][1] < -0.05
    nothing = overconfidence(scored(rows, np.zeros(21, int), predicted=[-1] * 21))
    assert set(nothing.values()) == {None}


@pytest.mark.parametrize("rows", [10, 20, 40])
def test_a_small_test_in_which_all_is_right_is_not_called_off(rows):
    """Calibrated rows of 0.8 to 0.98: the warning of docs/decisions/0075 is given to at most one set in twenty."""
    warned = 0
    for seed in range(300):
        draws = np.random.default_rng(seed)
        first = draws.uniform(0.8, 0.98, rows)
        target = (draws.uniform(size=rows) >= first).astype(int)
        low, high = overconfidence(scored(np.stack([first, 1 - first], axis=1), target))["overconfidence_interval"]
        warned += low > 0.05 or high < -0.05
    assert warned <= 15


@pytest.mark.parametrize("right", [True, False])
def test_all_right_or_all_wrong_has_scipys_exact_interval(right):
    """scipy.stats.binomtest, Clopper and Pearson, with lesions as trials: two pictures of each here."""
    found = overconfidence(
        scored(np.tile([0.7, 0.3], (40, 1)), np.full(40, 0 if right else 1), np.repeat(range(20), 2))
    )
    exact = binomtest(20 if right else 0, 20).proportion_ci(0.95, "exact")
    assert found["overconfidence_interval"] == pytest.approx([0.7 - exact.high, 0.7 - exact.low])


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.04])
def test_the_shift_of_known_probabilities_is_found(shift):
    found = overconfidence(drawn(20_000, seed=1, shift=shift))
    low, high = found["overconfidence_interval"]
    assert low < shift < high and high - low < 0.02


def test_few_calibrated_rows_are_not_called_off():
    """What the calibration error cannot do: of 75 rows it is 0.05 or more in nearly every draw, and this is around 0.

    The interval holds 0 in about 95 % of the draws; of 200, fewer than 180 would be a chance of one in a thousand.
    """
    sets = [drawn(75, seed) for seed in range(200)]
    errors = [expected_calibration_error(one.probabilities.max(axis=1), one.predicted == one.target) for one in sets]
    intervals = [overconfidence(one)["overconfidence_interval"] for one in sets]
    assert np.mean(np.array(errors) > 0.05) > 0.9
    assert sum(low <= 0 <= high for low, high in intervals) >= 180


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 30), classes=st.integers(2, 5))
def test_it_is_mean_top_probability_less_accuracy_and_within_the_calibration_error(seed, rows, classes):
    draws = np.random.default_rng(seed)
    probabilities = draws.dirichlet(np.ones(classes), rows)
    rows_of = scored(probabilities, draws.integers(0, classes, rows))
    right = rows_of.predicted == rows_of.target
    found = overconfidence(rows_of)["overconfidence"]
    assert found == pytest.approx(probabilities.max(axis=1).mean() - right.mean())
    assert abs(found) <= expected_calibration_error(probabilities.max(axis=1), right) + 1e-12


def test_nine_lesions_have_no_interval_and_no_row_no_figure():
    few = scored([[0.9, 0.1]] * 18, [0, 1] * 9, np.repeat(range(9), 2))
    assert overconfidence(few)["overconfidence_interval"] is None
    assert set(overconfidence(scored(np.empty((0, 2)), np.empty(0, int))).values()) == {None}


def test_summary_states_it_of_each_site_and_of_all_rows():
    """docs/design.md 6: where the card takes it from."""
    rows = {"a": drawn(60, 1), "b": drawn(60, 2, shift=0.08)}
    found = figures_of_sites(rows, {name: {"held_out": False} for name in rows})
    for name, one in rows.items():
        assert overconfidence(one).items() <= found["sites"][name].items()
        assert found["sites"][name]["shown_probability"] == pytest.approx(one.probabilities.max(axis=1).mean())
    mean = np.mean([overconfidence(one)["overconfidence"] for one in rows.values()])
    assert found["pooled"]["overconfidence"] == pytest.approx(mean)

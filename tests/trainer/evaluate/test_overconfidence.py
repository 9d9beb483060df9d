"""Overconfidence: docs/methods.md 8.4 and docs/decisions/0075, by hand and on rows whose calibration is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.metrics import expected_calibration_error
from edgefl_trainer.evaluate.overconfidence import overconfidence
from edgefl_trainer.evaluate.site_figures import figures_of_sites


def scored(probabilities, target, lesions=None):
    """Rows without abstentions; each its own lesion where none are named."""
    names = tuple(f"L{i}" for i in (range(len(target)) if lesions is None else lesions))
    return Scored(np.asarray(probabilities), np.asarray(target), np.asarray(probabilities).argmax(axis=1), None, names)


def drawn(rows, seed, shift=0.0):
    """Rows of two classes that are right as often as the probability of class 0 says, but for a shift."""
    draws = np.random.default_rng(seed)
    first = draws.uniform(0.55, 0.9, rows)
    target = (draws.uniform(size=rows) >= first).astype(int)
    return scored(np.stack([first + shift, 1 - first - shift], axis=1), target)


def test_by_hand():
    """Likeliest classes have 0.9, 0.6 and 0.8, and the first two are right: 2.3/3 - 2/3."""
    found = overconfidence(scored([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]], [0, 1, 1]))
    assert found["overconfidence"] == pytest.approx(2.3 / 3 - 2 / 3)
    low, high = found["overconfidence_interval"]
    assert -0.4 - 1e-9 <= low < 0.1 < high <= 0.8 + 1e-9  # all draws of row two, all of row three


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


def test_one_lesion_has_no_interval_and_no_row_no_figure():
    assert overconfidence(scored([[0.9, 0.1], [0.9, 0.1]], [0, 0], (1, 1)))["overconfidence_interval"] is None
    nothing = overconfidence(scored(np.empty((0, 2)), np.empty(0, int)))
    assert nothing == {"overconfidence": None, "overconfidence_interval": None}


def test_summary_states_it_of_each_site_and_of_all_rows():
    """docs/design.md 6: where the card takes it from, and `open_accuracy` beside it."""
    rows = {"a": drawn(60, 1), "b": drawn(60, 2, shift=0.08)}
    found = figures_of_sites(rows, {name: {"held_out": False} for name in rows})
    for name, one in rows.items():
        assert overconfidence(one).items() <= found["sites"][name].items()
        mean_top = one.probabilities.max(axis=1).mean()
        assert found["sites"][name]["open_accuracy"] + overconfidence(one)["overconfidence"] == pytest.approx(mean_top)
    assert found["pooled"]["overconfidence"] == pytest.approx(
        np.mean([overconfidence(one)["overconfidence"] for one in rows.values()])
    )

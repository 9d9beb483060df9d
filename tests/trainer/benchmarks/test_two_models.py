"""A centre that has two models: the better on its `tune` rows, the mean of two answers, by hand."""

import numpy as np
import pytest
from benchmarks.federation.two_models import better_on_tune, mean_answers, rows_of_two

from edgefl_trainer.evaluate.intervals import Scored

LESIONS = ("a", "b", "c", "d")


def answers(first: list[float], lesions: tuple[str, ...] = LESIONS) -> Scored:
    """Four rows, the first two of class 0, and what is said for class 0."""
    probabilities = np.stack([np.array(first), 1 - np.array(first)], axis=1)
    return Scored(probabilities, np.array([0, 0, 1, 1]), probabilities.argmax(axis=1), None, lesions)


RIGHT, WRONG = answers([0.9, 0.9, 0.1, 0.1]), answers([0.3, 0.3, 0.6, 0.6])


def test_each_centre_takes_the_model_that_its_tune_rows_prefer():
    own, shared = {"x": RIGHT, "y": RIGHT}, {"x": WRONG, "y": WRONG}
    chosen = better_on_tune([(own, {"x": 0.7, "y": 0.7}), (shared, {"x": 0.8, "y": 0.7})])
    assert chosen["x"] is WRONG, "the choice does not look at reported rows"
    assert chosen["y"] is RIGHT, "of equals the first stays"


def test_the_mean_answer_is_that_of_the_mean_probabilities():
    mean = mean_answers([{"x": RIGHT}, {"x": WRONG}])["x"]
    assert mean.probabilities[:, 0] == pytest.approx([0.6, 0.6, 0.35, 0.35])
    assert list(mean.predicted) == [0, 0, 1, 1], "the surer model wins"
    with pytest.raises(ValueError, match="the same rows"):
        mean_answers([{"x": RIGHT}, {"x": answers([0.5] * 4, LESIONS[::-1])}])


def test_a_row_for_each_way_with_the_difference_of_each_seed():
    """Alone is wrong with seed 1 alone: 50 in the mean. The federation is right, but its tune rows say so once."""
    alone = {0: {"x": RIGHT}, 1: {"x": WRONG}}
    together = {0: {"x": RIGHT}, 1: {"x": RIGHT}}
    tune = {("alone", 0): 0.5, ("alone", 1): 0.5, ("together", 0): 0.4, ("together", 1): 0.6}
    rows = rows_of_two(alone, together, lambda arm, seed: {"x": tune[arm, seed]})
    assert [row[1].split(" ")[0] for row in rows] == ["50.0", "100.0", "100.0", "100.0", ""]
    assert [row[3] for row in rows[1:4]] == ["+0.0, +100.0"] * 3 and rows[4][2:] == [
        "+0.0 [+0.0 to +0.0]",
        "+0.0, +0.0",
    ]
    assert rows_of_two({0: alone[0]}, together, lambda arm, seed: {}) == [], "two of its own need two seeds"

"""What a federation gives each diagnosis: recalls and their paired difference by hand, and what no picture taught."""

from types import SimpleNamespace

import numpy as np
import pytest
from rare_diagnoses import figures, gap_of, recall, recall_draws, untaught

from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, lesion_weights

TARGET = np.array([0, 0, 0, 0, 1, 1, 2, 2])
LESIONS = ("a", "a", "b", "c", "d", "e", "f", "g")


def answered(predicted: list[int]) -> Scored:
    given = np.array(predicted)
    return Scored(np.eye(3)[given], TARGET, given, None, LESIONS)


GOOD, POOR = answered([0, 0, 0, 1, 1, 1, 2, 0]), answered([0, 0, 1, 1, 1, 0, 0, 0])


def test_a_recall_and_its_draws_are_those_of_the_rows_repeated():
    assert (recall(GOOD, 0), recall(GOOD, 2)) == (0.75, 0.5)
    weights = np.concatenate(list(lesion_weights(LESIONS, RESAMPLES))).astype(int)
    by_hand = []
    for row in weights:
        again = np.repeat(np.arange(8), row)
        true = TARGET[again] == 2
        by_hand.append((GOOD.predicted[again][true] == 2).mean() if true.any() else np.nan)
    np.testing.assert_allclose(recall_draws(GOOD, 2), by_hand)


def test_a_difference_is_paired():
    """Equal answers differ by nothing in each draw; of two thirds of the draws of class 1 one answer is lost."""
    same = gap_of(GOOD, GOOD, 1)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    gap = gap_of(GOOD, POOR, 1)
    assert gap.value == pytest.approx(50) and gap.low == 0 and gap.high == 100


def federation(train: dict[str, list[int]]) -> SimpleNamespace:
    labels = np.array([0, 1, 2, 0])
    sites = {name: SimpleNamespace(train=np.array(rows)) for name, rows in train.items()}
    return SimpleNamespace(classes=("NV", "MEL", "DF"), labels=labels, sites=sites)


def test_rows_are_counted_that_their_own_centre_never_saw():
    """`x` learned from rows of NV and MEL, `y` from all: the two rows of DF at `x` are the ones."""
    found = untaught(federation({"x": [0, 1], "y": [0, 1, 2]}), {"x": GOOD, "y": GOOD})
    assert found == {0: 0, 1: 0, 2: 2}


def test_the_table_begins_with_the_rarest_and_ends_with_the_mean():
    lines = figures(federation({"x": [0, 1]}), {"x": GOOD}, {"x": POOR}).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["MEL", "DF", "NV", "mean of centres"]
    assert lines[1].startswith("| DF | 2 | 2 | 0.0 | 50.0 | +50.0 [")
    assert "| 33.3 | 75.0 | +41.7 [" in lines[-1]

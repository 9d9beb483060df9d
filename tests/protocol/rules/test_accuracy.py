"""Balanced accuracy (docs/methods.md 8.4): the mean recall over the classes that occur."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.rules.accuracy import balanced_accuracy

ROWS = st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 4)), min_size=1, max_size=40)


@given(ROWS, st.sets(st.integers(0, 4)))
def test_it_is_the_mean_recall(rows, some):
    """By hand, row by row: of all classes that occur, and of some of them."""
    predicted, target = (np.array(column, np.int64) for column in zip(*rows, strict=True))

    def mean(classes):
        found = [[guess == truth for guess, truth in rows if truth == label] for label in sorted(classes)]
        recalls = [Fraction(sum(one), len(one)) for one in found if one]
        return float(sum(recalls) / len(recalls)) if recalls else None

    assert balanced_accuracy(predicted, target) == pytest.approx(mean(range(5)))
    counted = np.isin(np.arange(5), list(some))
    assert balanced_accuracy(predicted, target, counted) == pytest.approx(mean(some))


def test_abstention_counts_as_missed_and_no_row_gives_nothing():
    target = np.repeat([0, 1], [90, 10])
    assert balanced_accuracy(np.zeros(100, np.int64), target) == 0.5
    assert balanced_accuracy(np.where(target == 1, 1, -1), target) == 0.5
    assert balanced_accuracy(np.zeros(0, np.int64), np.zeros(0, np.int64)) is None

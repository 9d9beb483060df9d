"""The skewed prior (FedEvPrompt 3.1; docs/methods.md 1.3)."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.rules.class_prior import class_prior, counts_shown

COUNTS = st.lists(st.integers(0, 10_000), min_size=2, max_size=40).filter(any)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((2977, 186), (0.118, 1.882)), ((1470, 1221), (0.907, 1.093)), ((5, 0), (0.01, 1.99))],
)
def test_it_has_the_numbers_of_the_paper(counts, expected):
    """docs/methods.md 1.3: the two centres worked out there; one class only is floored, then rescaled."""
    assert class_prior(np.array(counts), 1e-2) == pytest.approx(expected, abs=6e-4)


@given(COUNTS, st.sampled_from([Fraction(0), Fraction(1, 100), Fraction(1, 2)]))
def test_it_is_the_formula_in_exact_fractions(counts, floor):
    """W_k = K/(K−1)·(1 − N_k/N), raised to the floor, rescaled to sum K."""
    classes, total = len(counts), sum(counts)
    raised = [max(Fraction(classes, classes - 1) * (1 - Fraction(count, total)), floor) for count in counts]
    wanted = [float(one * classes / sum(raised)) for one in raised]
    assert class_prior(np.array(counts), float(floor)) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_classes_that_are_drawn_equally_count_alike():
    """docs/methods.md 1.3: the draws have corrected the imbalance already; a class without a row keeps 0."""
    counts = np.array([2977, 0, 186])
    assert counts_shown(counts, "none").tolist() == [2977, 0, 186]
    assert counts_shown(counts, "class").tolist() == [1, 0, 1]
    assert class_prior(counts_shown(counts, "class"), 1e-2) == pytest.approx([0.75, 1.5, 0.75])


@pytest.mark.parametrize("counts", [[0, 0], [3], [], [1, -1], [1.0, float("nan")], np.ones((1, 2))])
def test_counts_without_meaning_are_refused(counts):
    with pytest.raises(ValueError, match="class counts"):
        class_prior(np.array(counts), 1e-2)

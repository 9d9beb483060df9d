"""How wrong a model is on the pictures that it is most certain of: the risk-coverage curve, and draws of it.

The risk at coverage c is the share of wrong answers among the c·B least uncertain rows (Geifman and El-Yaniv,
"Selective classification for deep neural networks", arXiv 1705.08500). Rows of equal uncertainty have no order: a part
of their group has the group's error rate, which is the expected value over all orders.

`weights` are as `intervals.lesion_weights` draws them: how often each row counts in each draw. One row of ones gives
the figure itself.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from edgefl_trainer.evaluate.intervals import by_level


def risk_at(
    uncertainty: Float[np.ndarray, " B"],
    wrong: Bool[np.ndarray, " B"],
    weights: Float[np.ndarray, "R B"],
    coverages: Sequence[float],
) -> Float[np.ndarray, "R C"]:
    """Compute the risk at each coverage in (0, 1], for each draw of at least one row."""
    order, starts = by_level(uncertainty)
    ordered = weights[:, order]
    rows = np.add.reduceat(ordered, starts, axis=1)  # (R, G)
    errors = np.add.reduceat(ordered * wrong[order], starts, axis=1)
    covered, failed = np.cumsum(rows, axis=1), np.cumsum(errors, axis=1)
    found = []
    for coverage in coverages:
        wanted = coverage * covered[:, -1:]  # (R, 1)
        last = (covered < wanted - 1e-9).sum(axis=1, keepdims=True)  # the level that the coverage ends in
        inside = [np.take_along_axis(values, last, axis=1) for values in (rows, errors, covered, failed)]
        of_level, wrong_there, until, failed_until = inside
        rate = wrong_there / np.maximum(of_level, 1e-12)
        found.append((failed_until - wrong_there + (wanted - until + of_level) * rate) / wanted)
    return np.concatenate(found, axis=1)


def told_apart(
    inside: Float[np.ndarray, " B"],
    outside: Float[np.ndarray, " M"],
    inside_weights: Float[np.ndarray, "R B"],
    outside_weights: Float[np.ndarray, "R M"],
) -> Float[np.ndarray, " R"]:
    """Compute, for each draw, the area under the ROC curve of an uncertainty, `outside` counting as positive.

    The share of pairs in the right order, ties half (Mann and Whitney 1947); both sides have at least one row.
    """
    order, starts = by_level(np.concatenate([inside, outside]))
    zeros = np.zeros_like
    own = np.concatenate([inside_weights, zeros(outside_weights)], axis=1)[:, order]
    foreign = np.concatenate([zeros(inside_weights), outside_weights], axis=1)[:, order]
    below, there = np.add.reduceat(own, starts, axis=1), np.add.reduceat(foreign, starts, axis=1)
    won = (there * (np.cumsum(below, axis=1) - below / 2)).sum(axis=1)
    return np.asarray(won / (below.sum(axis=1) * there.sum(axis=1)))

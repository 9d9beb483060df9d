"""How wrong a model is on the pictures that it is most certain of: the risk-coverage curve, and draws of it.

The risk at coverage c is the share of wrong answers among the c·B least uncertain rows (Geifman and El-Yaniv,
"Selective classification for deep neural networks", arXiv 1705.08500). Rows of equal uncertainty have no order: a part
of their group has the group's error rate, which is the expected value over all orders.

`weights` are as `intervals.lesion_weights` draws them: how often each row counts in each draw. One row of ones gives
the figure itself.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from edgefl_protocol.pictures.referral import ABSTAIN_FROM
from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, by_level, interval, lesion_weights
from edgefl_trainer.evaluate.metrics import ece_bin

CURVE = tuple(number / 20 for number in range(1, 21))  # coverages of a kept curve


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


def referral_figures(scored: Scored, above: float) -> dict[str, Any]:
    """Compute what a threshold of uncertainty refers, and how wrong the rest is, each with a 95 % interval by lesion.

    Gives `above`, `referred` (share of the rows), `error` (share of wrong answers among the others), and both as
    `…_interval`. Null where there is no row, or none is left; an interval also below two lesions, or where all draws
    give the same. The other rules of a device ask for a look beside this one (docs/methods.md 1.8).
    """
    found: dict[str, Any] = {"above": above}
    kept = ~(scored.uncertainty > above)
    if scored.vacuity is not None:
        kept &= scored.vacuity < ABSTAIN_FROM
    wrong = kept & (scored.predicted != scored.target)
    if not len(kept):
        return found | dict.fromkeys(("referred", "referred_interval", "error", "error_interval"))
    shares = {"referred": (~kept, np.ones_like(kept)), "error": (wrong, kept)}
    weights = [np.ones((1, len(kept)))]
    if len(set(scored.lesions)) > 1:
        weights += lesion_weights(scored.lesions, RESAMPLES)
    for name, (part, whole) in shares.items():
        counts = [(each @ part.astype(float), each @ whole.astype(float)) for each in weights]
        some, all_ = (np.concatenate(side) for side in zip(*counts, strict=True))
        values = np.where(all_ > 0, some / np.maximum(all_, 1), np.nan)
        bounds = interval(values[1:]) if len(values) > 1 else None
        found[name] = float(values[0]) if np.isfinite(values[0]) else None
        found[f"{name}_interval"] = bounds if bounds and bounds[0] < bounds[1] else None
    return found


def curves_of(scored: Scored) -> dict[str, Any] | None:
    """Give the risk at each coverage of `CURVE` (`risk`), and what makes up the calibration error (`reliability`).

    `reliability` has, for each bin of `ECE_BINS` with a row: its rows, their mean top probability, and the share of
    right answers. None without a row.
    """
    if not len(scored.target):
        return None
    wrong, top = scored.predicted != scored.target, scored.probabilities.max(axis=1).astype(np.float64)
    risk = risk_at(scored.uncertainty, wrong, np.ones((1, len(wrong))), CURVE)[0]
    bins = ece_bin(top)
    filled = [(bins == number) for number in np.unique(bins)]
    return {
        "risk": [float(value) for value in risk],
        "reliability": [[int(one.sum()), float(top[one].mean()), float(1 - wrong[one].mean())] for one in filled],
    }

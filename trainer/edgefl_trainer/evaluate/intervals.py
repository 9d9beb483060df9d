"""95 % intervals of every figure by resampling lesions: the cluster bootstrap of Efron and Tibshirani 1993, chapter 8.

Pictures of one lesion are not independent, so whole lesions are drawn with replacement, as many as there are, and a
figure's interval is the middle 95 % of what it takes over the draws (percentile method). A draw is a whole-number
weight for each row, and the figures of all draws are computed at once from these weights: `scipy.stats.bootstrap` knows
no clusters, and calling `site_metrics` a thousand times costs minutes.

Guarantees: the figure of a draw equals `site_metrics` of the rows repeated by their weights; the same rows give the
same intervals, whatever their order; an interval is two finite floats, or ``None`` with nothing to resample.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import betaincinv

from edgefl_protocol.bundle.tested_classes import FEW_LESIONS
from edgefl_trainer.evaluate.metrics import ECE_BINS, METRIC_NAMES, ece_bin, entropy_nats, open_answers, opened

RESAMPLES = 1000
LEVEL = 0.95
BLOCK_VALUES = 4_000_000  # weights in memory at once
PAIRED_ROWS = 64  # of a class: up to there a product of matrices takes less time than a sum along the order


@dataclass(frozen=True)
class AskedRows:
    """What is known of the questions of some rows."""

    closed: Bool[np.ndarray, " B"]
    usual: Int[np.ndarray, " B"]  # the most frequent training answer to questions of their kind; -1 without one


@dataclass(frozen=True)
class Scored:
    """Scored rows of one site, or of several together, and what is true of them."""

    probabilities: Float[np.ndarray, "B K"]
    target: Int[np.ndarray, " B"]
    predicted: Int[np.ndarray, " B"]  # -1: abstained
    vacuity: Float[np.ndarray, " B"] | None
    lesions: tuple[str, ...]  # of each row
    asked: AskedRows | None = None  # where the rows are questions

    @property
    def uncertainty(self) -> Float[np.ndarray, " B"]:
        """What orders the risk-coverage curve: vacuity, else entropy in nats."""
        return entropy_nats(self.probabilities) if self.vacuity is None else self.vacuity

    def take(self, rows: Int[np.ndarray, " M"]) -> "Scored":
        """Return some of the rows, in the order given."""
        vacuity = None if self.vacuity is None else self.vacuity[rows]
        lesions = tuple(self.lesions[i] for i in rows)
        asked = None if self.asked is None else AskedRows(self.asked.closed[rows], self.asked.usual[rows])
        return Scored(self.probabilities[rows], self.target[rows], self.predicted[rows], vacuity, lesions, asked)


def pooled(parts: Sequence[Scored]) -> Scored:
    """Return the rows of several sites as one set."""
    filled = [part for part in parts if len(part.target)] or parts  # a site without rows scored none, so has no vacuity
    vacuities = [part.vacuity for part in filled if part.vacuity is not None]
    return Scored(
        np.concatenate([part.probabilities for part in parts]),
        np.concatenate([part.target for part in parts]),
        np.concatenate([part.predicted for part in parts]),
        np.concatenate(vacuities) if len(vacuities) == len(filled) else None,
        tuple(lesion for part in parts for lesion in part.lesions),
        _asked_together([part.asked for part in parts if part.asked is not None]),
    )


def _asked_together(parts: Sequence[AskedRows]) -> AskedRows | None:
    if not parts:
        return None
    return AskedRows(np.concatenate([part.closed for part in parts]), np.concatenate([part.usual for part in parts]))


def resample(scored: Scored, resamples: int = RESAMPLES) -> dict[str, Float[np.ndarray, " R"]]:
    """Compute every figure of ``METRIC_NAMES`` over draws of at least one row; NaN where a draw does not define it."""
    parts = [weighted_figures(scored, weights) for weights in lesion_weights(scored.lesions, resamples)]
    return {name: np.concatenate([part[name] for part in parts]) for name in METRIC_NAMES}


def interval(values: Float[np.ndarray, " R"]) -> list[float] | None:
    """Return the middle 95 % of a figure's draws; ``None`` where more than half of them do not define it."""
    defined = values[np.isfinite(values)]
    if 2 * defined.size < values.size or defined.size == 0:
        return None
    tail = 100 * (1 - LEVEL) / 2
    return [float(bound) for bound in np.percentile(defined, [tail, 100 - tail])]


def share_interval(values: Float[np.ndarray, " R"], share: float, lesions: int) -> list[float] | None:
    """Return the interval of a share of right answers; ``None`` below two lesions.

    Where all draws give the same, as with no right answer, they say nothing of how sure it is: Clopper and Pearson's
    interval takes their place, with lesions as trials. It covers the share as often as it says however alike the
    answers inside a lesion are, if lesions have equally many rows: answers that are all alike are the worst case.

    Args:
        values: the share in each draw.
        share: of the rows themselves.
        lesions: to which these rows belong.
    """
    found = interval(values)
    if found is None or lesions < 2 or found[0] < found[1]:
        return found if lesions > 1 else None
    return list(share_bounds(share * lesions, lesions))


def share_bounds(hits: float, trials: int) -> tuple[float, float]:
    """Compute Clopper and Pearson's 95 % interval (Biometrika 26, 1934) of a share of independent trials.

    Args:
        hits: may be broken, where ties were shared out, or rows of a lesion differ.
        trials: at least 1.
    """
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits <= 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return low, high


def weighted_figures(scored: Scored, weights: Float[np.ndarray, "R B"]) -> dict[str, Float[np.ndarray, " R"]]:
    """Compute every figure of ``METRIC_NAMES`` for each draw; each row counts as often as its weight (whole) says."""
    classes = scored.probabilities.shape[1]
    probabilities = scored.probabilities.astype(np.float64)
    correct = scored.predicted == scored.target
    total = weights.sum(axis=1)
    top = probabilities.max(axis=1)
    bins = np.eye(ECE_BINS)[ece_bin(top)] * (correct - top)[:, None]  # (B, bins)
    brier = np.square(probabilities - np.eye(classes)[scored.target]).sum(axis=1)
    likeliest = open_answers(probabilities)
    figures = _confusion_figures(scored.target, scored.predicted, weights, classes)
    figures["open_accuracy"] = weights @ (likeliest == scored.target).astype(np.float64) / total
    figures |= opened(_confusion_figures(scored.target, likeliest, weights, classes))
    figures["auroc"] = _auroc(scored, weights)
    figures["accuracy"] = weights @ correct.astype(np.float64) / total
    figures["ece"] = np.abs(weights @ bins).sum(axis=1) / total
    figures["brier"] = weights @ brier / total
    figures["aurc"] = aurc_of_draws(scored.uncertainty, ~correct, weights)
    return figures


def recall_intervals(scored: Scored, resamples: int = RESAMPLES) -> list[list[float] | None]:
    """Return the interval of each class's recall, in class order.

    ``None`` where the draws cannot tell how sure the figure is: fewer than ``FEW_LESIONS`` lesions of the class, or
    every row of it right, or every one wrong, so that all draws give the same.
    """
    classes, lesions = scored.probabilities.shape[1], lesions_of_classes(scored)
    if max(lesions, default=0) < FEW_LESIONS:
        return [None] * classes
    parts = [_recalls(scored.target, scored.predicted, w, classes) for w in lesion_weights(scored.lesions, resamples)]
    draws = np.concatenate(parts)  # (R, K)
    found = [interval(draws[:, k]) if lesions[k] >= FEW_LESIONS else None for k in range(classes)]
    return [None if bounds is None or bounds[0] == bounds[1] else bounds for bounds in found]


def lesions_of_classes(scored: Scored) -> list[int]:
    """Count the lesions of each class, in class order."""
    classes = scored.probabilities.shape[1]
    return [len({scored.lesions[i] for i in np.flatnonzero(scored.target == k)}) for k in range(classes)]


def _recalls(
    target: Int[np.ndarray, " B"], predicted: Int[np.ndarray, " B"], weights: Float[np.ndarray, "R B"], classes: int
) -> Float[np.ndarray, "R K"]:
    """The recall of each class in each draw; NaN where a draw has no row of it."""
    truth = np.eye(classes)[target]  # (B, K)
    rows = weights @ truth
    hits = weights @ (truth * (predicted == target)[:, None])
    return np.where(rows > 0, hits / np.maximum(rows, 1), np.nan)


def lesion_weights(lesions: Sequence[str], resamples: int) -> Iterator[Float[np.ndarray, "R B"]]:
    """Draw whole lesions with replacement: how often each row then counts, some draws at a time.

    The names of the lesions seed the draws. So models are compared draw by draw over the same lesions, and sites are
    drawn apart, also where they have equally many.
    """
    names, number = np.unique(np.array(lesions, dtype=str), return_inverse=True)
    count = len(names)
    rng = np.random.default_rng(np.frombuffer(hashlib.sha256("\n".join(names).encode()).digest(), dtype="<u4"))
    block = max(1, BLOCK_VALUES // len(lesions))
    for start in range(0, resamples, block):
        drawn = rng.multinomial(count, np.full(count, 1.0 / count), size=min(block, resamples - start))
        yield drawn[:, number].astype(np.float64)


def _mean(values: Float[np.ndarray, "R K"], defined: Bool[np.ndarray, "R K"]) -> Float[np.ndarray, " R"]:
    count = defined.sum(axis=1)
    return np.where(count > 0, np.where(defined, values, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)


def _confusion_figures(
    target: Int[np.ndarray, " B"], predicted: Int[np.ndarray, " B"], weights: Float[np.ndarray, "R B"], classes: int
) -> dict[str, Float[np.ndarray, " R"]]:
    """From the margins and the diagonal of the confusion matrices: whole ones of 1,203 classes fit in no memory."""
    named, truth = np.eye(classes + 1)[predicted][:, :classes], np.eye(classes)[target]  # (B, K); -1: no class
    hits = weights @ (named * truth)  # (R, K)
    true_rows, predicted_rows = weights @ truth, weights @ named
    other_rows = weights.sum(axis=1)[:, None] - true_rows
    counted = true_rows > 0
    recall = _mean(hits / np.maximum(true_rows, 1), counted)
    return {
        "balanced_accuracy": recall,
        "macro_precision": _mean(hits / np.maximum(predicted_rows, 1), counted),
        "macro_recall": recall,
        "macro_f1": _mean(2 * hits / np.maximum(true_rows + predicted_rows, 1), counted),
        "specificity": _mean(1 - (predicted_rows - hits) / np.maximum(other_rows, 1), counted & (other_rows > 0)),
    }


def by_level(values: Float[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " G"]]:
    """Order rows by ascending value; tell also where each level of equal values begins in that order."""
    order = np.argsort(values, kind="stable")
    return order, np.flatnonzero(np.diff(values[order], prepend=-np.inf))


def _auroc(scored: Scored, weights: Float[np.ndarray, "R B"]) -> Float[np.ndarray, " R"]:
    """Mann and Whitney's share of pairs in the right order, ties half; of class 1, or the mean over classes."""
    classes = scored.probabilities.shape[1]
    areas, rows = [], weights.sum(axis=1)
    for k in [1] if classes == 2 else np.unique(scored.target):  # the others have no row inside in any draw
        inside = scored.target == k
        own = weights @ inside.astype(np.float64)
        pairs = own * (rows - own)
        won = (_won_in_pairs if inside.sum() <= PAIRED_ROWS else _won_in_order)(
            scored.probabilities[:, k], inside, weights
        )
        areas.append(np.where(pairs > 0, won / np.maximum(pairs, 1), np.nan))
    stacked = np.stack(areas, axis=1)  # (R, classes)
    return _mean(stacked, np.isfinite(stacked))


def _won_in_pairs(
    values: Float[np.ndarray, " B"], inside: Bool[np.ndarray, " B"], weights: Float[np.ndarray, "R B"]
) -> Float[np.ndarray, " R"]:
    """Count the pairs in the right order, each by itself: quick where few rows are inside, as of many answers."""
    higher, lower = values[inside], values[:, None]
    order = ((higher > lower) + (higher == lower) / 2) * ~inside[:, None]  # (B, inside)
    return np.asarray((weights[:, inside] * (weights @ order)).sum(axis=1))


def _won_in_order(
    values: Float[np.ndarray, " B"], inside: Bool[np.ndarray, " B"], weights: Float[np.ndarray, "R B"]
) -> Float[np.ndarray, " R"]:
    """Count the same along the ascending values. Halves of whole weights are exact: both give the same bits."""
    order, starts = by_level(values)
    ordered = weights[:, order]
    own = np.add.reduceat(ordered * inside[order], starts, axis=1)  # (R, G)
    rest = np.add.reduceat(ordered * ~inside[order], starts, axis=1)
    return np.asarray((own * (np.cumsum(rest, axis=1) - rest / 2)).sum(axis=1))


def aurc_of_draws(
    uncertainty: Float[np.ndarray, " B"], wrong: Bool[np.ndarray, " B"], weights: Float[np.ndarray, "R B"]
) -> Float[np.ndarray, " R"]:
    """Compute, of each draw, the mean error rate over all coverages; rows of equal uncertainty share their group's.

    Inside a group of c rows with error rate r, after C rows with E errors, the rates (E + j·r)/(C + j), j = 1 … c, sum
    to c·r + (E − r·C)·(H(C+c) − H(C)), H the harmonic numbers.
    """
    order, starts = by_level(uncertainty)
    ordered = weights[:, order]
    rows = np.add.reduceat(ordered, starts, axis=1)  # (R, G)
    errors = np.add.reduceat(ordered * wrong[order], starts, axis=1)
    covered = np.cumsum(rows, axis=1).astype(np.int64)
    before = covered - rows.astype(np.int64)
    failed = np.cumsum(errors, axis=1) - errors
    harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, covered.max() + 1))])
    rate = errors / np.maximum(rows, 1)
    summed = errors + (failed - rate * before) * (harmonic[covered] - harmonic[before])
    return np.asarray(summed.sum(axis=1) / weights.sum(axis=1))

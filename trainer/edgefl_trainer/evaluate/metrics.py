"""Figures for one site's reported rows, and their summary over a federation.

Guarantees: every figure is a finite float or ``None`` (undefined), never NaN; no figure depends on the order of the
rows; no warning leaves this module. Definitions: docs/methods.md, "evaluation". Sources: balanced accuracy and the
class rule, FLamby ``fed_isic2019/metric.py``; expected calibration error, Guo et al. 2017 (arXiv:1706.04599); Brier
1950, summed over classes; area under the risk-coverage curve, Geifman et al. 2019 (arXiv:1805.08206).

Abstention: a predicted class of -1 means "no prediction". It counts as a wrong answer in balanced accuracy, accuracy,
F1, ECE and AURC; being no prediction it is no false alarm either, so it lowers no class's precision or specificity.

What is shown names no class that the site's training rows lack, and the other figures judge that. Papers let a model
name any class of the federation: the ``open_`` figures do, whatever the site has seen, and nothing abstains there.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from edgefl_protocol.pictures.referral import Measures, predicted_class
from edgefl_protocol.rules.accuracy import balanced_accuracy

SiteMetrics = dict[str, float | int | None]
"""One site's figures under the names of ``summary.json``; ``None`` where undefined."""

Figures = TypeVar("Figures")  # a figure, or its draws

ABSTAINED = -1
"""The predicted class of a row for which nothing was predicted."""

JUDGED_ROWS = "tune_rows"  # a site's line of metrics.jsonl: on how many tune rows its model was judged
ECE_BINS = 15
PERCENTILES = (5, 10, 15)  # over sites: with many small sites the worst one says little
METRIC_NAMES = (
    "balanced_accuracy",
    "macro_precision",
    "macro_recall",
    "macro_f1",
    "specificity",
    "auroc",
    "accuracy",
    "ece",
    "brier",
    "aurc",
    "open_accuracy",
    "open_balanced_accuracy",
    "open_macro_precision",
    "open_macro_f1",
    "open_specificity",
)

HIGHEST = {"brier": 2.0}  # the most that a figure can be; 1 of all others
OPEN_FIGURES = ("balanced_accuracy", "macro_precision", "macro_f1", "specificity")  # also of the likeliest class
OF_RIGHT = ("accuracy", "open_accuracy")  # shares of right answers

TUNE = "tune_"  # begins the key of a figure of tune rows
METRIC_WORDS = {
    "auroc": "AUROC",
    "aurc": "AURC (area under the risk-coverage curve)",
    "ece": "ECE (expected calibration error)",
    "brier": "Brier score",
    "macro_f1": "macro F1",
}


def metric_words(metric: str) -> str:
    """Name a figure for a person; `metric` is its key in ``summary.json``, or that of tune rows."""
    if metric.startswith(TUNE):
        return f"{metric_words(metric.removeprefix(TUNE))} on tune rows"
    return METRIC_WORDS.get(metric, metric.replace("_", " "))


def site_metrics(
    probabilities: Float[np.ndarray, "B K"],
    target: Int[np.ndarray, " B"],
    *,
    predicted: Int[np.ndarray, " B"],
    vacuity: Float[np.ndarray, " B"] | None = None,
    present: Bool[np.ndarray, " K"] | None = None,
) -> SiteMetrics:
    """Return ``n_test`` and all of ``METRIC_NAMES`` for one site's reported rows; these are ``None`` for zero rows.

    Args:
        probabilities: Each row sums to 1.
        target: True class, 0 … K-1.
        predicted: Class shown to the user, or -1 where the model abstained (see the module's text).
        vacuity: In [0, 1]; orders the risk-coverage curve. Without it (softmax methods) the entropy does.
        present: Classes to average over; those without a row in ``target`` are left out in any case. Default: all.

    Raises:
        ValueError: Lengths disagree, a class is outside the range, or a value is not finite.
    """
    rows, classes = _checked(probabilities, target, predicted, vacuity)
    if rows == 0:
        return {"n_test": 0} | dict.fromkeys(METRIC_NAMES)
    counted = np.bincount(target, minlength=classes) > 0
    if present is not None:
        counted &= present
    probabilities = probabilities.astype(np.float64)
    correct = predicted == target
    likeliest = open_answers(probabilities)
    uncertainty = entropy_nats(probabilities) if vacuity is None else vacuity
    return (
        {"n_test": rows}
        | _confusion_figures(target, predicted, counted)
        | {
            "auroc": auroc(probabilities, target, counted),
            "accuracy": float(correct.mean()),
            "ece": expected_calibration_error(probabilities.max(axis=1), correct),
            "brier": brier_score(probabilities, target),
            "aurc": area_under_risk_coverage(uncertainty, correct),
            "open_accuracy": float((likeliest == target).mean()),
        }
        | opened(_confusion_figures(target, likeliest, counted))
    )


def shares_of_right(
    probabilities: Float[np.ndarray, "B K"], target: Int[np.ndarray, " B"], predicted: Int[np.ndarray, " B"]
) -> SiteMetrics:
    """Return those of `site_metrics` that a round is judged by, at a fraction of its time: ``None`` for zero rows."""
    rows, classes = _checked(probabilities, target, predicted, None)
    counted = np.bincount(target, minlength=classes) > 0
    return {
        "balanced_accuracy": balanced_accuracy(predicted, target, counted),
        "accuracy": float((predicted == target).mean()) if rows else None,
        "open_accuracy": float((open_answers(probabilities) == target).mean()) if rows else None,
    }


def opened(figures: Mapping[str, Figures]) -> dict[str, Figures]:
    """Name the figures of the likeliest of all classes, of those that were computed from these answers."""
    return {f"open_{name}": figures[name] for name in OPEN_FIGURES}


def open_answers(probabilities: Float[np.ndarray, "B K"]) -> Int[np.ndarray, " B"]:
    """Return the most probable of all classes for each row, also of those that the site has never seen."""
    return np.asarray(probabilities.argmax(axis=1))


def _checked(
    probabilities: Float[np.ndarray, "B K"],
    target: Int[np.ndarray, " B"],
    predicted: Int[np.ndarray, " B"],
    vacuity: Float[np.ndarray, " B"] | None,
) -> tuple[int, int]:
    if probabilities.ndim != 2 or probabilities.shape[1] < 2:
        raise ValueError(
            f"probabilities have shape {probabilities.shape}; they must have shape (rows, classes) with at least 2 "
            "classes"
        )
    rows, classes = probabilities.shape
    for name, values in (("target", target), ("predicted", predicted), ("vacuity", vacuity)):
        if values is not None and values.shape != (rows,):
            raise ValueError(f"{name} has shape {values.shape}, but the probabilities have {rows} rows")
    if rows == 0:
        return rows, classes
    if target.min() < 0 or target.max() >= classes:
        raise ValueError(f"target classes run from {target.min()} to {target.max()}; allowed: 0 to {classes - 1}")
    if predicted.min() < ABSTAINED or predicted.max() >= classes:
        raise ValueError(
            f"predicted classes run from {predicted.min()} to {predicted.max()}; allowed: -1 to {classes - 1}"
        )
    if not np.isfinite(probabilities).all() or (vacuity is not None and not np.isfinite(vacuity).all()):
        raise ValueError("probabilities or vacuity hold a value that is not finite; look for a diverged training run")
    return rows, classes


def _mean_or_none(values: Float[np.ndarray, " K"], defined: Bool[np.ndarray, " K"]) -> float | None:
    return float(values[defined].mean()) if defined.any() else None


def confusion_matrix(
    target: Int[np.ndarray, " B"], predicted: Int[np.ndarray, " B"], classes: int
) -> Int[np.ndarray, "K K1"]:
    """Count the rows by true class (down) and predicted class (across); the last column counts abstentions."""
    answer = np.where(predicted == ABSTAINED, classes, predicted)
    matrix = np.zeros((classes, classes + 1), dtype=np.int64)
    np.add.at(matrix, (target, answer), 1)
    return matrix


def _confusion_figures(
    target: Int[np.ndarray, " B"], predicted: Int[np.ndarray, " B"], counted: Bool[np.ndarray, " K"]
) -> SiteMetrics:
    """Macro figures over the counted classes, from the confusion matrix with one more column for abstentions."""
    classes = counted.shape[0]
    matrix = confusion_matrix(target, predicted, classes)
    hits = np.diagonal(matrix).astype(np.float64)
    true_rows = matrix.sum(axis=1)
    predicted_rows = matrix.sum(axis=0)[:classes]
    other_rows = target.shape[0] - true_rows
    false_alarms = predicted_rows - hits
    specificity = 1.0 - false_alarms / np.maximum(other_rows, 1)
    recall = balanced_accuracy(predicted, target, counted)
    return {
        "balanced_accuracy": recall,
        "macro_precision": _mean_or_none(hits / np.maximum(predicted_rows, 1), counted),
        "macro_recall": recall,
        "macro_f1": _mean_or_none(2.0 * hits / np.maximum(true_rows + predicted_rows, 1), counted),
        "specificity": _mean_or_none(specificity, counted & (other_rows > 0)),
    }


def auroc(
    probabilities: Float[np.ndarray, "B K"], target: Int[np.ndarray, " B"], counted: Bool[np.ndarray, " K"]
) -> float | None:
    """Return the area under the ROC curve: of class 1 for two classes, else the mean over ``counted`` against the rest.

    A class without both outcomes among the rows is left out; ``None`` where every class is.
    """
    from sklearn.metrics import roc_auc_score  # loaded where it is used: see `linear`

    classes = probabilities.shape[1]
    chosen = [1] if classes == 2 else list(np.flatnonzero(counted))
    areas = []
    for k in chosen:
        outcome = target == k
        if 0 < outcome.sum() < outcome.shape[0]:
            areas.append(float(roc_auc_score(outcome, probabilities[:, k])))
    return float(np.mean(areas)) if areas else None


def expected_calibration_error(confidence: Float[np.ndarray, " B"], correct: Bool[np.ndarray, " B"]) -> float | None:
    """Return the mean over bins (see ``ece_bin``) of ``|accuracy − mean confidence|``, weighted by the bins' rows.

    Confidence is the top probability of each row; ``None`` for zero rows.
    """
    rows = confidence.shape[0]
    if rows == 0:
        return None
    gap = np.bincount(ece_bin(confidence), weights=correct.astype(np.float64) - confidence, minlength=ECE_BINS)
    return float(np.abs(gap).sum() / rows)


def ece_bin(confidence: Float[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
    """Return the bin of each confidence in [0, 1]: bin i of n is ``(i/n, (i+1)/n]``; 0 falls into the first."""
    return np.clip(np.ceil(confidence.astype(np.float64) * ECE_BINS).astype(np.int64) - 1, 0, ECE_BINS - 1)


def out_of_distribution_auroc(inside: Float[np.ndarray, " B"], outside: Float[np.ndarray, " M"]) -> float | None:
    """Return how well an uncertainty tells foreign pictures from those of the task: 1 is perfect, 0.5 is chance.

    The area under the ROC curve, foreign (``outside``) counting as positive; ``None`` where one side is empty.
    """
    from sklearn.metrics import roc_auc_score

    if inside.size == 0 or outside.size == 0:
        return None
    foreign = np.arange(inside.size + outside.size) >= inside.size
    return float(roc_auc_score(foreign, np.concatenate([inside, outside])))


def brier_score(probabilities: Float[np.ndarray, "B K"], target: Int[np.ndarray, " B"]) -> float | None:
    """Return the mean over rows of ``Σ_k (p_k − y_k)²``, in [0, 2]; ``None`` for zero rows."""
    if target.shape[0] == 0:
        return None
    wanted = np.eye(probabilities.shape[1])[target]  # (B, K)
    return float(np.square(probabilities - wanted).sum(axis=1).mean())


def entropy_nats(probabilities: Float[np.ndarray, "B K"]) -> Float[np.ndarray, " B"]:
    """Return the entropy ``−Σ_k p_k ln p_k`` of each row, with ``0 ln 0 = 0``."""
    p = probabilities.astype(np.float64)
    logarithm = np.log(np.where(p > 0.0, p, 1.0))
    return np.asarray(-(p * logarithm).sum(axis=1))


def area_under_risk_coverage(uncertainty: Float[np.ndarray, " B"], correct: Bool[np.ndarray, " B"]) -> float | None:
    """Return the mean over ``i = 1 … B`` of the error rate among the ``i`` least uncertain rows; ``None`` without any.

    Rows of equal uncertainty have no order: each takes its group's error rate, which is the expected value over all
    orders of the group, so a file sorted by class gives no other figure than a shuffled one.
    """
    if correct.shape[0] == 0:
        return None
    _, group = np.unique(uncertainty, return_inverse=True)  # numbered in ascending order of uncertainty
    group_error = np.bincount(group, weights=~correct) / np.bincount(group)
    errors = group_error[np.sort(group)]  # (B,)
    return float((np.cumsum(errors) / np.arange(1, errors.shape[0] + 1)).mean())


def federation_summary(sites: Mapping[str, Mapping[str, object]]) -> dict[str, float | int | None]:
    """Summarise balanced accuracy over sites, each site counting once whatever its size.

    Gives ``mean_``, ``std_`` (ddof=1; ``None`` below two sites), ``worst_`` and ``p5_``, ``p10_``,
    ``p15_balanced_accuracy`` (percentiles, numpy's linear interpolation), and ``sites_without_figures``, the number of
    sites without a balanced accuracy, which are left out.
    """
    found = [sites[name]["balanced_accuracy"] for name in sorted(sites)]
    values = np.array([value for value in found if isinstance(value, (int, float))], dtype=np.float64)
    some = values.size > 0
    return {
        "mean_balanced_accuracy": float(values.mean()) if some else None,
        "std_balanced_accuracy": float(values.std(ddof=1)) if values.size > 1 else None,
        "worst_balanced_accuracy": float(values.min()) if some else None,
        **{f"p{q}_balanced_accuracy": float(np.percentile(values, q)) if some else None for q in PERCENTILES},
        "sites_without_figures": len(found) - values.size,
    }


def predicted_classes(
    probabilities: Float[np.ndarray, "B K"], vacuity: Float[np.ndarray, " B"] | None, seen: Sequence[bool]
) -> Int[np.ndarray, " B"]:
    """Pick the most probable class among those the site has seen in training; −1 where the model knows nothing.

    Source: docs/methods.md, prior: with little evidence the largest alpha is the prior of a class that is absent.
    """
    chosen = []
    for row, values in enumerate(probabilities):
        known = None if vacuity is None else float(vacuity[row])
        measures = Measures(probabilities=values, vacuity=known, dissonance=None, entropy_nats=0.0)
        chosen.append(predicted_class(measures, seen))
    return np.array([ABSTAINED if index is None else index for index in chosen], dtype=np.int64)

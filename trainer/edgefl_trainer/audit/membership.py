"""Membership inference: did a model learn from this row?

    loss        a lower loss speaks for a row that was learned (Yeom et al., arXiv 1709.01604)             loss_scores
    reference   the row's scaled confidence beside that of models that did not learn from it: the one-sided offline test
                of LiRA (Carlini et al., arXiv 2112.03570, eq. 4), with the other sites' models as shadows  lira_scores
    figures     area under the ROC curve, and true positive rate at 1 % false positives                     roc

Other sites' models saw other cameras, so they are weaker shadows than LiRA's own, which are trained anew.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from edgefl_trainer.learning.linear_probe import fit_predict

LOW_FPR: Final = 0.01
LEAST_PROBABILITY: Final = 1e-7
LEAST_SPREAD: Final = 0.05  # of the shadows' confidences, in logits
MEMORISER: Final = 1e6  # inverse weight of the penalty of the model that memorises


class Roc(NamedTuple):
    """Figures of an attack in each draw of rows."""

    area: Float[np.ndarray, " R"]
    tpr: Float[np.ndarray, " R"]  # at `LOW_FPR`


def loss_scores(probabilities: Float[np.ndarray, "n K"], targets: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Score membership by minus the cross-entropy, in nats."""
    own = probabilities[np.arange(len(targets)), targets].astype(np.float64)
    return np.asarray(np.log(np.clip(own, LEAST_PROBABILITY, 1.0)))


def confidences(probabilities: Float[np.ndarray, "n K"], targets: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Scale the probability of the right class to log p/(1 − p), which is near to normal (Carlini et al., eq. 3)."""
    own = np.clip(probabilities[np.arange(len(targets)), targets].astype(np.float64), LEAST_PROBABILITY, 1 - 1e-7)
    return np.asarray(np.log(own) - np.log1p(-own))


def lira_scores(own: Float[np.ndarray, " n"], shadows: Float[np.ndarray, "M n"]) -> Float[np.ndarray, " n"]:
    """Score membership by how far a row's confidence lies above that of models that never saw it, in deviations.

    Args:
        own: confidences under the model that is attacked.
        shadows: the same under M models, at least two.
    """
    spread = np.maximum(shadows.std(axis=0, ddof=1), LEAST_SPREAD)
    return np.asarray((own - shadows.mean(axis=0)) / spread)


def memorised(
    inputs: Float[np.ndarray, "n P"], targets: Int[np.ndarray, " n"], member: Bool[np.ndarray, " n"], classes: int
) -> Float[np.ndarray, "n K"]:
    """Give the probabilities of a model that memorises: a logistic regression on the members, hardly penalised."""
    return fit_predict(inputs[member], targets[member], inputs, classes, balanced=False, strength=MEMORISER)


def roc(scores: Float[np.ndarray, " n"], member: Bool[np.ndarray, " n"], weights: Float[np.ndarray, "R n"]) -> Roc:
    """Compute area and low-rate figure in each draw; ties count half in the area, and together at a threshold.

    NaN where a draw has no member, or nobody else.

    Args:
        weights: how often each row counts in each draw; ones for the rows themselves.
    """
    order = np.argsort(-scores, kind="stable")
    starts = np.flatnonzero(np.diff(-scores[order], prepend=-np.inf))
    ordered = weights[:, order]
    inside = np.add.reduceat(ordered * member[order], starts, axis=1)  # (R, levels), the highest score first
    outside = np.add.reduceat(ordered * ~member[order], starts, axis=1)
    totals = inside.sum(axis=1, keepdims=True), outside.sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpr, fpr = np.cumsum(inside, axis=1) / totals[0], np.cumsum(outside, axis=1) / totals[1]
        area = ((tpr - inside / totals[0] / 2) * outside / totals[1]).sum(axis=1)
    low = np.where(fpr <= LOW_FPR + 1e-12, tpr, 0.0).max(axis=1)
    return Roc(area, np.where(np.isfinite(area), low, np.nan))

"""Temperature and referral thresholds of one site, all fitted on its ``tune`` rows and never on reported ones.

Temperature T: one number that divides the logits before the evidence function, ``e = f(logits / T)``; everything a user
sees comes from that e (docs/methods.md, "temperature"). Source: Guo et al. 2017 (arXiv:1706.04599, sec. 4.2).
Differs from the paper: the likelihood is that of the Dirichlet mean ``(e + W) / S``; softmax methods use the paper's
form. There a temperature changes no answer. Here it can, towards the class of the largest prior and then towards none,
so only temperatures count that keep the answers (docs/decisions/0074).

Referral rule: ``refer_above`` is the largest vacuity such that, among the tune rows at or below it, at most the target
share is wrong; bounded so that at most ``max_referred`` of the tune rows would be referred, and by 0.999, above which
nothing is ever predicted.

Rule for suspicious classes: a picture is referred where the predicted class is suspicious, or where the suspicious
classes together have at least the threshold. The threshold is the largest with which the rule refers at least 95 % of
the tune rows of suspicious classes, less a thousandth for rounding, and at most a third (docs/decisions/0072). It is
chosen on 20 of them or more: of 19, one missed is more than 5 %.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from edgefl_protocol.pictures.referral import ABSTAIN_FROM
from edgefl_protocol.pictures.suspicious import (
    DEFAULT_SUSPICIOUS_FROM,
    MOST_SUSPICIOUS_FROM,
    NO_CLASS,
    Suspicion,
    rows_that_ask,
    suspicious_values,
)
from edgefl_protocol.rules.bounds import TEMPERATURE_BOUNDS
from edgefl_protocol.sentences import counted

Evidence = Callable[[Float[np.ndarray, "B K"]], Float[np.ndarray, "B K"]]
"""Logits to evidence ≥ 0, in numpy and float64."""

CHANGED_ANSWERS = 0.02  # share of the tune rows whose answer a temperature may change
MIN_ROWS = 20  # fewer tune rows say too little about either number
TARGET_ERROR = 0.10  # share of wrong answers accepted among those not referred
MAX_REFERRED = 0.5  # a weak model must still answer for half of its tune rows
TARGET_SENSITIVITY = 0.95  # share of the suspicious rows that the rule for suspicious classes has to refer
MIN_SUSPICIOUS = 20  # fewer suspicious tune rows say too little
# Of a chosen threshold: a device adds in another order, so the row it was chosen at gets other last digits there.
ROOM = 1e-3


def softplus_evidence(logits: Float[np.ndarray, "B K"]) -> Float[np.ndarray, "B K"]:
    """Return ``ln(1 + exp(logits))`` without overflow."""
    return np.asarray(np.logaddexp(0.0, logits))


def relu_evidence(logits: Float[np.ndarray, "B K"]) -> Float[np.ndarray, "B K"]:
    """Return ``max(logits, 0)``."""
    return np.asarray(np.maximum(logits, 0.0))


def negative_log_likelihood(
    logits: Float[np.ndarray, "B K"],
    target: Int[np.ndarray, " B"],
    prior: Float[np.ndarray, " K"] | None,
    evidence: Evidence | None,
    temperature: float,
) -> float:
    """Return the mean of ``−ln p`` of the true class, in nats.

    ``prior`` is the Dirichlet prior W, with ``None`` 1 for every class; it is not used without ``evidence``, the
    method's evidence function, which is ``None`` for softmax.
    """
    scaled = logits.astype(np.float64) / temperature
    rows = np.arange(target.shape[0])
    if evidence is None:
        return float(-log_softmax(scaled, axis=1)[rows, target].mean())
    alpha = evidence(scaled) + (1.0 if prior is None else prior)
    return float(np.mean(np.log(alpha.sum(axis=1)) - np.log(alpha[rows, target])))


def fit_temperature(
    logits: Float[np.ndarray, "B K"],
    target: Int[np.ndarray, " B"],
    prior: Float[np.ndarray, " K"] | None,
    evidence: Evidence | None,
    *,
    seen: Sequence[bool] | None = None,
    min_rows: int = MIN_ROWS,
) -> float:
    """Return the temperature in [0.1, 10] that makes the tune rows most likely, of those that keep the answers.

    It changes the answer of at most 2 % of the rows, as ``_answers`` says; a softmax's none. A grid finds the valley
    (the evidential likelihood need not have only one), scipy's bounded search its floor, within what is allowed. The
    answer is 1 with fewer than ``min_rows`` rows, with a single class, or where nothing beats 1.

    Args:
        seen: Whether each class may be named; all may where nothing is given. Others as of
            ``negative_log_likelihood``.
    """
    if target.shape[0] < min_rows or np.unique(target).size < 2:
        return 1.0

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(logits, target, prior, evidence, float(np.exp(log_temperature)))

    def keeps(log_temperature: float) -> bool:
        if evidence is None:
            return True
        answers = _answers(logits, prior, evidence, seen, float(np.exp(log_temperature)))
        return bool(np.mean(answers != before) <= CHANGED_ANSWERS)

    before = None if evidence is None else _answers(logits, prior, evidence, seen, 1.0)
    low, high = TEMPERATURE_BOUNDS
    grid = np.linspace(np.log(low), np.log(high), 25).tolist()  # 1 is one of them
    allowed = [place for place, point in enumerate(grid) if keeps(point)]
    best = min(allowed, key=lambda place: loss(grid[place]))
    colder = _last_kept(grid[best], grid[max(best - 1, 0)], keeps)
    warmer = _last_kept(grid[best], grid[min(best + 1, len(grid) - 1)], keeps)
    found = float(minimize_scalar(loss, bounds=(colder, warmer), method="bounded", options={"xatol": 1e-4}).x)
    found = min((one for one in (found, colder, warmer, grid[best]) if keeps(one)), key=loss)
    return float(np.exp(found)) if loss(found) < loss(0.0) else 1.0


def _last_kept(inside: float, outside: float, keeps: Callable[[float], bool]) -> float:
    """Return the farthest point towards `outside` that is found to be allowed, by halving; `inside` is."""
    if keeps(outside):
        return outside
    for _ in range(10):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if keeps(middle) else (inside, middle)
    return inside


def _answers(
    logits: Float[np.ndarray, "B K"],
    prior: Float[np.ndarray, " K"] | None,
    evidence: Evidence,
    seen: Sequence[bool] | None,
    temperature: float,
) -> Int[np.ndarray, " B"]:
    """Return a number for each answer: the class that is named, and whether another that was never seen has more.

    −1 where none is named. Evidence is not discounted yet.
    """
    classes = logits.shape[1]
    alpha = evidence(logits.astype(np.float64) / temperature) + (1.0 if prior is None else prior)
    known = np.ones(classes, dtype=bool) if seen is None else np.asarray(seen)
    named = np.where(known, alpha, -np.inf).argmax(axis=1)
    answers = np.where(known[alpha.argmax(axis=1)], named, named + classes)
    return np.asarray(np.where(classes / alpha.sum(axis=1) >= ABSTAIN_FROM, NO_CLASS, answers))


def refer_threshold(
    vacuity: Float[np.ndarray, " B"],
    correct: Bool[np.ndarray, " B"],
    *,
    target_error: float = TARGET_ERROR,
    max_referred: float = MAX_REFERRED,
    min_rows: int = MIN_ROWS,
    ceiling: float = ABSTAIN_FROM,
) -> float:
    """Return ``refer_above``: a score whose vacuity is higher is referred to a doctor.

    Where no threshold in [0, ``ceiling``] meets the target, it is the one that refers ``max_referred``.

    Args:
        vacuity: Of the tune rows, after the temperature, in [0, 1]; for softmax methods the entropy in nats.
        correct: Whether the shown class was right.
        target_error: Accepted share of wrong answers among the tune rows that are not referred.
        max_referred: Largest share of the tune rows that may be referred to reach it.
        min_rows: Below this many rows the answer is ``ceiling``: only a model without evidence refers.
        ceiling: Largest answer; for an entropy give ln K.
    """
    rows = vacuity.shape[0]
    if rows < min_rows:
        return ceiling
    levels, group = np.unique(vacuity, return_inverse=True)  # ascending; equal vacuities share their fate
    kept = np.cumsum(np.bincount(group))
    error = np.cumsum(np.bincount(group, weights=~correct)) / kept
    allowed = kept >= rows * (1.0 - max_referred)
    good = allowed & (error <= target_error)
    chosen = np.flatnonzero(good)[-1] if good.any() else np.flatnonzero(allowed)[0]
    return min(float(levels[chosen]), ceiling)


def mean_figures(sites: Mapping[str, Mapping[str, Any]], tune_rows: Mapping[str, int]) -> dict[str, float]:
    """Return the mean temperature and referral threshold over sites: what a held-out site gets.

    A site with fewer than ``MIN_ROWS`` tune rows has neither of its own, but 1 and the largest threshold, with which
    nothing is referred: it counts only where no site has more.
    """
    fitted = [figures for name, figures in sites.items() if tune_rows[name] >= MIN_ROWS] or list(sites.values())
    return {key: float(np.mean([figures[key] for figures in fitted])) for key in ("temperature", "refer_above")}


def choose_suspicion(
    probabilities: Float[np.ndarray, "B K"],
    predicted: Int[np.ndarray, " B"],
    targets: Int[np.ndarray, " B"],
    suspicious: Bool[np.ndarray, " K"],
    *,
    target_sensitivity: float = TARGET_SENSITIVITY,
    min_suspicious: int = MIN_SUSPICIOUS,
) -> Suspicion:
    """Choose from which summed probability on the suspicious classes refer, and say what the rule reaches.

    Args:
        predicted: Of the tune rows, the class that is named; −1 for none.
        suspicious: For each class, whether it asks for a look.
        min_suspicious: With fewer rows of suspicious classes the threshold is None: the default is in force.
    """
    ill = suspicious[targets]
    threshold = None
    if ill.sum() >= min_suspicious:
        falling = np.sort(suspicious_values(probabilities, predicted, suspicious)[ill])[::-1]
        needed = int(np.ceil(target_sensitivity * falling.size - 1e-9))
        threshold = min(float((1 - ROOM) * falling[needed - 1]), MOST_SUSPICIOUS_FROM)
    referred = rows_that_ask(probabilities, predicted, suspicious, threshold)
    found, spared = (int(referred[ill].sum()), int(ill.sum())), (int((~referred[~ill]).sum()), int((~ill).sum()))
    return Suspicion(
        threshold=threshold,
        sensitivity=found[0] / found[1] if found[1] else None,
        specificity=spared[0] / spared[1] if spared[1] else None,
        suspicious=found[1],
        benign=spared[1],
        statement=_statement(suspicious, threshold, found, spared, min_suspicious),
    )


def _statement(
    suspicious: Bool[np.ndarray, " K"],
    threshold: float | None,
    found: tuple[int, int],
    spared: tuple[int, int],
    min_suspicious: int,
) -> str:
    """Say in words what the rule refers; `found` and `spared` are pictures, each out of how many."""
    if not suspicious.any():
        return "Every class of this model is called benign, so no class asks for a look."
    if suspicious.all():
        return "No class of this model is known to be benign, so every predicted class asks for a look."
    figures = (
        f"On the site's tune pictures, this rule asks for a look at {_of(found, 'sensitivity')} of classes that are "
        f"not known to be benign, and asks for none at {_of(spared, 'specificity')} of benign classes."
    )
    rule = "A picture asks for a look where the predicted class is not known to be benign"
    if threshold is not None:
        return (
            f"{rule}, or where such classes have {threshold:.1%} or more together, chosen so that at least "
            f"{TARGET_SENSITIVITY:.0%} of the tune pictures of such classes do. {figures} Expect fewer of others."
        )
    return (
        f"WARNING: no threshold was chosen, for the site has {counted(found[1], 'tune picture')} of classes that are "
        f"not known to be benign, and {min_suspicious} are needed. {rule}, or, by default, where such classes have "
        f"{DEFAULT_SUSPICIOUS_FROM:.0%} or more together. {figures}"
    )


def _of(part: tuple[int, int], called: str) -> str:
    """Say at how many pictures, of how many, and what that share is called."""
    if not part[1]:
        return "no picture (there was none)"
    return f"{part[0]} of {counted(part[1], 'picture')} ({called} {part[0] / part[1]:.1%})"

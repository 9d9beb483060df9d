"""Linear probe of a frozen network's features, which chooses between its two readouts.

A probe is a class-balanced logistic regression fitted on a site's ``train`` rows and judged on its ``tune`` rows: it
says how much of the answer the features already hold, before any prompt is trained. The readout (class token or mean of
the patch tokens) with the higher mean over sites is taken and recorded (docs/methods.md, "readout"). Reported rows play
no part.

Guarantees of `fit_predict`: features are standardised with the mean and deviation of the fitted rows only; the same
rows give the same answer (deterministic solver, no seed); a site with a single class gets the constant answer, not an
error.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from edgefl_protocol.rules.accuracy import balanced_accuracy

STRENGTH = 1.0  # inverse L2 weight C, scikit-learn's default
MAX_ITERATIONS = 1000


@dataclass(frozen=True, kw_only=True)
class ProbeRows:
    """Features and classes of one site; ``features_*`` (rows, D), ``target_*`` (rows,)."""

    features_train: np.ndarray
    target_train: np.ndarray
    features_tune: np.ndarray
    target_tune: np.ndarray


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """Balanced accuracies of one readout; ``None`` where a site has no tune rows."""

    sites: dict[str, float | None]
    mean: float | None  # over sites that have a figure
    pooled: float | None  # one probe on all sites' rows
    one_class: tuple[str, ...] = ()  # sites with one class in either rows: their figure says nothing


def linear_probe(
    features_train: Float[np.ndarray, "B D"],
    target_train: Int[np.ndarray, " B"],
    features_tune: Float[np.ndarray, "B2 D"],
    target_tune: Int[np.ndarray, " B2"],
) -> float | None:
    """Return the balanced accuracy on the tune rows of a probe fitted on the train rows; ``None`` without either."""
    if target_train.size == 0 or target_tune.size == 0:
        return None
    classes = max(2, int(max(target_train.max(), target_tune.max())) + 1)
    probabilities = fit_predict(features_train, target_train, features_tune, classes)
    return balanced_accuracy(probabilities.argmax(axis=1), target_tune)


def probe_sites(rows: Mapping[str, ProbeRows]) -> ProbeReport:
    """Probe each site alone and all sites pooled."""
    names = sorted(rows)
    figures = {
        name: linear_probe(
            rows[name].features_train, rows[name].target_train, rows[name].features_tune, rows[name].target_tune
        )
        for name in names
    }
    known = [figure for figure in figures.values() if figure is not None]
    pooled = None
    if names:
        pooled = linear_probe(
            np.concatenate([rows[name].features_train for name in names]),
            np.concatenate([rows[name].target_train for name in names]),
            np.concatenate([rows[name].features_tune for name in names]),
            np.concatenate([rows[name].target_tune for name in names]),
        )
    return ProbeReport(
        sites=figures,
        mean=float(np.mean(known)) if known else None,
        pooled=pooled,
        one_class=tuple(name for name in names if figures[name] is not None and _has_one_class(rows[name])),
    )


def _has_one_class(rows: ProbeRows) -> bool:
    return 1 in (np.unique(rows.target_train).size, np.unique(rows.target_tune).size)


def choose_readout(reports: Mapping[str, ProbeReport]) -> str:
    """Return the readout with the highest mean over sites; on a tie, or without figures, the first in the mapping.

    A ``ValueError`` where there is none to choose from.
    """
    if not reports:
        raise ValueError("no readout to probe was given; name at least one")
    return max(reports, key=lambda readout: -1.0 if (mean := reports[readout].mean) is None else mean)


def fit_predict(
    features_fit: Float[np.ndarray, "B D"],
    target_fit: Int[np.ndarray, " B"],
    features: Float[np.ndarray, "B2 D"],
    classes: int,
    *,
    balanced: bool = True,
    strength: float = STRENGTH,
) -> Float[np.ndarray, "B2 K"]:
    """Fit on one set of rows and return the probabilities of another, 0 for a class without a fitted row.

    ``strength`` is the inverse of the L2 penalty's weight. A ``ValueError`` where there is no row to learn from.
    """
    # Loaded here: a coordinator's worker imports every method, starts once a round, and fits nothing.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    known = np.unique(target_fit)
    if known.size == 0:
        raise ValueError("there is no labelled row to fit a logistic regression to")
    probabilities = np.zeros((features.shape[0], classes))
    if known.size == 1:
        probabilities[:, known[0]] = 1.0
        return probabilities
    scaler = StandardScaler().fit(features_fit)
    model = LogisticRegression(C=strength, class_weight="balanced" if balanced else None, max_iter=MAX_ITERATIONS)
    with warnings.catch_warnings():
        # A probe is compared with other probes under the same budget; a not quite settled fit is still a fair one.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(scaler.transform(features_fit), target_fit)
    if features.shape[0] > 0:
        probabilities[:, known] = model.predict_proba(scaler.transform(features))
    return probabilities

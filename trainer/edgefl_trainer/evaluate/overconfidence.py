"""How far shown probabilities lie above or below how often they are right: one signed figure of a set of scored rows.

`overconfidence` is the mean probability of the likeliest class, less the share of rows in which that class is right;
below 0 the probabilities are too low. Unlike the expected calibration error it does not grow as rows get fewer, so its
interval can tell a poor model from a small test. Definition: docs/methods.md 8.4.
"""

import numpy as np
from jaxtyping import Float

from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, interval, lesion_weights
from edgefl_trainer.evaluate.metrics import open_answers

OVERCONFIDENCE = "overconfidence"


def overconfidence(scored: Scored) -> dict[str, float | list[float] | None]:
    """Compute the figure, in [-1, 1], and its interval over draws of lesions; None of no row, and below two lesions."""
    if not len(scored.target):
        return {OVERCONFIDENCE: None, f"{OVERCONFIDENCE}_interval": None}
    gaps = _gaps(scored)
    draws = None
    if len(set(scored.lesions)) > 1:
        weights = lesion_weights(scored.lesions, RESAMPLES)
        draws = interval(np.concatenate([(some @ gaps) / some.sum(axis=1) for some in weights]))
    return {OVERCONFIDENCE: float(gaps.mean()), f"{OVERCONFIDENCE}_interval": draws}


def _gaps(scored: Scored) -> Float[np.ndarray, " B"]:
    """Of each row: the probability of the likeliest class, less 1 where it is right."""
    probabilities = scored.probabilities.astype(np.float64)
    return np.asarray(probabilities.max(axis=1) - (open_answers(probabilities) == scored.target))

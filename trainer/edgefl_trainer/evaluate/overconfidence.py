"""How far shown probabilities lie above or below how often they are right: one signed figure of a set of scored rows.

`overconfidence` is the mean probability of the class that is named, less the share of these rows in which it is right;
below 0 the probabilities are too low. Rows without an answer show no probability and do not count. Unlike the expected
calibration error it does not grow as rows get fewer. Definition: docs/methods.md 8.4.
"""

import numpy as np
from jaxtyping import Bool, Float

from edgefl_protocol.bundle.tested_classes import FEW_LESIONS
from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, interval, lesion_weights, share_interval
from edgefl_trainer.evaluate.metrics import ABSTAINED

OVERCONFIDENCE = "overconfidence"
SHOWN = "shown_probability"
KEYS = (SHOWN, OVERCONFIDENCE, f"{OVERCONFIDENCE}_interval")


def overconfidence(scored: Scored) -> dict[str, float | list[float] | None]:
    """Compute `shown_probability`, the mean of the named classes, and `overconfidence` with its interval, in [-1, 1].

    None where nothing is named; no interval below ten lesions. Draws of lesions give it. Where all answers are right,
    or all wrong, they do not tell how sure that is: Clopper and Pearson's bounds of the share of right answers do, with
    lesions as trials.
    """
    part = scored.take(np.flatnonzero(scored.predicted != ABSTAINED))
    if not len(part.target):
        return dict.fromkeys(KEYS)
    shown = part.probabilities[np.arange(len(part.target)), part.predicted].astype(np.float64)
    right = part.predicted == part.target
    return {
        SHOWN: float(shown.mean()),
        OVERCONFIDENCE: float(shown.mean() - right.mean()),
        f"{OVERCONFIDENCE}_interval": _interval(shown, right, part.lesions),
    }


def _interval(
    shown: Float[np.ndarray, " B"], right: Bool[np.ndarray, " B"], lesions: tuple[str, ...]
) -> list[float] | None:
    trials = len(set(lesions))
    if trials < FEW_LESIONS:
        return None
    share = float(right.mean())
    if share in (0.0, 1.0):
        bounds = share_interval(np.array([share]), share, trials)
        return None if bounds is None else [float(shown.mean()) - bounds[1], float(shown.mean()) - bounds[0]]
    gaps = shown - right
    return interval(np.concatenate([(some @ gaps) / some.sum(axis=1) for some in lesion_weights(lesions, RESAMPLES)]))

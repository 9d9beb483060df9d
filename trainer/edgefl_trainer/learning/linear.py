"""Class-balanced logistic regression on fixed features: the common ground of the probes and of the baseline rows.

Guarantees: features are standardised with the mean and deviation of the fitted rows only; the same rows give the same
answer (deterministic solver, no seed); a site with a single class gets the constant answer instead of an error.
"""

import warnings

import numpy as np
from jaxtyping import Float, Int

STRENGTH = 1.0  # inverse L2 weight C, scikit-learn's default
MAX_ITERATIONS = 1000


def fit_predict(
    features_fit: Float[np.ndarray, "B D"],
    target_fit: Int[np.ndarray, " B"],
    features: Float[np.ndarray, "B2 D"],
    classes: int,
    *,
    balanced: bool = True,
    strength: float = STRENGTH,
) -> Float[np.ndarray, "B2 K"]:
    """Fit on one set of rows and return the probabilities of another.

    Args:
        classes: K; a class without a fitted row gets probability 0.
        strength: Inverse of the L2 penalty's weight.

    Returns:
        Probabilities; each row sums to 1.

    Raises:
        ValueError: There is no row to learn from.
    """
    # Loaded here: a coordinator's worker imports every method, starts once a round, and fits nothing.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    known = np.unique(target_fit)
    if known.size == 0:
        raise ValueError("there is no labelled row to fit a logistic regression on")
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

"""The skewed Dirichlet prior W of an evidential model: frequent classes get little prior mass.

Guarantee: W sums to K, so vacuity K/S is 1 at zero evidence. Source: FedEvPrompt (arXiv 2411.10071) section 3.1;
docs/methods.md 1.3.
"""

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.rules.draws import Balance


def counts_shown(counts: NDArray[np.int64], balance: Balance) -> NDArray[np.int64]:
    """Return the class counts that training shows a model, from those of the training rows, (K,).

    Where classes are drawn equally often, each class that has a row counts alike: to correct for the counts a second
    time would favour the rare classes.
    """
    return (counts > 0).astype(np.int64) if balance == "class" else counts


def class_prior(counts: NDArray[np.generic], floor: float) -> NDArray[np.float64]:
    """Compute W_k = K/(K−1)·(1 − N_k/N), raised to `floor`, then rescaled to sum K.

    After the rescaling the smallest entry may lie a little below the floor.

    Args:
        counts: training rows of each class that the model is shown, (K,).
        floor: smallest value before the rescaling; a site with one class only would otherwise have W_k = 0.

    Returns:
        W, (K,).

    Raises:
        ValueError: fewer than two classes, a negative or not finite count, or no rows at all.
    """
    values = counts.astype(np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(
            f"class counts have shape {values.shape}; a prior needs one count for each of two classes or more"
        )
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"class counts are {values.tolist()}; they must be finite and not negative")
    total, classes = values.sum(), len(values)
    if total == 0:
        raise ValueError("all class counts are zero; a prior needs at least one labelled training row")
    prior = np.maximum(classes / (classes - 1) * (1 - values / total), floor)
    return np.asarray(prior * (classes / prior.sum()))

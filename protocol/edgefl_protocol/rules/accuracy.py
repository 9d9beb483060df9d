"""Balanced accuracy: the mean over classes of the share of a class's rows that was recognised.

A predicted class of −1 means that nothing was predicted, which recognises nothing. Source: FLamby,
`fed_isic2019/metric.py`; docs/methods.md 8.4.
"""

import numpy as np
from numpy.typing import NDArray


def balanced_accuracy(
    predicted: NDArray[np.int64], target: NDArray[np.int64], counted: NDArray[np.bool_] | None = None
) -> float | None:
    """Return the mean recall over the classes that occur, or None where no counted class occurs.

    Args:
        predicted: class indices, −1 for none, (n,).
        target: class indices from 0, (n,).
        counted: which classes the mean is taken over, (K,); None for all.
    """
    classes = int(target.max(initial=-1)) + 1 if counted is None else len(counted)
    rows = np.bincount(target, minlength=classes)
    hits = np.bincount(target[predicted == target], minlength=classes)
    taken = rows > 0 if counted is None else counted & (rows > 0)
    return float((hits[taken] / rows[taken]).mean()) if taken.any() else None

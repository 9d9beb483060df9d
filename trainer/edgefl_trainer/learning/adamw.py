"""AdamW on named arrays, for a server that learns: numpy, float64, moments beside the values.

Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2, with PyTorch's form of weight decay (rate times decay). An array
without a gradient is left alone, moments and step count included.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.contract import Arrays

BETAS = (0.9, 0.999)
EPSILON = 1e-8
FIRST, SECOND, STEPS = "adamw.first.", "adamw.second.", "adamw.steps."


def adamw_step(
    arrays: Arrays, gradients: Mapping[str, NDArray[np.float64]], lr: float, weight_decay: float
) -> dict[str, NDArray[np.generic]]:
    """Step every array that has a gradient; give all arrays, the stepped ones in float64, and moments as `adamw.`.

    `arrays` hold what earlier steps left, too. `weight_decay` is decoupled: a step shrinks values by lr·weight_decay.
    """
    stepped = dict(arrays)
    for name in sorted(gradients):
        gradient = gradients[name]
        count = int(arrays.get(STEPS + name, np.zeros((), np.int64))) + 1
        first = BETAS[0] * _before(arrays, FIRST + name, gradient) + (1 - BETAS[0]) * gradient
        second = BETAS[1] * _before(arrays, SECOND + name, gradient) + (1 - BETAS[1]) * gradient**2
        scale = np.sqrt(second / (1 - BETAS[1] ** count)) + EPSILON
        decayed = arrays[name].astype(np.float64) * (1 - lr * weight_decay)
        stepped[name] = decayed - lr * (first / (1 - BETAS[0] ** count)) / scale
        stepped[FIRST + name], stepped[SECOND + name] = first, second
        stepped[STEPS + name] = np.asarray(count, dtype=np.int64)
    return stepped


def _before(arrays: Arrays, name: str, like: NDArray[np.float64]) -> NDArray[np.float64]:
    return arrays[name].astype(np.float64) if name in arrays else np.zeros_like(like)

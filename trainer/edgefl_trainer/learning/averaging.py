"""A round's replies averaged, and the weight of each site in the mean. Sums run in float64 and in site-name order."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.errors import TrainingError


def weighted_mean(
    replies: Mapping[str, Payload], weights: Mapping[str, float], tensors: Iterable[str] | None = None
) -> dict[str, NDArray[np.generic]]:
    """Average tensors, FedAvg's server step: theta = sum_c w_c·theta_c / sum_c w_c, in their own dtypes.

    `replies` by site all hold `tensors`, by default all of theirs. A `TrainingError` where no weight is above zero.
    """
    names = sorted(replies)
    total = math.fsum(weights[name] for name in names)
    if total <= 0:
        raise TrainingError("no reply of this round has a training image, so nothing can be averaged.")
    mean: dict[str, NDArray[np.generic]] = {}
    for key in sorted(replies[names[0]].arrays if tensors is None else tensors):
        first = replies[names[0]].arrays[key]
        summed = np.zeros(first.shape, dtype=np.float64)
        for name in names:  # one reply at a time, always in the same order
            summed += weights[name] * replies[name].arrays[key].astype(np.float64)
        exact = np.rint(summed / total) if np.issubdtype(first.dtype, np.integer) else summed / total
        mean[key] = np.asarray(exact, dtype=first.dtype)  # counters of batch norm are whole numbers
    return mean


def site_weights(weighting: Literal["samples", "uniform"], replies: Mapping[str, Payload]) -> dict[str, float]:
    """Weigh the sites in a mean: by training images, or each the same."""
    return dict.fromkeys(replies, 1.0) if weighting == "uniform" else sample_weights(replies)


def sample_weights(replies: Mapping[str, Payload]) -> dict[str, float]:
    """Weigh each site by its number of training images; a `TrainingError` where one is negative."""
    return {name: image_count(reply, "n_train", f"the reply of {name}") for name, reply in replies.items()}


def image_count(reply: Payload, name: str, whose: str = "a reply") -> float:
    """Read a number of images that a reply tells; a `TrainingError` where it is missing, no number, or negative."""
    count = reply.scalars.get(name)
    if not isinstance(count, int | float) or count < 0:
        raise TrainingError(f"{whose} says {name} = {count!r}; a number of images must be 0 or more.")
    return float(count)

"""Steps that several methods take, as plain functions. Sums run in float64 and in site-name order."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Site
from edgefl_trainer.errors import TrainingError


def weighted_mean(replies: Mapping[str, Payload], weights: Mapping[str, float]) -> dict[str, NDArray[np.generic]]:
    """FedAvg's server step: theta = sum_c w_c·theta_c / sum_c w_c, over every tensor of the replies.

    Args:
        replies: by site; all hold the same tensors.
        weights: one non-negative number for each site, not all zero.

    Returns:
        The averaged tensors in their own dtypes.

    Raises:
        TrainingError: no weight is above zero.
    """
    names = sorted(replies)
    total = math.fsum(weights[name] for name in names)
    if total <= 0:
        raise TrainingError("no reply of this round counts a training image: nothing can be averaged.")
    mean: dict[str, NDArray[np.generic]] = {}
    for key in sorted(replies[names[0]].arrays):
        first = replies[names[0]].arrays[key]
        summed = np.zeros(first.shape, dtype=np.float64)
        for name in names:  # one reply at a time, always in the same order
            summed += weights[name] * replies[name].arrays[key].astype(np.float64)
        exact = np.rint(summed / total) if np.issubdtype(first.dtype, np.integer) else summed / total
        mean[key] = np.asarray(exact, dtype=first.dtype)  # counters of batch norm are whole numbers
    return mean


def sample_weights(replies: Mapping[str, Payload]) -> dict[str, float]:
    """Weights of `weighting=samples`: each site's number of training images.

    Raises:
        TrainingError: a negative number.
    """
    return {name: image_count(reply, "n_train") for name, reply in replies.items()}


def image_count(reply: Payload, name: str) -> float:
    """A number of images that a reply tells.

    Raises:
        TrainingError: it is missing, no number, or negative.
    """
    count = reply.scalars.get(name)
    if not isinstance(count, int | float) or count < 0:
        raise TrainingError(f"a reply says {name} = {count!r}; a number of images is 0 or more.")
    return float(count)


def by_class(arrays: Arrays, kind: str, classes: int) -> dict[int, NDArray[np.generic]]:
    """The arrays `<kind>.<k>`, by class index k.

    Args:
        arrays: of a payload; those of other kinds are passed over.
        kind: first part of the names.
        classes: K.

    Raises:
        TrainingError: a k that is no class of the task.
    """
    allowed = {f"{kind}.{k}": k for k in range(classes)}
    found = {name: value for name, value in arrays.items() if name.startswith(f"{kind}.")}
    for name in found:
        if name not in allowed:
            raise TrainingError(f"the array {name[:40]} names no class of this task: {kind}.0 to {kind}.{classes - 1}.")
    return {allowed[name]: value for name, value in sorted(found.items())}


def batches_of(order: NDArray[np.int64], batch: int) -> list[NDArray[np.int64]]:
    """Positions in batches; the last may be smaller.

    Args:
        order: of one epoch, (n,).
        batch: B.
    """
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def check_finite(loss: Float[Tensor, ""], site: Site, round_: int, step: int) -> float:
    """The loss as a number.

    Args:
        loss: of one batch.
        site: who learns.
        round_: train round, from 1.
        step: of the epoch, from 0; the sentence counts from 1, as the progress display does.

    Raises:
        TrainingError: it is NaN or infinite; names site, round and step.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainingError(
            f"the loss of site {site.name} is {value} in round {round_}, step {step + 1}: "
            "lower the learning rate and name another --out; the rounds before are kept."
        )
    return value


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.generic]]:
    """Detached copies of tensors, as a payload or a state holds them."""
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def as_tensors(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Fresh tensors from a payload or a state."""
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in arrays.items()}

"""Steps that several methods take, as plain functions. Sums run in float64 and in site-name order."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, State
from edgefl_trainer.errors import TrainingError

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam and AdamW remember of a tensor


def weighted_mean(
    replies: Mapping[str, Payload], weights: Mapping[str, float], tensors: Iterable[str] | None = None
) -> dict[str, NDArray[np.generic]]:
    """Average tensors, FedAvg's server step: theta = sum_c w_c·theta_c / sum_c w_c, in their own dtypes.

    `replies` by site all hold `tensors`, by default all of theirs. A `TrainingError` where no weight is above zero.
    """
    names = sorted(replies)
    total = math.fsum(weights[name] for name in names)
    if total <= 0:
        raise TrainingError("no reply of this round counts a training image: nothing can be averaged.")
    mean: dict[str, NDArray[np.generic]] = {}
    for key in sorted(replies[names[0]].arrays if tensors is None else tensors):
        first = replies[names[0]].arrays[key]
        summed = np.zeros(first.shape, dtype=np.float64)
        for name in names:  # one reply at a time, always in the same order
            summed += weights[name] * replies[name].arrays[key].astype(np.float64)
        exact = np.rint(summed / total) if np.issubdtype(first.dtype, np.integer) else summed / total
        mean[key] = np.asarray(exact, dtype=first.dtype)  # counters of batch norm are whole numbers
    return mean


def weights(weighting: Literal["samples", "uniform"], replies: Mapping[str, Payload]) -> dict[str, float]:
    """Weigh the sites in a mean: by training images, or each the same."""
    return dict.fromkeys(replies, 1.0) if weighting == "uniform" else sample_weights(replies)


def sample_weights(replies: Mapping[str, Payload]) -> dict[str, float]:
    """Weigh each site by its number of training images; a `TrainingError` where one is negative."""
    return {name: image_count(reply, "n_train") for name, reply in replies.items()}


def image_count(reply: Payload, name: str) -> float:
    """Read a number of images that a reply tells; a `TrainingError` where it is missing, no number, or negative."""
    count = reply.scalars.get(name)
    if not isinstance(count, int | float) or count < 0:
        raise TrainingError(f"a reply says {name} = {count!r}; a number of images is 0 or more.")
    return float(count)


def by_class(arrays: Arrays, kind: str, classes: int) -> dict[int, NDArray[np.generic]]:
    """Pick the arrays `<kind>.<k>`, by class index k; a `TrainingError` for a k that is no class of the task."""
    allowed = {f"{kind}.{k}": k for k in range(classes)}
    found = {name: value for name, value in arrays.items() if name.startswith(f"{kind}.")}
    for name in found:
        if name not in allowed:
            raise TrainingError(f"the array {name[:40]} names no class of this task: {kind}.0 to {kind}.{classes - 1}.")
    return {allowed[name]: value for name, value in sorted(found.items())}


def class_rows(arrays: Arrays, kind: str, classes: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Stack the arrays `<kind>.<k>` as rows (K, width), zero where there is none, and which there are (K,)."""
    rows, known = np.zeros((classes, width), dtype=np.float32), np.zeros(classes, dtype=np.bool_)
    for k, row in by_class(arrays, kind, classes).items():
        rows[k], known[k] = row, True
    return rows, known


def moments_of(optimizer: torch.optim.Optimizer, learned: Mapping[str, Tensor]) -> State:
    """Read the moments of an Adam that has stepped, `optimizer.<moment>.<name>`, and the number of its steps."""
    found = {name: optimizer.state[tensor] for name, tensor in learned.items()}
    arrays = as_arrays({f"optimizer.{key}.{name}": own[key] for name, own in found.items() for key in MOMENTS})
    return State(arrays, {"optimizer.step": int(next(iter(found.values()))["step"])})


def restore_moments(optimizer: torch.optim.Optimizer, learned: Mapping[str, Tensor], state: State | None) -> None:
    """Let an Adam go on where `moments_of` saw it; without moments in `state` it begins afresh."""
    if state is None or "optimizer.step" not in state.values:
        return
    for name, tensor in learned.items():
        moments = as_tensors({key: state.arrays[f"optimizer.{key}.{name}"] for key in MOMENTS}, tensor.device)
        optimizer.state[tensor] = {"step": torch.tensor(float(state.values["optimizer.step"])), **moments}


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.generic]]:
    """Copy tensors to arrays, as a payload or a state holds them."""
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def as_tensors(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays of a payload or a state to tensors."""
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in arrays.items()}

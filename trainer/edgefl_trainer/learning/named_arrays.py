"""Named arrays of a payload or a state: from and to tensors, by class, and the moments of an optimiser."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgefl_trainer.contract import Arrays, State
from edgefl_trainer.errors import TrainingError

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam and AdamW remember of a tensor


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[np.generic]]:
    """Copy tensors to arrays, as a payload or a state holds them."""
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def as_tensors(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Copy arrays of a payload or a state to tensors."""
    return {name: torch.from_numpy(np.array(value)).to(device) for name, value in arrays.items()}


def by_class(arrays: Arrays, kind: str, classes: int) -> dict[int, NDArray[np.generic]]:
    """Pick the arrays `<kind>.<k>`, by class index k; a `TrainingError` for a k that is no class of the task."""
    allowed = {f"{kind}.{k}": k for k in range(classes)}
    found = {name: value for name, value in arrays.items() if name.startswith(f"{kind}.")}
    for name in found:
        if name not in allowed:
            raise TrainingError(
                f"the array {name[:40]} belongs to no class of this task, which has {kind}.0 to {kind}.{classes - 1}."
            )
    return {allowed[name]: value for name, value in sorted(found.items())}


def class_rows(arrays: Arrays, kind: str, classes: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Stack the arrays `<kind>.<k>` as rows (K, width), zero where there is none, and which there are (K,)."""
    rows, known = np.zeros((classes, width), dtype=np.float32), np.zeros(classes, dtype=np.bool_)
    for k, row in by_class(arrays, kind, classes).items():
        rows[k], known[k] = row, True
    return rows, known


def moments_of(optimizer: torch.optim.Optimizer, learned: Mapping[str, Tensor]) -> State:
    """Read the moments of an Adam that has stepped, `optimizer.<moment>.<name>`, and the number of its steps.

    A tensor that the loss does not depend on was never stepped, and has none.
    """
    found = {name: optimizer.state[tensor] for name, tensor in learned.items() if tensor in optimizer.state}
    arrays = as_arrays({f"optimizer.{key}.{name}": own[key] for name, own in found.items() for key in MOMENTS})
    return State(arrays, {"optimizer.step": int(next(iter(found.values()))["step"])})


def restore_moments(optimizer: torch.optim.Optimizer, learned: Mapping[str, Tensor], state: State | None) -> None:
    """Let an Adam go on where `moments_of` saw it; without moments in `state` it begins afresh."""
    if state is None or "optimizer.step" not in state.values:
        return
    for name, tensor in learned.items():
        if f"optimizer.{MOMENTS[0]}.{name}" not in state.arrays:
            continue
        moments = as_tensors({key: state.arrays[f"optimizer.{key}.{name}"] for key in MOMENTS}, tensor.device)
        optimizer.state[tensor] = {"step": torch.tensor(float(state.values["optimizer.step"])), **moments}

"""Groups of images that share prompts: which group an image takes, and how keys of groups begin and are averaged.

Source: SGPT (arXiv 2310.18285) as its code has it, github.com/ubc-tea/SGPT; docs/methods.md 5.5.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

FLOOR = 5e-4  # added to a group's frequency
FEW = 50  # selections of a round up to which a key's mean is plain


def orthogonal_keys(groups: int, width: int, generator: torch.Generator) -> Float[Tensor, "G D"]:
    """Gram-Schmidt of a Xavier-uniform matrix; all rows but the first have unit norm, as in the reference code."""
    bound = (6 / (groups + width)) ** 0.5
    keys = torch.empty((groups, width), dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    for row in range(1, groups):
        before = keys[:row]
        rest = keys[row] - (before @ keys[row] / before.square().sum(dim=1)) @ before
        keys[row] = rest / rest.norm()
    return keys.float()


def least_used_nearest(cosine: Float[Tensor, "B G"], used: Float[Tensor, " G"]) -> Int[Tensor, " B"]:
    """The group each image takes in training: argmin (1 − cos)·(f_g + 5e-4), without the factor while all are unused.

    Args:
        cosine: of queries and keys, (B, G).
        used: how often each group was taken so far, (G,).
    """
    factor = used / used.sum() + FLOOR if used.sum() > 0 else torch.ones_like(used)
    return ((1 - cosine) * factor).argmin(dim=-1)


def mean_keys(keys: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean key of each group, weighted by the sites' shares of its selections; plain where these are few.

    Args:
        keys: of each site, (C, G, D).
        counts: selections of each site in this round, (C, G).

    Returns:
        (G, D).
    """
    total = counts.sum(axis=0)
    weights = np.where(total > FEW, counts / np.maximum(total, 1), 1 / len(counts))  # columns sum to 1
    return np.asarray((weights[..., None] * keys).sum(axis=0))


def with_momentum(old: NDArray[Any], mean: NDArray[Any], momentum: float) -> NDArray[np.float32]:
    """momentum·old + (1 − momentum)·mean, float64 inside."""
    return (momentum * old.astype(np.float64) + (1 - momentum) * mean.astype(np.float64)).astype(np.float32)

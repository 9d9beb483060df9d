"""Groups of images that share prompts: which group an image takes, what it is learned with, and how keys begin and are
averaged.

Source: SGPT (arXiv 2310.18285) as its code has it, github.com/ubc-tea/SGPT; docs/methods.md 5.5.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from edgefl_trainer.contract import Site
from edgefl_trainer.learning.batches import autocast
from edgefl_trainer.learning.softmax import Forward
from edgefl_trainer.models.inserts import Grouped, group_queries, unit_keys
from edgefl_trainer.models.scoring import ScoreModule

KEYS = "keys"  # of the groups, (G, D)
FLOOR = 5e-4  # added to a group's frequency
FEW = 50  # selections of a round up to which a key's mean is plain


def orthogonal_keys(groups: int, width: int, generator: torch.Generator) -> Float[Tensor, "G D"]:
    """Orthogonalise a Xavier-uniform matrix (Gram-Schmidt); all rows but the first get unit norm, as in the source."""
    bound = (6 / (groups + width)) ** 0.5
    keys = torch.empty((groups, width), dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    for row in range(1, groups):
        before = keys[:row]
        rest = keys[row] - (before @ keys[row] / before.square().sum(dim=1)) @ before
        keys[row] = rest / rest.norm()
    return keys.float()


def least_used_nearest(cosine: Float[Tensor, "B G"], used: Float[Tensor, " G"]) -> Int[Tensor, " B"]:
    """Choose each image's group in training: argmin (1 − cos)·(f_g + 5e-4), without the factor while all are unused.

    `cosine` (B, G) is that of queries and keys; `used` (G,) counts how often each group was taken so far.
    """
    factor = used / used.sum() + FLOOR if used.sum() > 0 else torch.ones_like(used)
    return ((1 - cosine) * factor).argmin(dim=-1)


def mean_keys(keys: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Average each group's key over sites, (C, G, D) → (G, D), weighted by the sites' shares of its selections.

    Plain where these are few. `counts` (C, G) are the selections of each site in this round.
    """
    total = counts.sum(axis=0)
    weights = np.where(total > FEW, counts / np.maximum(total, 1), 1 / len(counts))  # columns sum to 1
    return np.asarray((weights[..., None] * keys).sum(axis=0))


def with_momentum(old: NDArray[Any], mean: NDArray[Any], momentum: float) -> NDArray[np.float32]:
    """Compute momentum·old + (1 − momentum)·mean, in float64."""
    return (momentum * old.astype(np.float64) + (1 - momentum) * mean.astype(np.float64)).astype(np.float32)


def without_group(site: Site, module: ScoreModule, insert: Grouped, tensors: Mapping[str, Tensor]) -> Forward:
    """Make the forward pass of stage 1: the loss is cross-entropy alone."""
    return lambda images: (_logits(site, module, insert, tensors, images, None), 0.0)


def grouped(
    site: Site,
    module: ScoreModule,
    insert: Grouped,
    tensors: Mapping[str, Tensor],
    used: Float[Tensor, " G"],
    selected: Int[Tensor, " G"],
    *,
    pull: bool,
) -> Forward:
    """Make the forward pass of stage 2: choose a group for each image, count it and, if asked, pull its key."""

    def score(images: Tensor) -> tuple[Tensor, Tensor | float]:
        with torch.no_grad(), autocast(site):
            queries = group_queries(module.vit(module.vit.normalise(images)).cls)
        cosine = queries @ unit_keys(tensors[KEYS]).T  # (B, G)
        chosen = least_used_nearest(cosine.detach(), used)
        selected.add_(torch.bincount(chosen, minlength=len(used)))
        added = -cosine.gather(1, chosen[:, None]).mean() if pull else 0.0
        return _logits(site, module, insert, tensors, images, chosen), added

    return score


def _logits(
    site: Site,
    module: ScoreModule,
    insert: Grouped,
    tensors: Mapping[str, Tensor],
    images: UInt8[Tensor, "B S S 3"],
    chosen: Int[Tensor, " B"] | None,
) -> Float[Tensor, "B K"]:
    with autocast(site):
        output = module.vit(module.vit.normalise(images), insert=insert.bind_selected(tensors, chosen))
    return module.logits(module.features(output, tensors), tensors)

"""Attention rollout of the class token over the patches, and distances between such maps.

Guarantees: only the class-token row is carried, r ← r·(A+I)/2 from the last block to the first, so the cost is a
vector times a matrix for each block; everything is differentiable; no prefix column enters a map.

Sources: Abnar and Zuidema (arXiv 2005.00928) for the rollout; FedEvPrompt (arXiv 2411.10071) section 3.2 for its use;
docs/methods.md, rollout, for the treatment of prefix columns (no paper names one).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

PrefixMode = Literal["renormalise", "sink"]
"""`renormalise` divides each row by what is left without the prefix columns (the same as a softmax over the other
logits); `sink` only drops them, so that mass given to prefixes is lost."""


@dataclass(frozen=True)
class Rollout:
    """How the map that travels is made."""

    prefix: PrefixMode = "renormalise"
    start: int = 0  # blocks that are left out at the input; with L − 1 the map is the last block's attention


WHOLE = Rollout()


def rollout_from_factors(
    factors: Sequence[Float[Tensor, "B T T"]], *, of_patches: bool = False
) -> Float[Tensor, "B N"]:
    """Roll out the class token's attention over the N patches through per-block factors; not normalised.

    The factors, first block first and at least one, are head-averaged attention over the T = 1+N class and patch
    tokens; a `ValueError` where there is none. With `of_patches`, the mean over the patch tokens instead of the class
    token's.
    """
    if not factors:
        raise ValueError("rollout needs the attention of at least one block; found none")
    last = factors[-1]
    if of_patches:
        asked = patch_rows(last)
        row = (asked + asked @ last) / 2  # (B, 1, T)
    else:
        class_token = torch.eye(1, last.shape[-1], dtype=last.dtype, device=last.device)
        row = (class_token + last[:, :1]) / 2  # (B, 1, T)
    for factor in reversed(factors[:-1]):
        row = (row + row @ factor) / 2  # r·(A + I)/2, I never built
    return row[:, 0, 1:]  # (B, N)


def patch_rows(factor: Float[Tensor, "B T T"]) -> Float[Tensor, "1 T"]:
    """Give the weights of the rows that a mean over patches reads: 0 for the class token, 1/N for each patch."""
    tokens = factor.shape[-1]
    weights = torch.full((1, tokens), 1 / (tokens - 1), dtype=factor.dtype, device=factor.device)
    weights[:, 0] = 0
    return weights


def attention_rollout(
    attentions: Sequence[Float[Tensor, "B H T C"]], prefix_length: int, mode: PrefixMode = "renormalise"
) -> Float[Tensor, "B N"]:
    """Roll out the class token's recorded attention: maps before max-normalisation.

    Args:
        attentions: probabilities of each block, first block first, (B, heads, 1+N, P+1+N), prefix columns first.
        prefix_length: P, the number of prefix columns to drop.
        mode: what happens to the dropped mass, see `PrefixMode`.

    Raises:
        ValueError: the columns are not P+1+N.
    """
    factors = []
    for attention in attentions:
        rows, columns = attention.shape[-2:]
        if columns != rows + prefix_length:
            raise ValueError(
                f"attention has {rows} rows and {columns} columns, which does not fit a prefix of {prefix_length}"
            )
        image = attention[..., prefix_length:]
        if mode == "renormalise":
            image = image / image.sum(dim=-1, keepdim=True)
        factors.append(image.mean(dim=1))  # (B, T, T)
    return rollout_from_factors(factors)


def travelling_map(factors: Sequence[Float[Tensor, "B T T"]], start: int = 0) -> Float[Tensor, "B N"]:
    """Compute the map that sites share: the class token's rollout through all blocks but the first `start`, scaled."""
    return max_normalise(rollout_from_factors(factors[start:]))


def max_normalise(maps: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """Divide each map, which is not negative, by its largest value; a map of zeros stays zero."""
    return maps / maps.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)


def _interpolation(grid: int, out_px: int) -> Float[Tensor, "out grid"]:
    """One axis of bilinear upsampling with half-pixel centres (align_corners off), edges repeated."""
    position = ((torch.arange(out_px, dtype=torch.float64) + 0.5) * grid / out_px - 0.5).clamp(min=0)
    low = position.floor().long().clamp(max=grid - 1)
    high = (low + 1).clamp(max=grid - 1)
    share = (position - low)[:, None]
    eye = torch.eye(grid, dtype=torch.float64)
    return (1 - share) * eye[low] + share * eye[high]


def bilinear_gram(grid: int, out_px: int = 224) -> Float[Tensor, "N N"]:
    """Compute UᵀU of bilinear upsampling from grid × grid patches, row by row, to out_px × out_px pixels; float64.

    (a−b)ᵀ UᵀU (a−b) is the squared distance of the two upsampled maps, computed on the token grid. The reference size
    stays 224 whatever the image size, so that the weight λ keeps its meaning.
    """
    axis = _interpolation(grid, out_px)  # (out, grid)
    square = axis.T @ axis
    return torch.kron(square, square)


def nearest_gram(grid: int, out_px: int = 224) -> Float[Tensor, "N N"]:
    """Compute UᵀU of nearest-neighbour upsampling: how many pixels show each patch (256 each for 14 → 224), float64."""
    shown = torch.bincount(torch.arange(out_px) * grid // out_px, minlength=grid).to(torch.float64)
    return torch.diag(torch.kron(shown, shown))

"""Maps for a person who reads a picture: where a vision transformer's head looked, in four kinds that trace to a graph.

    rollout      attention rolled out from the rows that the head reads      Abnar and Zuidema (arXiv 2005.00928)
    attention    the last block's attention from these rows, mean of heads
    values       the same, each head's weighted by the norms of its values   Kobayashi et al. (arXiv 2004.10102)
    share        each patch's part in the logit of the answer

The rows that the head reads are the class token's or, for the readout `mean`, those of all patches, averaged. For the
class token `rollout` is the map that travels, and needs no output of its own. No map here enters learning, and none
travels; which of them is true is measured for each model (`evaluate.measured_maps`). docs/methods.md 1.8.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.spec import Readout
from edgefl_trainer.models.vit import FrozenViT, ViTOutput
from edgefl_trainer.rollout import patch_rows, rollout_from_factors

GraphMap = Literal["rollout", "attention", "values", "share"]


def graph_maps(backbone: Backbone, readout: Readout) -> tuple[GraphMap, ...]:
    """List the kinds that need an output of their own; none for convolutional networks.

    `share` exists for a mean of patches under a final norm that is the identity or layer normalisation.
    """
    if not isinstance(backbone, FrozenViT):
        return ()
    if readout != "mean":
        return ("attention", "values")
    divisible = isinstance(backbone.vit.fc_norm, nn.Identity | nn.LayerNorm)
    return ("rollout", "attention", "values", *(("share",) if divisible else ()))


def attention_map(
    kind: Literal["rollout", "attention", "values"], output: ViTOutput, readout: Readout
) -> Float[Tensor, "B N"]:
    """Make a map out of attention alone, not normalised and never negative.

    Args:
        output: of a forward with `need_attention`, for `values` with `need_weighted`.
    """
    of_patches = readout == "mean"
    if kind == "rollout":
        return rollout_from_factors(output.factors, of_patches=of_patches)
    last = output.factors[-1] if kind == "attention" else output.weighted
    assert last is not None  # it was asked for
    row = patch_rows(last) @ last if of_patches else last[:, :1]  # (B, 1, 1+N)
    return row[:, 0, 1:]


def patch_features(output: ViTOutput, final_norm: nn.Module) -> Float[Tensor, "B N D"]:
    """Give each patch's part in the mean that the head reads: their mean over patches is `patch_mean`, exactly.

    Most networks norm every token, and there is nothing to do. Those that norm behind the mean m give
    γ·(m − mean(m))/s(m) + β, which with the picture's own s(m) held is linear in m, and so a mean over patches.

    Args:
        final_norm: what the network does behind the mean, the identity or layer normalisation.
    """
    patches = output.patches.to(torch.float32)
    if not isinstance(final_norm, nn.LayerNorm):
        return patches
    mean = patches.mean(dim=1, keepdim=True)  # (B, 1, D)
    spread = (mean.var(dim=-1, keepdim=True, unbiased=False) + final_norm.eps).sqrt()  # (B, 1, 1)
    normed = (patches - patches.mean(dim=-1, keepdim=True)) / spread
    return normed * final_norm.weight + final_norm.bias


def share_map(features: Float[Tensor, "B N D"], weights: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
    """Give each patch's share of the answer's logit: together they are the logit less the head's bias, exactly.

    That logit, divided by the temperature, is what evidence is made of, by a function that only grows: so the shares
    are exact for the logit, and order the patches for the evidence. Negative where a patch speaks against the answer.

    Args:
        features: of `patch_features`, standardised as the head's input is.
        weights: the head's row of the answer.
    """
    return (features @ weights.unsqueeze(-1))[..., 0] / features.shape[1]


def scaled(maps: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """Divide maps by their largest magnitude; a map of zeros stays zero."""
    return maps / maps.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)

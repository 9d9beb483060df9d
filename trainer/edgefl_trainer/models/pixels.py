"""From 8-bit pixels to a network's float input: one function for every backbone, so that all see the same numbers."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def pixel_scale(values: tuple[float, float, float]) -> Float[Tensor, "one 3 one one"]:
    """Convert channel means or deviations in [0, 1] to a tensor in units of 8-bit pixels, (1, 3, 1, 1)."""
    return torch.tensor(values).view(1, 3, 1, 1) * 255


def normalised(
    image: UInt8[Tensor, "B S S 3"], mean: Float[Tensor, "one 3 one one"], std: Float[Tensor, "one 3 one one"]
) -> Float[Tensor, "B 3 S S"]:
    """Normalise pixels: channels first in float32, mean subtracted, divided by the deviation (see `pixel_scale`)."""
    planes = image.permute(0, 3, 1, 2).to(torch.float32)
    return (planes - mean) / std

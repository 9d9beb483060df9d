"""A frozen convolutional network of timm: image in, one pooled feature out.

Guarantees: no weight learns, batch norm always uses its running statistics and never moves them, so the output is
timm's own in evaluation mode and does not depend on the batch. There is no attention: no prompts, no rollout map.
docs/methods.md, backbones; docs/decisions/0017.
"""

from typing import Any, NamedTuple

from jaxtyping import Float, UInt8
from torch import Tensor, nn

from edgefl_trainer.models.pixels import normalised, pixel_scale
from edgefl_trainer.models.spec import CNNSpec, Readout
from edgefl_trainer.models.vit import FrozenViT


class CNNOutput(NamedTuple):
    """Output of `FrozenCNN`: the pooled feature, (B, D)."""

    pooled: Float[Tensor, "B D"]

    def readout(self, name: Readout, prompts: int = 0) -> Float[Tensor, "B D"]:
        """Return the pooled feature, the only one that the head can read; there are no prompts.

        A `ValueError` where a readout of tokens is asked for.
        """
        if name != "pooled" or prompts:
            raise ValueError(f"a convolutional network has no readout {name!r}, only 'pooled'")
        return self.pooled


class FrozenCNN(nn.Module):
    """A convolutional network of timm, frozen."""

    network: Any  # timm carries no types
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, network: nn.Module, spec: CNNSpec) -> None:
        """Freeze a network without classifier, whose forward gives pooled features (B, D)."""
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.spec = spec
        self.register_buffer("pixel_mean", pixel_scale(spec.mean), persistent=False)
        self.register_buffer("pixel_std", pixel_scale(spec.std), persistent=False)

    def train(self, mode: bool = True) -> "FrozenCNN":
        """Set the flag of this module only: the network inside stays in evaluation mode."""
        super().train(mode)
        self.network.eval()
        return self

    def normalise(self, image: UInt8[Tensor, "B S S 3"]) -> Float[Tensor, "B 3 S S"]:
        """Turn 8-bit pixels (B, S, S, 3) into the network's float input, see `pixels.normalised`."""
        return normalised(image, self.pixel_mean, self.pixel_std)

    def forward(self, image: Float[Tensor, "B 3 S S"]) -> CNNOutput:
        """Compute the pooled feature of a batch from `normalise`; a `ValueError` where the image does not fit."""
        side = self.spec.image_px
        if tuple(image.shape[1:]) != (3, side, side):
            raise ValueError(
                f"image batch has shape {tuple(image.shape)}; {self.spec.name} takes (B, 3, {side}, {side})"
            )
        return CNNOutput(self.network(image))


Backbone = FrozenViT | FrozenCNN

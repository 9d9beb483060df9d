"""A masked autoencoder over a timm vision transformer.

He et al., "Masked Autoencoders Are Scalable Vision Learners", arXiv 2111.06377, section 3: a random quarter of the
patches goes through the encoder, a light decoder fills in the rest, and the squared error of the hidden patches,
each standardised by its own mean and variance, is the loss. docs/methods.md, FedMAE.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from edgefl_trainer.models.architectures import Architecture, build_vit, initialise, sincos_positions


class MaskedAutoencoder(nn.Module):
    """Encoder (to become a backbone) and decoder (dropped at the end)."""

    backbone: Any  # timm's annotations stop half-way
    decoder: Any
    decoder_positions: Tensor

    def __init__(self, architecture: Architecture, *, decoder_width: int, decoder_depth: int) -> None:
        from timm.models.vision_transformer import Block

        super().__init__()
        self.patch = architecture.patch
        self.tokens = (architecture.image_px // architecture.patch) ** 2
        self.backbone = build_vit(architecture)
        self.decoder = nn.ModuleDict(
            {
                "embed": nn.Linear(architecture.width, decoder_width),
                "blocks": nn.ModuleList(
                    Block(decoder_width, max(1, decoder_width // 32), qkv_bias=True) for _ in range(decoder_depth)
                ),
                "norm": nn.LayerNorm(decoder_width, eps=1e-6),
                "prediction": nn.Linear(decoder_width, 3 * architecture.patch**2),
            }
        )
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_width))
        positions = sincos_positions(decoder_width, architecture.image_px // architecture.patch)
        self.register_buffer("decoder_positions", positions, persistent=False)

    def initialise(self, seed: int) -> None:
        """Initialise as MAE does: Xavier-uniform linears, N(0, 0.02) class and mask tokens."""
        generator = torch.Generator().manual_seed(seed)
        initialise(self, generator)
        nn.init.normal_(self.backbone.get_parameter("cls_token"), std=0.02, generator=generator)
        nn.init.normal_(self.mask_token, std=0.02, generator=generator)

    def kept(self, mask_ratio: float) -> int:
        """Number of patches the encoder sees: int(N·(1 − mask ratio))."""
        return int(self.tokens * (1 - mask_ratio))

    def forward(
        self, images: Float[Tensor, "B 3 px px"], noise: Float[Tensor, "B N"], mask_ratio: float, norm_pix: bool
    ) -> Float[Tensor, ""]:
        """Compute the mean squared error over the hidden patches of a batch, all weighing the same.

        `noise` is uniform, a number for each patch: a share of `mask_ratio` is hidden, the smallest stay visible.
        `norm_pix` standardises each target patch.
        """
        order = noise.argsort(dim=1)  # (B, N)
        visible = order[:, : self.kept(mask_ratio)]
        predicted = self.decode(self.encode(images, visible), order)  # (B, N, 3p²)
        target = standardised(patches(images, self.patch)) if norm_pix else patches(images, self.patch)
        error = (predicted.float() - target).square().mean(dim=-1)  # (B, N)
        hidden = torch.ones_like(error).scatter_(1, visible, 0.0)  # 1 hidden, 0 visible
        return (error * hidden).sum() / hidden.sum()

    def encode(self, images: Float[Tensor, "B 3 px px"], visible: Int[Tensor, "B V"]) -> Float[Tensor, "B V1 D"]:
        """Encode class token and visible patches, up to the encoder's last norm."""
        vit = self.backbone
        positions = vit.pos_embed[:, 1:]  # the class token's own position is zero
        tokens = vit.patch_embed(images) + positions  # (B, N, D)
        tokens = tokens.gather(1, visible[..., None].expand(-1, -1, tokens.shape[-1]))  # (B, V, D)
        tokens = torch.cat([vit.cls_token.expand(len(tokens), -1, -1).to(tokens.dtype), tokens], dim=1)
        return vit.norm(vit.blocks(tokens))  # type: ignore[no-any-return]

    def decode(self, encoded: Float[Tensor, "B V1 D"], order: Int[Tensor, "B N"]) -> Float[Tensor, "B N pixels"]:
        """Predict the pixels of every patch, in the image's order."""
        embedded = self.decoder["embed"](encoded)  # (B, 1+V, D')
        hidden = self.mask_token.to(embedded.dtype).expand(len(order), self.tokens - embedded.shape[1] + 1, -1)
        shuffled = torch.cat([embedded[:, 1:], hidden], dim=1)  # (B, N, D'), in the order of `order`
        restored = shuffled.gather(1, order.argsort(dim=1)[..., None].expand_as(shuffled))
        tokens = torch.cat([embedded[:, :1], restored], dim=1) + self.decoder_positions
        for block in self.decoder["blocks"]:
            tokens = block(tokens)
        return self.decoder["prediction"](self.decoder["norm"](tokens))[:, 1:]  # type: ignore[no-any-return]


def patches(images: Float[Tensor, "B 3 px px"], patch: int) -> Float[Tensor, "B N pixels"]:
    """Cut images into patches, row by row; within a patch row, column, channel, as MAE does."""
    batch, channels, side, _ = images.shape
    grid = side // patch
    cut = images.reshape(batch, channels, grid, patch, grid, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, grid * grid, patch * patch * channels)


def standardised(targets: Float[Tensor, "B N pixels"]) -> Float[Tensor, "B N pixels"]:
    """Scale each patch by its own mean and unbiased variance + 1e-6 (MAE's norm_pix_loss)."""
    variance, mean = torch.var_mean(targets, dim=-1, keepdim=True)
    return (targets - mean) / (variance + 1e-6).sqrt()

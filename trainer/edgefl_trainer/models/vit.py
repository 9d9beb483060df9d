"""A frozen timm vision transformer with prefix prompts after the key and value projections, or prompt tokens.

Guarantees: no weight of the network ever learns or leaves evaluation mode; without prompts the outputs are timm's own;
the token count and the residual stream do not change with prefix prompts; rollout factors cover class and patch tokens
only, whatever stands between them, are float32 and differentiable.

Sources: FedEvPrompt (arXiv 2411.10071) eq. 1; the place of the prefix is DualPrompt's (arXiv 2204.04799): head space,
before the image tokens, after any key norm. docs/methods.md, prefix prompts and rollout.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from edgefl_trainer.models.inserts import Inserter
from edgefl_trainer.models.pixels import normalised, pixel_scale
from edgefl_trainer.models.spec import Readout, ViTSpec
from edgefl_trainer.rollout import PrefixMode

PromptInit = Literal["uniform", "normal"]
"""`uniform`: everything U(−1, 1), as DualPrompt; `normal`: keys N(0, 0.02), values zero."""

PrefixPlace = Literal["after", "before"]
"""`after`: prefixes join the projected keys and values; `before`: they are tokens, which the block projects itself."""


class ViTOutput(NamedTuple):
    """Outputs of `FrozenViT`.

    `cls` and `patch_mean` are two readouts after the final norm, (B, D); `inserted` are the prompt tokens after it,
    the last that entered first, (B, n, D); `factors` holds one head-averaged attention over the image columns for each
    block, (B, 1+N, 1+N), float32, and is empty when none was asked for. `patches` are the tokens whose mean is
    `patch_mean`, (B, N, D), before what the network norms behind that mean. `weighted` is the last factor with the
    columns of each head multiplied by the norms of its values, None when not asked for.
    """

    cls: Float[Tensor, "B D"]
    patch_mean: Float[Tensor, "B D"]
    inserted: Float[Tensor, "B n D"]
    factors: tuple[Float[Tensor, "B T T"], ...]
    patches: Float[Tensor, "B N D"]
    weighted: Float[Tensor, "B T T"] | None = None

    def readout(self, name: Readout, prompts: int = 0) -> Float[Tensor, "B D"]:
        """Return the feature that the head reads; for `prompted` the class token and that many of the prompt tokens.

        A `ValueError` where a readout of convolutional networks is asked for.
        """
        if name == "pooled":
            raise ValueError("a vision transformer has no readout 'pooled', only 'cls' and 'mean'")
        if name == "prompted":
            return torch.cat([self.cls.unsqueeze(1), self.inserted[:, :prompts]], dim=1).mean(dim=1)
        return self.cls if name == "cls" else self.patch_mean


def init_prompts(
    spec: ViTSpec, blocks: int, length: int, init: PromptInit, generator: torch.Generator
) -> Float[Tensor, "L two P H dh"]:
    """Make fresh prefix prompts of some consecutive blocks: keys at index 0 of the second axis, values at 1.

    `blocks` is the number that they serve (l for b-prompts, L − l for t-prompts); for `init` see `PromptInit`.
    """
    prompts = torch.zeros((blocks, 2, length, spec.heads, spec.head_width))
    if init == "uniform":
        return prompts.uniform_(-1, 1, generator=generator)
    prompts[:, 0].normal_(0, 0.02, generator=generator)
    return prompts


def _refusals(vit: nn.Module) -> list[str]:
    """What keeps a network from being a plain vision transformer with a class token."""
    from timm.layers.attention import Attention  # here: aggregation holds no network, and needs no seconds for timm
    from timm.models.vision_transformer import Block, VisionTransformer

    if not isinstance(vit, VisionTransformer):
        return [f"a timm VisionTransformer (found {type(vit).__name__})"]
    blocks = list(vit.blocks)
    checks = {
        "a class token": vit.has_class_token,
        "a token sequence without register tokens": not vit.num_reg_tokens,
        "a token sequence without distillation token": getattr(vit, "dist_token", None) is None,
        "token pooling instead of attention pooling": vit.attn_pool is None,
        "plain pre-norm blocks": all(type(block) is Block for block in blocks),
        "plain attention": all(
            type(block.attn) is Attention and getattr(block.attn, "gate", None) is None
            for block in blocks
            if hasattr(block, "attn")
        ),
        "a fixed image size": not vit.dynamic_img_size,
    }
    return [name for name, met in checks.items() if not met]


class FrozenViT(nn.Module):
    """A plain timm vision transformer, frozen, that accepts prefix prompts and reports its attention."""

    vit: Any  # timm carries no types
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, vit: nn.Module, spec: ViTSpec) -> None:
        """Freeze timm's `VisionTransformer`, whose classifier is not used, and check it against the specification.

        A `ValueError` where it lacks something this class needs, or differs from `spec`.
        """
        super().__init__()
        missing = _refusals(vit)
        if missing:
            raise ValueError(f"backbone {spec.name} cannot take prefix prompts; it would need {', '.join(missing)}")
        network: Any = vit.eval().requires_grad_(False)
        self.vit = network
        self.spec = spec
        found = {
            "image_px": tuple(network.patch_embed.img_size),
            "patch": tuple(network.patch_embed.patch_size),
            "depth": len(network.blocks),
            "heads": network.blocks[0].attn.num_heads,
            "width": network.embed_dim,
        }
        told = {"image_px": (spec.image_px,) * 2, "patch": (spec.patch,) * 2, "depth": spec.depth, "heads": spec.heads}
        told["width"] = spec.width
        differing = [f"{name} {found[name]} instead of {told[name]}" for name in found if found[name] != told[name]]
        if differing:
            raise ValueError(f"backbone {spec.name} differs from its description: {', '.join(differing)}")
        self.register_buffer("pixel_mean", pixel_scale(spec.mean), persistent=False)
        self.register_buffer("pixel_std", pixel_scale(spec.std), persistent=False)

    @property
    def network(self) -> Any:
        """The timm network inside, as every backbone calls it."""
        return self.vit

    @property
    def tokens(self) -> int:
        """Number N of patch tokens."""
        return self.spec.tokens

    def train(self, mode: bool = True) -> "FrozenViT":
        """Set the flag of this module only: the network inside stays in evaluation mode."""
        super().train(mode)
        self.vit.eval()
        return self

    def normalise(self, image: UInt8[Tensor, "B S S 3"]) -> Float[Tensor, "B 3 S S"]:
        """Turn 8-bit pixels (B, S, S, 3) into the network's float input, see `pixels.normalised`."""
        return normalised(image, self.pixel_mean, self.pixel_std)

    def forward(
        self,
        image: Float[Tensor, "B 3 S S"],
        prompts: Float[Tensor, "L two P H dh"] | None = None,
        *,
        insert: Inserter | None = None,
        need_attention: bool = False,
        need_weighted: bool = False,
        prefix_mode: PrefixMode = "renormalise",
        prefix_place: PrefixPlace = "after",
    ) -> ViTOutput:
        """Compute the features of a batch from `normalise`, and the rollout factors when asked for.

        Args:
            prompts: prefix of every block, (L, 2, P, h, d_h), keys first; None for none.
            insert: puts prompt tokens between class token and patches before a block; None for none.
            need_attention: also return rollout factors; takes the explicit attention path, which stores the
                probabilities of every block. Otherwise attention is fused.
            need_weighted: with `need_attention`, also the last factor weighted by the values' norms.
            prefix_mode: what the factors do with the columns of prefixes and prompt tokens, see
                `edgefl_trainer.rollout.PrefixMode`.
            prefix_place: where prompts join, see `PrefixPlace`.

        Raises:
            ValueError: prompts or image do not fit the backbone.
        """
        self._check(image, prompts)
        tokens = self.vit.norm_pre(self.vit._pos_embed(self.vit.patch_embed(image)))  # (B, 1+N, D)
        factors: list[Tensor] = []
        weighted = None
        for index, block in enumerate(self.vit.blocks):
            tokens = tokens if insert is None else insert(index, tokens)
            prefix = None if prompts is None else prompts[index]
            if prefix is not None and prefix_place == "before":
                prefix = _projected(block.attn, prefix)
            recorded = (prefix_mode, self.tokens) if need_attention else None
            mixed, attention, value = _attend(block.attn, block.norm1(tokens), prefix, recorded)
            # Stochastic depth and dropout are the identity here: the network stays in evaluation mode.
            tokens = tokens + block.ls1(mixed)
            tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
            if attention is not None:
                factors.append(attention.mean(dim=1))  # (B, 1+N, 1+N)
                if need_weighted and index == self.spec.depth - 1:
                    weighted = _weighted(attention, value)
        tokens = self.vit.norm(tokens)
        # Networks trained with mean pooling keep their final norm behind the pooling; elsewhere it is the identity.
        cls = self.vit.fc_norm(tokens[:, 0])
        first = tokens.shape[1] - self.tokens  # of the patches
        patches = tokens[:, first:]
        patch_mean = self.vit.fc_norm(patches.mean(dim=1))
        return ViTOutput(cls, patch_mean, self.vit.fc_norm(tokens[:, 1:first]), tuple(factors), patches, weighted)

    def _check(self, image: Tensor, prompts: Tensor | None) -> None:
        side = self.spec.image_px
        if tuple(image.shape[1:]) != (3, side, side):
            raise ValueError(
                f"image batch has shape {tuple(image.shape)}; {self.spec.name} takes (B, 3, {side}, {side})"
            )
        if prompts is None:
            return
        wanted = (self.spec.depth, 2, prompts.shape[2], self.spec.heads, self.spec.head_width)
        if tuple(prompts.shape) != wanted:
            raise ValueError(
                f"prompts have shape {tuple(prompts.shape)}; {self.spec.name} takes {wanted}:"
                " blocks, keys and values, prefix length, heads, head width"
            )


def _projected(attention: Any, prefix: Float[Tensor, "two P H dh"]) -> Float[Tensor, "two P H dh"]:
    """Prefixes that are tokens of width D = h·d_h, as the keys and values that the block makes of tokens."""
    length, width = prefix.shape[1], attention.num_heads * attention.head_dim
    key, value = (
        attention.qkv(tokens).split(width, dim=-1)[part].reshape(length, attention.num_heads, attention.head_dim)
        for part, tokens in enumerate(prefix.reshape(2, length, width), start=1)
    )
    return torch.stack([attention.k_norm(key), value])


def _attend(
    attention: Any,
    tokens: Float[Tensor, "B T D"],
    prefix: Float[Tensor, "two P H dh"] | None,
    recorded: tuple[PrefixMode, int] | None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B h I I"] | None, Float[Tensor, "B h T dh"]]:
    """Multi-head attention of one block with its prefix, and the values of the tokens alone.

    With a mode and N also the attention of each head over class and patch tokens, whose mean is the factor.
    """
    batch, length, _ = tokens.shape
    heads, width = attention.num_heads, attention.head_dim
    parts = attention.qkv(tokens).split(heads * width, dim=-1)
    query, key, value = (part.reshape(batch, length, heads, width).transpose(1, 2) for part in parts)  # (B, h, T, d_h)
    query, key = attention.q_norm(query), attention.k_norm(key)
    own = value
    if prefix is not None:
        pair = prefix.to(key.dtype).permute(0, 2, 1, 3).unsqueeze(1).expand(-1, batch, -1, -1, -1)  # (2, B, h, P, d_h)
        key = torch.cat([pair[0], key], dim=2)  # (B, h, P+T, d_h)
        value = torch.cat([pair[1], value], dim=2)
    image = None
    if recorded is None:
        mixed = scaled_dot_product_attention(query, key, value)
    else:
        mode, patches = recorded
        logits = (query / math.sqrt(width)) @ key.transpose(-2, -1)  # (B, h, T, P+T)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        mixed = probabilities.to(value.dtype) @ value
        whole = logits.shape[-1] == 1 + patches
        if mode == "renormalise" and not whole:
            # Equal to dropping the prompts' columns and dividing by the rest, but exact when that rest underflows.
            image = _image_part(logits, patches).softmax(dim=-1, dtype=torch.float32)
        else:
            image = probabilities if whole else _image_part(probabilities, patches)  # (B, h, 1+N, 1+N)
    mixed = mixed.transpose(1, 2).reshape(batch, length, heads * width)  # (B, T, D)
    return attention.proj(attention.norm(mixed)), image, own


def _weighted(attention: Float[Tensor, "B h I I"], value: Float[Tensor, "B h T dh"]) -> Float[Tensor, "B I I"]:
    """Mean over heads of attention times the norm of the value it takes (Kobayashi et al., arXiv 2004.10102)."""
    patches = attention.shape[-1] - 1
    norms = value.to(torch.float32).norm(dim=-1).unsqueeze(-2)  # (B, h, 1, T), prompt tokens behind the class token
    return (attention * torch.cat([norms[..., :1], norms[..., -patches:]], dim=-1)).mean(dim=1)


def _image_part(attention: Float[Tensor, "B H T C"], patches: int) -> Float[Tensor, "B H I I"]:
    """Rows and columns of class token and patches: prefixes stand before both, prompt tokens between them."""
    rows, columns = attention.shape[-2:]
    if rows > 1 + patches:
        attention = torch.cat([attention[..., :1, :], attention[..., rows - patches :, :]], dim=-2)
        own = columns - rows  # prefix columns
        return torch.cat([attention[..., own : own + 1], attention[..., columns - patches :]], dim=-1)
    return attention[..., columns - rows :]

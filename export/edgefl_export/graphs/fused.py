"""The score of a vision transformer in the operators that onnxruntime fuses: same numbers, fewer and larger steps.

Guarantees: the outputs are those of the `ScoreModule` it is made from (the export gates compare them); every trainable
tensor stays an argument; the weights are the module's own. What differs is the shape of the work:

    linear layers   of attention on (B·T, ·) matrices, so each is one Gemm; query, key and value apart, none is split
    attention       the standard operator `Attention`; prefix prompts are further rows of keys and values, in the layout
                    the tensors already have
    rollout         the probabilities that attention returns, read once by a vector-matrix product: the rescaling of a
                    row over the image columns goes into the vector
    last block      where the head reads the class token, queries and all that follows are those of that token alone

Source: docs/design.md, section 8, device; ONNX operator Attention-23, `qk_matmul_output_mode` 3 (after the softmax).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional
from torch.onnx import ops

from edgefl_trainer.models.scoring import ScoreModule, ScoreOutput
from edgefl_trainer.models.shown_maps import scaled
from edgefl_trainer.models.vit import FrozenViT, ViTOutput
from edgefl_trainer.rollout import PrefixMode, max_normalise, patch_rows

AFTER_SOFTMAX = 3  # qk_matmul_output_mode


def can_fuse(module: ScoreModule) -> bool:
    """Tell whether a fused form exists: for vision transformers with prompts, if any, on projected keys and values."""
    options = module.options
    return isinstance(module.backbone, FrozenViT) and options.insert is None and options.prefix == "after"


class _Attention(nn.Module):
    """The linear layers of one block's attention, query, key and value apart; keys and values without their bias.

    A constant added to every key changes each logit of a row alike, and the softmax not at all; one added to every
    value is added to their mean. So the biases are taken from the prefix rows instead, and that of the values goes
    through the projection: two additions over all tokens less. Networks that norm between keep their biases.
    """

    shift: Tensor

    def __init__(self, attention: Any) -> None:
        super().__init__()
        width = attention.qkv.in_features
        weights: tuple[Tensor, ...] = torch.split(attention.qkv.weight.detach(), width)
        bias = attention.qkv.bias
        parts = torch.split(torch.zeros(3 * width) if bias is None else bias.detach(), width)
        plain = all(isinstance(norm, nn.Identity) for norm in (attention.k_norm, attention.norm))
        moved = plain and bias is not None
        shift = torch.stack([parts[1], parts[2]]) if moved else torch.zeros((2, width))
        self.register_buffer("shift", shift[:, None])  # (2, 1, D), keys and values
        self.query = _linear(weights[0], None if bias is None else parts[0])
        self.key = _linear(weights[1], None if moved or bias is None else parts[1])
        self.value = _linear(weights[2], None if moved or bias is None else parts[2])
        weight, own = attention.proj.weight.detach(), attention.proj.bias
        base = torch.zeros(width) if own is None else own.detach()
        self.proj = _linear(weight, base + weight @ shift[1])


def _linear(weight: Float[Tensor, "D D"], bias: Float[Tensor, " D"] | None) -> nn.Linear:
    """Return a frozen layer."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return layer


class FusedScore(nn.Module):
    """Scores as a `ScoreModule` does."""

    def __init__(self, module: ScoreModule) -> None:
        """Take over a module's network and options.

        Args:
            module: on the CPU, float32, in evaluation mode.

        Raises:
            ValueError: there is no fused form of it, see `can_fuse`.
        """
        super().__init__()
        if not can_fuse(module):
            raise ValueError(f"{module.backbone.spec.name} with these prompts has no fused form")
        self.module = module
        self.options = module.options
        self.attentions: Any = nn.ModuleList(_Attention(block.attn) for block in module.vit.vit.blocks)

    def forward(self, image: UInt8[Tensor, "B S S 3"], tensors: dict[str, Tensor]) -> ScoreOutput:
        """Score a batch; see `ScoreModule.forward`."""
        vit, spec = self.module.vit, self.module.vit.spec
        names = self.options.prompts
        prefixes = self._prefixes([tensors[name] for name in names]) if names else ()
        network, length = vit.vit, 1 + spec.tokens
        tokens = network.norm_pre(network._pos_embed(network.patch_embed(vit.normalise(image))))  # (B, T, D)
        batch, rows = tokens.shape[0], length
        tokens = tokens.reshape(-1, spec.width)  # (B·T, D)
        probabilities = []
        for index, block in enumerate(network.blocks):
            whole = block.norm1(tokens)
            asked = whole
            if index == spec.depth - 1 and self.options.readout == "cls":
                asked, tokens, rows = _first(whole, batch, length), _first(tokens, batch, length), 1
            pair = prefixes[2 * index : 2 * index + 2]
            mixed, attention, value = self._attend(index, block.attn, asked, whole, pair, batch)
            probabilities.append(attention)
            tokens = tokens + block.ls1(mixed)
            grouped = block.norm2(tokens).reshape(batch, rows, spec.width)
            tokens = tokens + block.ls2(block.mlp(grouped)).reshape(-1, spec.width)
        tokens = network.norm(tokens).reshape(batch, rows, spec.width)
        mean = tokens[:, 1:].mean(dim=1) if rows > 1 else tokens[:, 0]  # not read where the class token is
        found = ViTOutput(network.fc_norm(tokens[:, 0]), network.fc_norm(mean), tokens[:, :0], (), tokens[:, 1:])
        prefix_length = prefixes[0].shape[1] if prefixes else 0
        rolled = probabilities[self.options.rollout_from :]
        maps = max_normalise(_rollout(rolled, prefix_length, self.options.prefix_mode))
        score = self.module.judge(self.module.features(found, tensors), tensors, maps)
        if self.module.shown is None:
            return score
        if self.module.shown == "share":
            return score._replace(shown=self.module.shares(found, tensors, score.probabilities))
        return score._replace(shown=scaled(self._attention_map(probabilities, value, prefix_length)))

    def _attention_map(
        self, probabilities: Sequence[Float[Tensor, "B H Q C"]], value: Float[Tensor, "B T D"], prefix: int
    ) -> Float[Tensor, "B N"]:
        """As `shown_maps.attention_map`; `value` is of the last block, without what `_Attention` moved."""
        mode, of_patches = self.options.prefix_mode, self.options.readout == "mean"
        if self.module.shown == "rollout":
            return _rollout(probabilities, prefix, mode, of_patches=of_patches)
        image = probabilities[-1][..., prefix:]  # (B, h, Q, T)
        if prefix and mode == "renormalise":
            image = image / image.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        if self.module.shown == "values":
            batch, length, width = value.shape
            heads = image.shape[1]
            whole = (value + self.attentions[-1].shift[1]).reshape(batch, length, heads, width // heads)
            image = image * whole.norm(dim=-1).transpose(1, 2).unsqueeze(2)
        row = image.mean(dim=1)  # (B, Q, T)
        row = patch_rows(row) @ row if of_patches else row[:, :1]
        return row[:, 0, 1:]

    def _prefixes(self, prompts: Sequence[Float[Tensor, "L two P H dh"]]) -> tuple[Float[Tensor, "1 P D"], ...]:
        """Rows before the keys and before the values of each block in turn, without what `_Attention` moved."""
        width = self.module.vit.spec.width
        joined = torch.cat(list(prompts))
        shifts = torch.cat([attention.shift for attention in self.attentions])  # (2·L, 1, D)
        rows = joined.reshape(2 * joined.shape[0], joined.shape[2], width) - shifts
        return torch.split(rows, 1)

    def _attend(
        self,
        index: int,
        attention: Any,
        asked: Float[Tensor, "R D"],
        whole: Float[Tensor, "M D"],
        prefix: Sequence[Float[Tensor, "1 P D"]],
        batch: int,
    ) -> tuple[Float[Tensor, "R D"], Float[Tensor, "B H Q C"], Float[Tensor, "B T D"]]:
        """Attention of one block after its norm, with the probabilities of each head over prefix and sequence.

        Also the values of the sequence, without what `_Attention` moved.
        """
        width, heads, layers = whole.shape[1], attention.num_heads, self.attentions[index]
        query, key, value = (
            part.reshape(batch, -1, width)  # (B, T, D)
            for part in (layers.query(asked), layers.key(whole), layers.value(whole))
        )
        query, key = _normed(attention.q_norm, query, heads), _normed(attention.k_norm, key, heads)
        own = value
        if prefix:
            before = [_repeated(rows, batch, value) for rows in prefix]  # (B, P, D)
            key, value = torch.cat([before[0], key], dim=1), torch.cat([before[1], value], dim=1)
        mixed, _, _, probabilities = ops.attention(
            query, key, value, q_num_heads=heads, kv_num_heads=heads, qk_matmul_output_mode=AFTER_SOFTMAX
        )
        return layers.proj(attention.norm(mixed.reshape(-1, width))), probabilities, own


def _repeated(rows: Float[Tensor, "1 P D"], batch: int, own: Float[Tensor, "B T D"]) -> Float[Tensor, "B P D"]:
    """Return the rows for every image of a batch.

    A single row is added to zeros made of the images' `own`: onnxruntime takes a length that the operator Expand makes
    of 1 for unknown, and then refuses what follows Attention.
    """
    return rows + 0 * own[:, :1] if rows.shape[1] == 1 else rows.expand(batch, -1, -1)


def _first(tokens: Float[Tensor, "M D"], batch: int, length: int) -> Float[Tensor, "B D"]:
    """Return the class token of every image."""
    return tokens.reshape(batch, length, tokens.shape[1])[:, 0]


def _normed(norm: nn.Module, tokens: Float[Tensor, "B T D"], heads: int) -> Float[Tensor, "B T D"]:
    """Apply a norm over the width of one head; most networks have none."""
    if isinstance(norm, nn.Identity):
        return tokens
    batch, length, width = tokens.shape
    normed: Tensor = norm(tokens.reshape(batch, length, heads, width // heads))
    return normed.reshape(batch, length, width)


def _rollout(
    probabilities: Sequence[Float[Tensor, "B H Q C"]], prefix: int, mode: PrefixMode, *, of_patches: bool = False
) -> Float[Tensor, "B N"]:
    """`edgefl_trainer.rollout.attention_rollout` without building a factor: (r/s)·A for r·(A/s), heads apart.

    Where a prefix takes all that float32 can tell of a row, that row counts nothing here; the trainer's softmax over
    the image columns still finds its shape.
    """
    row = patch_rows(probabilities[-1][:, 0, :, prefix:]).unsqueeze(0) if of_patches else None  # (1, 1, T)
    tiny = torch.finfo(torch.float32).tiny
    for found in reversed(probabilities):
        found = found if row is not None else found[:, :, :1]
        image = found.shape[-1] - prefix
        rescaled = torch.ones(1) if row is None else row  # (B, 1, Q)
        if prefix and mode == "renormalise":
            counted = functional.pad(torch.ones((image, 1)), (0, 0, prefix, 0))  # 0 for prefix columns, (C, 1)
            rescaled = rescaled / (found @ counted)[..., 0].clamp(min=tiny)  # (B, h, Q)
        else:
            rescaled = rescaled.expand(found.shape[:3])
        passed = (rescaled.unsqueeze(2) @ found).mean(dim=1)[..., prefix:]  # (B, 1, T)
        start = functional.pad(torch.ones((1, 1, 1)), (0, image - 1)) if row is None else row
        row = (start + passed) / 2
    if row is None:
        raise ValueError("rollout needs the attention of at least one block; found none")
    return row[:, 0, 1:]

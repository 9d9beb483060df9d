"""Transformer blocks made of named tensors, plain or with prompt-based residual attention.

    Y = X + MSA(LN X) + g · Attn(LN X W_Q, LN p W_K, LN p W_V)
    Z = Y + MLP(LN Y)

Attn(Q, K, V) = softmax(QKᵀ/√d)V; LN p has no weights of its own; g is a number for each block. A plain block leaves the
term with g out. Guarantees: the tensors are arguments, never constants; nothing is drawn but dropout while training; a
token that may attend to no prompt takes nothing from any. Padded tokens are attended to by no other.

Source: Zhu et al., arXiv 2402.09677, whose equations were not to be had; docs/methods.md 11.1 gives the form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

HIDDEN = 2  # width of a block's MLP, in widths of its tokens
FAR_BELOW = -1e9  # a score that leaves no weight; finite, so that a row of padding alone stays a number
PARTS = ("weight", "bias")
DEVIATION = 0.02  # of fresh embeddings and prompts


class Prompts(NamedTuple):
    """The prompt tokens of a block, p, and which of them each token of a sequence may attend to."""

    tokens: Float[Tensor, "P d"]
    allowed: Bool[Tensor, "T P"]


class AfterBlock(NamedTuple):
    """What a block makes of the first R tokens of a sequence: `tokens`, and the `attention` of each of its heads."""

    tokens: Float[Tensor, "B R d"]
    attention: Float[Tensor, "B h R T"]


@dataclass(frozen=True)
class Block:
    """One block: where its tensors stand, and what is fixed of it."""

    name: str  # begins the names of its tensors
    heads: int
    prompted: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of its tensors, in the order of a graph's inputs."""
        layers = [f"{layer}.{part}" for layer in ("norm1", "qkv", "proj", "norm2", "mlp1", "mlp2") for part in PARTS]
        own = ("gate", "prompt_query.weight", "prompt_key.weight", "prompt_value.weight") if self.prompted else ()
        return tuple(f"{self.name}.{part}" for part in (*layers, *own))

    def fresh(self, width: int, generator: torch.Generator, gate: float) -> dict[str, Tensor]:
        """Draw its tensors: Xavier-uniform weights, zero biases, unit norms, and a g of `gate`."""
        made = {
            **fresh_norm("norm1", width),
            **fresh_linear("qkv", width, 3 * width, generator),
            **fresh_linear("proj", width, width, generator),
            **fresh_norm("norm2", width),
            **fresh_linear("mlp1", width, HIDDEN * width, generator),
            **fresh_linear("mlp2", HIDDEN * width, width, generator),
        }
        if self.prompted:
            made["gate"] = torch.tensor(gate)
            for kind in ("query", "key", "value"):
                made[f"prompt_{kind}.weight"] = fresh_matrix(width, width, generator)
        return {f"{self.name}.{part}": value for part, value in made.items()}

    def __call__(
        self,
        tokens: Float[Tensor, "B T d"],
        present: Bool[Tensor, "B T"],
        tensors: Mapping[str, Tensor],
        prompts: Prompts | None = None,
        dropout: float = 0.0,
        most: int | None = None,
    ) -> AfterBlock:
        """Mix a sequence.

        Args:
            tokens: the sequence X, padded to T.
            present: false where a token is padding.
            tensors: by the names of `tensors`; others are ignored.
            prompts: p; None leaves the term with g out.
            dropout: share of the values of each branch that is dropped; of 0, nothing is drawn.
            most: R, how many of the first tokens are wanted: the others are attended to alone. None: all.
        """
        normed = norm(tokens, tensors, f"{self.name}.norm1")
        mixed, attention = self._attend(normed, normed[:, :most], present, tensors)
        after = tokens[:, :most] + _dropped(mixed, dropout)
        if prompts is not None:
            wanted = Prompts(prompts.tokens, prompts.allowed[:most])
            after = after + tensors[f"{self.name}.gate"] * prompt_attention(
                normed[:, :most],
                wanted,
                *(tensors[f"{self.name}.prompt_{kind}.weight"] for kind in ("query", "key", "value")),
            )
        hidden = functional.gelu(linear(norm(after, tensors, f"{self.name}.norm2"), tensors, f"{self.name}.mlp1"))
        changed = linear(hidden, tensors, f"{self.name}.mlp2")
        return AfterBlock(after + _dropped(changed, dropout), attention)

    def _attend(
        self,
        normed: Float[Tensor, "B T d"],
        wanted: Float[Tensor, "B R d"],
        present: Bool[Tensor, "B T"],
        tensors: Mapping[str, Tensor],
    ) -> tuple[Float[Tensor, "B R d"], Float[Tensor, "B h R T"]]:
        """Multi-head attention of some tokens to those that are present."""
        batch, _, width = normed.shape
        weight, bias = (tensors[f"{self.name}.qkv.{part}"] for part in PARTS)
        parts = (
            functional.linear(wanted, weight[:width], bias[:width]),
            *functional.linear(normed, weight[width:], bias[width:]).chunk(2, dim=-1),
        )
        query, key, value = (
            part.reshape(batch, part.shape[1], self.heads, width // self.heads).transpose(1, 2) for part in parts
        )  # (B, h, R or T, d/h)
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5  # (B, h, R, T)
        attention = scores.masked_fill(~present[:, None, None, :], FAR_BELOW).softmax(dim=-1)
        mixed = (attention @ value).transpose(1, 2).reshape(batch, wanted.shape[1], width)
        return linear(mixed, tensors, f"{self.name}.proj"), attention


def prompt_attention(
    normed: Float[Tensor, "B T d"],
    prompts: Prompts,
    query: Float[Tensor, "d d"],
    key: Float[Tensor, "d d"],
    value: Float[Tensor, "d d"],
) -> Float[Tensor, "B T d"]:
    """Compute Attn(LN X W_Q, LN p W_K, LN p W_V) of one head; a token that no prompt is for takes zero.

    The matrices are held as PyTorch's linear layers hold them, outputs first.
    """
    tokens = functional.layer_norm(prompts.tokens, normed.shape[-1:])  # (P, d)
    scores = (normed @ query.T) @ (tokens @ key.T).T / normed.shape[-1] ** 0.5  # (B, T, P)
    attention = scores.masked_fill(~prompts.allowed, FAR_BELOW).softmax(dim=-1)
    served = prompts.allowed.any(dim=-1, keepdim=True).to(normed.dtype)  # (T, 1)
    taken: Tensor = attention @ (tokens @ value.T)  # (B, T, d)
    return taken * served


def linear(values: Float[Tensor, "*rows n"], tensors: Mapping[str, Tensor], name: str) -> Float[Tensor, "*rows m"]:
    """Apply the linear layer of that name."""
    return functional.linear(values, tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def norm(values: Float[Tensor, "*rows d"], tensors: Mapping[str, Tensor], name: str) -> Float[Tensor, "*rows d"]:
    """Apply the layer norm of that name."""
    return functional.layer_norm(values, values.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def fresh_linear(name: str, width_in: int, width_out: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw a linear layer: Xavier-uniform weight, zero bias."""
    return {f"{name}.weight": fresh_matrix(width_in, width_out, generator), f"{name}.bias": torch.zeros(width_out)}


def fresh_matrix(width_in: int, width_out: int, generator: torch.Generator) -> Float[Tensor, "m n"]:
    """Draw a weight, Xavier-uniform."""
    weight = torch.empty((width_out, width_in))
    torch.nn.init.xavier_uniform_(weight, generator=generator)
    return weight


def fresh_norm(name: str, width: int) -> dict[str, Tensor]:
    """Make a layer norm that changes nothing yet."""
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


def fresh_tokens(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw embeddings or prompts, N(0, 0.02): a prompt of zeros would be like no other."""
    return torch.zeros(shape).normal_(0, DEVIATION, generator=generator)


def _dropped(values: Tensor, share: float) -> Tensor:
    return functional.dropout(values, share) if share else values

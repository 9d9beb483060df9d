"""Prompt tokens that stand in the sequence beside the image's own: [class token, prompts, patches].

Prefix prompts (`vit.py`) lengthen keys and values; the tokens here are part of the residual stream. They carry no
position and enter before a block. Three kinds cover the papers:

    Tokens   n fresh tokens; further blocks replace them        VPT shallow and deep (arXiv 2203.12119 section 3.2)
    Mixed    one token mixed from class prompts by prototypes   PEP-FedPT (arXiv 2510.25372 section 4, CCMP)
             and class shares, behind n shared ones
    Grouped  shared tokens, then tokens of one selected group   SGPT (github.com/ubc-tea/SGPT; docs/methods.md 5.5)

Guarantees: class token first and patches last, always; tensors are arguments, never constants; everything traces to
plain ONNX operators. docs/methods.md, prompt tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

BareTokens = Callable[[], Float[Tensor, "B D"]]
"""Class token of the frozen network without prompts, computed when it is asked for."""


Inserter = Callable[[int, Tensor], Tensor]
"""Before block i, counted from 0: the sequence (B, T, D) to the one the block reads, (B, T', D)."""


@runtime_checkable
class Insert(Protocol):
    """A kind of prompt tokens: which tensors it needs, and where they go."""

    kind: ClassVar[str]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in the order of the graph's inputs."""

    @property
    def last_block(self) -> int:
        """The last block it touches, from 0."""

    def bind(self, tensors: Mapping[str, Tensor], bare: BareTokens) -> Inserter:
        """Make the inserter of one batch."""


def _behind_class(tokens: Tensor, new: Tensor, replaced: int = 0) -> Tensor:
    """`new` (B, n, D) right behind the class token, in place of the `replaced` tokens that stood there."""
    return torch.cat([tokens[:, :1], new.to(tokens.dtype), tokens[:, 1 + replaced :]], dim=1)


@dataclass(frozen=True)
class Tokens:
    """`prompts.s` (blocks, n, D): row j enters before `blocks[j]` and replaces the row before it."""

    blocks: tuple[int, ...] = (0,)
    kind: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        rising = list(self.blocks) == sorted({block for block in self.blocks if type(block) is int and block >= 0})
        if not self.blocks or not rising:
            raise ValueError(f"prompt tokens enter before blocks {self.blocks}; allowed: one or more, rising from 0")

    @property
    def tensors(self) -> tuple[str, ...]:
        """See `Insert`."""
        return ("prompts.s",)

    @property
    def last_block(self) -> int:
        """See `Insert`."""
        return max(self.blocks)

    def bind(self, tensors: Mapping[str, Tensor], bare: BareTokens) -> Inserter:
        """See `Insert`."""
        prompts = tensors["prompts.s"]

        def insert(block: int, tokens: Tensor) -> Tensor:
            if block not in self.blocks:
                return tokens
            row = self.blocks.index(block)
            fresh = prompts[row].unsqueeze(0).expand(tokens.shape[0], -1, -1)
            return _behind_class(tokens, fresh, prompts.shape[1] if row else 0)

        return insert


@dataclass(frozen=True)
class Mixed:
    """Class-contextualised mixed prompt (PEP-FedPT eq. 5 to 7).

    `prompts.s` (1, n, D) enter before block 0. Before `blocks[j]` the class token at that input is compared with
    `prototypes[j]` (K, D): s_c ∝ exp(cos(cls, mu_c)/tau)·`class_shares`_c, and the token Σ_c s_c·`prompts.c`_c enters.
    """

    blocks: tuple[int, ...] = (5, 6, 7)
    tau: float = 0.05
    slot: Literal["replace", "append"] = "replace"  # whether the next mix takes the place of the one before
    kind: ClassVar[str] = "mixed"

    @property
    def tensors(self) -> tuple[str, ...]:
        """See `Insert`."""
        return ("prompts.s", "prompts.c", "prototypes", "class_shares")

    @property
    def last_block(self) -> int:
        """See `Insert`."""
        return max(self.blocks)

    def bind(self, tensors: Mapping[str, Tensor], bare: BareTokens) -> Inserter:
        """See `Insert`."""

        def insert(block: int, tokens: Tensor) -> Tensor:
            if block == 0:
                shared = tensors["prompts.s"][0].unsqueeze(0).expand(tokens.shape[0], -1, -1)
                tokens = _behind_class(tokens, shared)
            if block not in self.blocks:
                return tokens
            row = self.blocks.index(block)
            scores = self.scores(tokens[:, 0].float(), tensors["prototypes"][row], tensors["class_shares"])
            mix = (scores @ tensors["prompts.c"]).unsqueeze(1)  # (B, 1, D)
            return _behind_class(tokens, mix, 1 if row and self.slot == "replace" else 0)

        return insert

    def scores(
        self, cls: Float[Tensor, "B D"], prototypes: Float[Tensor, "K D"], shares: Float[Tensor, " K"]
    ) -> Float[Tensor, "B K"]:
        """Compute weights of the class prompts: softmax(cos/tau + log share); 0 where the share is 0. Rows sum to 1.

        Args:
            prototypes: mean class token of each class; a row of zeros counts as cosine 0.
            shares: of each class among the site's training images, not all zero.
        """
        # In float32 wherever it is called from: tau magnifies what autocast would round away of the cosine.
        with torch.autocast(cls.device.type, enabled=False):
            cosine = functional.normalize(cls, dim=-1) @ functional.normalize(prototypes, dim=-1).T
            return (cosine / self.tau + shares.log()).softmax(dim=-1)


@dataclass(frozen=True)
class Grouped:
    """SGPT: `prompts.s` (|shared|, 1, D) one a block, then the selected group's tokens of `prompts.g` (|group|, G, D).

    The group of an image is the key (`keys`, (G, D)) nearest by cosine to its query: the class token of the bare
    network, rectified, unit norm. Tokens stay, so the sequence grows by one at every listed block.
    """

    shared_blocks: tuple[int, ...] = (0, 1, 2, 3)
    group_blocks: tuple[int, ...] = (4, 5, 6)
    kind: ClassVar[str] = "grouped"

    @property
    def tensors(self) -> tuple[str, ...]:
        """See `Insert`."""
        return ("prompts.s", "prompts.g", "keys")

    @property
    def last_block(self) -> int:
        """See `Insert`."""
        return max(*self.shared_blocks, *self.group_blocks)

    def bind(self, tensors: Mapping[str, Tensor], bare: BareTokens) -> Inserter:
        """See `Insert`: every image takes its nearest group."""
        return self.bind_selected(tensors, (group_queries(bare()) @ unit_keys(tensors["keys"]).T).argmax(dim=-1))

    def bind_selected(self, tensors: Mapping[str, Tensor], selected: Int[Tensor, " B"] | None) -> Inserter:
        """Make the inserter with the group of each image; without group tokens where `selected` is None."""

        def insert(block: int, tokens: Tensor) -> Tensor:
            if block in self.shared_blocks:
                shared = tensors["prompts.s"][self.shared_blocks.index(block)]
                tokens = _behind_class(tokens, shared.unsqueeze(0).expand(tokens.shape[0], -1, -1))
            if block in self.group_blocks and selected is not None:
                chosen = tensors["prompts.g"][self.group_blocks.index(block)][selected]  # (B, D)
                tokens = _behind_class(tokens, chosen.unsqueeze(1))
            return tokens

        return insert


def group_queries(cls: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """Compute what a group is selected by: the bare class token, rectified, unit norm."""
    return functional.normalize(functional.relu(cls.float()), dim=-1)


def unit_keys(keys: Float[Tensor, "G D"]) -> Float[Tensor, "G D"]:
    """Scale keys to unit norm, so that a product with a query is a cosine."""
    return functional.normalize(keys, dim=-1)


INSERTS: Mapping[str, type[Any]] = {kind.kind: kind for kind in (Tokens, Mixed, Grouped)}


def insert_to_json(insert: Insert) -> dict[str, Any]:
    """Write the plain values that `insert_from_json` reads back."""
    found: Any = insert
    return {"kind": insert.kind, **asdict(found)}


def insert_from_json(found: Mapping[str, Any]) -> Insert:
    """Read an insert from plain values; a `ValueError` for an unknown kind or field."""
    kind = INSERTS.get(str(found.get("kind")))
    if kind is None:
        raise ValueError(f"unknown kind of prompt tokens {found.get('kind')!r}; known: {', '.join(INSERTS)}")
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if name != "kind"}
    for name, value in fields.items():
        if isinstance(value, tuple) and not all(type(block) is int for block in value):
            raise ValueError(f"prompt tokens of kind {kind.kind} cannot be read: {name} are not whole numbers")
    try:
        insert: Insert = kind(**fields)
    except TypeError as error:
        raise ValueError(f"prompt tokens of kind {kind.kind} cannot be read: {error}") from error
    return insert

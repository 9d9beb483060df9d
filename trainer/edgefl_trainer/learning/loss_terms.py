"""What a method adds to a site's loss: plain callables over what one training step saw.

A method hands `Term`s to `evidential.learn`; each is named, so that its share of the loss is reported as `NAME_share`.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor


class Step(NamedTuple):
    """One training batch after the forward pass.

    `features` (B, D) as the head reads them; `probabilities` (B, K), the Dirichlet mean or the softmax; `maps` (B, N)
    max-normalised, None unless a term needs them; `target` (B,) class indices; `tensors` are being learned, by name.
    """

    features: Float[Tensor, "B D"]
    probabilities: Float[Tensor, "B K"]
    maps: Float[Tensor, "B N"] | None
    target: Int[Tensor, " B"]
    tensors: Mapping[str, Tensor]


@runtime_checkable
class Term(Protocol):
    """A weighted addition to the loss."""

    @property
    def name(self) -> str:
        """Short name; its share of the loss is reported under it."""

    @property
    def needs_maps(self) -> bool:
        """Whether it reads rollout maps, which costs the fused attention."""

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """Its value for one batch, weight included."""

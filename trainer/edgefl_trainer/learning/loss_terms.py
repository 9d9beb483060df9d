"""What a method adds to a site's loss: plain callables over what one training step saw.

A method hands `Term`s to `evidential.learn`; each is named, so that its share of the loss is reported as `NAME_share`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

LEAST_SHARE = 1e-4  # of the loss, below which an added term does nothing


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


@dataclass
class TermShares:
    """What share of the loss the terms of a method have, epoch by epoch."""

    terms: Sequence[Term]
    summed: NDArray[np.float64] = field(init=False)  # over the images of the epoch so far
    largest: NDArray[np.float64] = field(init=False)  # of all epochs

    def __post_init__(self) -> None:
        self.summed, self.largest = np.zeros(len(self.terms)), np.zeros(len(self.terms))

    def added(self, step: Step, loss: Float[Tensor, ""]) -> Tensor | int:
        """Compute what the terms add to the loss of a batch; 0 without any."""
        values = [term(step) for term in self.terms]
        shares = [float(value.detach()) / max(1e-12, float(loss.detach())) for value in values]
        self.summed += len(step.target) * np.array(shares)
        return sum(values)

    def of_epoch(self, images: int) -> dict[str, float]:
        """End an epoch of so many images; give the mean share of each term, by its name in the summary."""
        means = self.summed / images
        self.summed = np.zeros(len(self.terms))
        self.largest = np.maximum(self.largest, means)
        return {f"{term.name}_share": float(share) for term, share in zip(self.terms, means, strict=True)}

    def warnings(self, site: str) -> Iterator[str]:
        """Write a sentence for each term that did nothing in any epoch."""
        for term, share in zip(self.terms, self.largest, strict=True):
            if share < LEAST_SHARE:
                yield f"{site}: the term {term.name} stays at {share:.1e} of the loss, so it has no effect"

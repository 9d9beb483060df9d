"""FedProx. Li et al., "Federated optimization in heterogeneous networks", arXiv 1812.06127, Algorithm 2.

    server sends theta^r                                                   broadcast
    site c: E epochs on L(theta) + mu/2 ||theta - theta^r||^2              local_round → Proximal
    server: theta^{r+1} = sum_c n_c/n theta_c                              aggregate, as FedAvg

Differs from the paper: all sites do E epochs (no partial work); the proximal sum runs over what is averaged (prompts
and head); mu = 0.01 where the paper tunes in {0.001, …, 1}; optimiser and warm phase as our FedAvg (docs/methods.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Site, State
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.learners.answers import AnswerRecipe
from edgefl_trainer.learning.learners.learner import SiteLearner, declares_over
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.named_arrays import as_tensors
from edgefl_trainer.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Proximal:
    """mu/2 ||theta - theta^r||^2 over the tensors of `anchor`; a `Term`."""

    mu: float
    anchor: Mapping[str, Tensor]  # theta^r
    name: str = field(default="proximal", init=False)
    needs_maps: bool = field(default=False, init=False)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """See `Term`."""
        squares = [(step.tensors[name] - start).square().sum() for name, start in self.anchor.items()]
        return self.mu / 2 * sum(squares[1:], start=squares[0])


@dataclass(frozen=True, kw_only=True)
class FedProx:
    """FedAvg whose sites may not stray far from the model they were sent.

    For sites of which some learn much more, or from other classes, than the rest.
    """

    family: ClassVar[str] = FedAvg.family
    paper: ClassVar[str] = "arXiv 1812.06127"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = declares_over(
        FedAvg.declares, lambda: FedProx(base=FedAvg(recipe=AnswerRecipe()))
    )

    base: FedAvg = field(default_factory=FedAvg)
    mu: float = 0.01  # weight of the squared distance to what was sent (default ours)

    travels = property(method_parts.travels_of_base)
    phases = method_parts.phases_of_base
    start = method_parts.start_of_base
    broadcast = method_parts.broadcast_of_base
    aggregate = method_parts.aggregate_of_base
    predictor = method_parts.predictor_of_base

    @property
    def learner(self) -> SiteLearner:
        """What learns at a site."""
        return self.base.learner

    def __post_init__(self) -> None:
        check_bounds(self, mu=(0 <= self.mu <= 10, "0 to 10"))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs, held back towards the broadcast."""
        if broadcast.scalars["phase"] == "warm":
            return self.base.local_round(site, state, broadcast)
        received = {name: broadcast.arrays[name] for name in self.base.shared(site.task)}
        terms = [Proximal(self.mu, as_tensors(received, site.device))] if self.mu > 0 else []
        new = self.base.learned(site, state, broadcast, terms)
        return new, self.base.reply(site, new, broadcast)

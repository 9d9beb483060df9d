"""FedProx. Li et al., "Federated optimization in heterogeneous networks", arXiv 1812.06127, Algorithm 2.

    server sends theta^r                                                   broadcast
    site c: E epochs on L(theta) + mu/2 ||theta - theta^r||^2              local_round → Proximal
    server: theta^{r+1} = sum_c n_c/n theta_c                              aggregate, as FedAvg

Differs from the paper: all sites do E epochs (no partial work); the proximal sum runs over what is averaged (prompts
and head); mu = 0.01 where the paper tunes in {0.001, …, 1}; optimiser and warm phase as our FedAvg (docs/methods.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.steps import as_tensors
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
    """FedAvg whose sites may not stray far from the model they were sent."""

    family: ClassVar[str] = FedAvg.family
    paper: ClassVar[str] = "arXiv 1812.06127"
    needs_labels: ClassVar[bool] = True

    fedavg: FedAvg = field(default_factory=FedAvg)
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= 10:
            raise SettingError(f"mu is {self.mu}; allowed: 0 to 10.")

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; those of FedAvg."""
        return self.fedavg.travels

    def phases(self, rounds: int) -> Sequence[Phase]:
        """As FedAvg."""
        return self.fedavg.phases(rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """As FedAvg."""
        return self.fedavg.start(task, sites)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """As FedAvg."""
        return self.fedavg.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs, held back towards the broadcast."""
        if broadcast.scalars["phase"] == "warm":
            return self.fedavg.local_round(site, state, broadcast)
        received = {name: broadcast.arrays[name] for name in self.fedavg.shared}
        terms = [Proximal(self.mu, as_tensors(received, site.device))] if self.mu > 0 else []
        new = self.fedavg.learned(site, state, broadcast, terms)
        return new, self.fedavg.reply(site, new, broadcast)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """As FedAvg."""
        return self.fedavg.aggregate(state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """As FedAvg."""
        return self.fedavg.predictor(site, state, broadcast)

"""FedSimCLR: FedAvg of SimCLR (arXiv 2002.05709), a baseline of FedCLF (arXiv 2208.11278) section V-A.

    server sends theta                                                        broadcast
    site i: E epochs; two views of each of B images, each has to find the      local_round, losses.paired_loss
            other among the 2B - 1 remaining views of its batch
    theta = sum_c n_c/n theta_c                                                aggregate

Differs from the paper: SGD 0.03 and tau 0.2, as the other methods of the comparison have, in place of SimCLR's LARS and
0.1; the loss is the mean over the 2B views (SimCLR's Algorithm 1; its public code sums the two directions); first and
second views pass the network one after the other, so that batch norm sees B images (its public code: all 2B together);
optimiser moments start afresh each round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from edgefl_protocol import Payload
from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.unlabelled import averaged_network, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import unit
from edgefl_trainer.learning.unlabelled.self_supervised import Learner, Pixels, SgdRecipe
from edgefl_trainer.losses import paired_loss


@dataclass(frozen=True, kw_only=True)
class FedSimCLR:
    """Federated contrast between the images of a batch."""

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2002.05709"
    needs_labels: ClassVar[bool] = False
    least_images: ClassVar[int] = self_supervised.LEAST_IMAGES

    sgd: SgdRecipe = field(default_factory=SgdRecipe)
    temperature: float = 0.2  # tau

    def __post_init__(self) -> None:
        if not 0.001 <= self.temperature <= 10:
            raise SettingError(f"temperature is {self.temperature}; allowed: 0.001 to 10.")

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`."""
        return ("weights",)

    def phases(self, rounds: int) -> Sequence[Phase]:
        """R rounds."""
        return self_supervised.phases(self.sgd, rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """A fresh network, or the backbone to learn on, and a fresh projection."""
        return self_supervised.start(self.sgd, task, projection)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """The averaged weights."""
        return averaged_network.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs; the last exchange collects batch norm where it stayed."""
        prepare = self_supervised.views(site, self.sgd, "simclr", 2)
        return averaged_network.local_round(self.sgd, site, state, broadcast, projection, prepare, self._loss)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """The mean of the weights by numbers of images."""
        return self_supervised.average(state, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """None: features name no class."""
        return None

    def backbone(self, state: State) -> Arrays:
        """The learned network by timm's names; the projection is dropped."""
        return self_supervised.encoder_of(state)

    def _loss(self, model: Learner, views: tuple[Pixels, ...]) -> Float[Tensor, ""]:
        first, second = views
        return paired_loss(unit(model(first)), unit(model(second)), self.temperature)


def projection(width: int) -> nn.Module:
    """One hidden layer, to 128 features."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, FEATURES))

"""FedRotation: FedAvg of rotation prediction (RotNet, arXiv 1803.07728), a baseline of FedCLF (arXiv 2208.11278).

    server sends theta                                                        broadcast
    site i: E epochs; every image in all four quarter turns (4B of a batch),   local_round, quarter_turns
            a linear layer says which, cross-entropy
    theta = sum_c n_c/n theta_c                                                aggregate

Differs from the paper: SGD 0.03 without Nesterov and weight decay 1e-4, as the other methods of the comparison have
(RotNet: 0.1, Nesterov, 5e-4); crops of 20 to 100 % of the area and mirroring before the turns; optimiser moments start
afresh each round. A skin lesion has no upright position: what there is to learn are traces of how pictures were taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from edgefl_protocol import Payload
from edgefl_trainer.augment import quarter_turns
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning.unlabelled import averaged_network, self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import Learner, Pixels, SgdRecipe


@dataclass(frozen=True, kw_only=True)
class FedRotation:
    """Federated prediction of quarter turns."""

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 1803.07728"
    needs_labels: ClassVar[bool] = False
    least_images: ClassVar[int] = self_supervised.LEAST_IMAGES

    sgd: SgdRecipe = field(default_factory=SgdRecipe)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`."""
        return ("weights",)

    def phases(self, rounds: int) -> Sequence[Phase]:
        """R rounds."""
        return self_supervised.phases(self.sgd, rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """A fresh network, or the backbone to learn on, and a fresh classifier of turns."""
        return self_supervised.start(self.sgd, task, four_ways)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """The averaged weights."""
        return averaged_network.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs; the last exchange collects batch norm where it stayed."""
        prepare = self_supervised.views(site, self.sgd, "rotation", 1)
        return averaged_network.local_round(self.sgd, site, state, broadcast, four_ways, prepare, _loss)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """The mean of the weights by numbers of images."""
        return self_supervised.average(state, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """None: it names turns, no class."""
        return None

    def backbone(self, state: State) -> Arrays:
        """The learned network by timm's names; the classifier of turns is dropped."""
        return self_supervised.encoder_of(state)


def four_ways(width: int) -> nn.Module:
    """A linear layer over the four turns."""
    return nn.Linear(width, 4)


def _loss(model: Learner, views: tuple[Pixels, ...]) -> Float[Tensor, ""]:
    turned, which = quarter_turns(views[0])
    return cross_entropy(model(turned), which)

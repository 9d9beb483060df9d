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

from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Site
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.unlabelled import averaged_network, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import unit
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork, Pixels, Prepare, SgdRecipe
from edgefl_trainer.losses import paired_loss


@dataclass(frozen=True, kw_only=True)
class FedSimCLR:
    """Federated contrast between the images of a batch.

    For many pictures without labels and a GPU that holds large batches; FedCLF's baseline.
    """

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2002.05709"
    travels: ClassVar[tuple[str, ...]] = ("weights",)
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = self_supervised.DECLARES

    sgd: SgdRecipe = field(default_factory=SgdRecipe)
    temperature: float = 0.2  # tau, what similarities are divided by (default ours)

    def __post_init__(self) -> None:
        check_bounds(self, temperature=(0.001 <= self.temperature <= 10, "0.001 to 10"))

    phases = averaged_network.phases
    start = averaged_network.start
    broadcast = averaged_network.broadcast
    local_round = averaged_network.local_round
    aggregate = averaged_network.aggregate
    predictor = method_parts.no_predictor

    def head(self, width: int) -> nn.Module:
        """Make the projection to the space of the contrast."""
        return projection(width)

    def views(self, site: Site) -> Prepare:
        """Draw two views of each image."""
        return self_supervised.views(site, self.sgd, "simclr", 2)

    def loss(self, model: LearningNetwork, views: tuple[Pixels, ...]) -> Float[Tensor, ""]:
        """Compute the loss by which each view has to find the other of its image."""
        first, second = views
        return paired_loss(unit(model(first)), unit(model(second)), self.temperature)


def projection(width: int) -> nn.Module:
    """Make a projection with one hidden layer, to 128 features."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, FEATURES))

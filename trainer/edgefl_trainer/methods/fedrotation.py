"""FedRotation: FedAvg of rotation prediction (RotNet, arXiv 1803.07728), a baseline of FedCLF (arXiv 2208.11278).

    server sends theta                                                        broadcast
    site i: E epochs; every image in all four quarter turns (4B of a batch),   local_round, quarter_turns
            a linear layer says which, cross-entropy
    theta = sum_c n_c/n theta_c                                                aggregate

Differs from the paper: SGD 0.03 without Nesterov and weight decay 1e-4, as the other methods of the comparison have
(RotNet: 0.1, Nesterov, 5e-4); crops of 20 to 100 % of the area and mirroring before the turns; optimiser moments start
afresh each round. A skin lesion has no upright position: what there is to learn are traces of how pictures were taken.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from edgefl_trainer.augment import quarter_turns
from edgefl_trainer.contract import Declaration, Site
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.unlabelled import averaged_network, self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork, Pixels, Prepare, SgdRecipe


@dataclass(frozen=True, kw_only=True)
class FedRotation:
    """Federated prediction of quarter turns.

    For comparisons: the simplest learning without labels.
    """

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 1803.07728"
    travels: ClassVar[tuple[str, ...]] = ("weights",)
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = self_supervised.DECLARES

    sgd: SgdRecipe = field(default_factory=SgdRecipe)

    phases = averaged_network.phases
    start = averaged_network.start
    broadcast = averaged_network.broadcast
    local_round = averaged_network.local_round
    aggregate = averaged_network.aggregate
    predictor = method_parts.no_predictor

    def head(self, width: int) -> nn.Module:
        """Make a linear layer over the four turns."""
        return four_ways(width)

    def views(self, site: Site) -> Prepare:
        """Draw one view of each image."""
        return self_supervised.views(site, self.sgd, "rotation", 1)

    def loss(self, model: LearningNetwork, views: tuple[Pixels, ...]) -> Float[Tensor, ""]:
        """Compute the cross-entropy of the turns."""
        turned, which = quarter_turns(views[0])
        return cross_entropy(model(turned), which)


def four_ways(width: int) -> nn.Module:
    """Make a linear layer over the four turns."""
    return nn.Linear(width, 4)

"""Head tuning. Sun et al., arXiv 2210.01708, as PEP-FedPT (arXiv 2510.25372) compares with it: only the head learns.

    server sends H                                                    broadcast
    site c: E epochs of H on the frozen network's class token         local_round
    server: H = sum_c n_c/n H_c                                       aggregate

Differs from the paper: the head has no bias, as in the family's parameter counts; a warm phase pools readout and
feature statistics where they are asked for; images are turned and mirrored (docs/methods.md 5).
"""

from dataclasses import dataclass, field
from typing import ClassVar

from edgefl_trainer.contract import Declaration
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.softmax import SoftmaxRecipe
from edgefl_trainer.models.spec import BackboneSpec


@dataclass(frozen=True, kw_only=True)
class Head:
    """One linear head for all sites, on a network without prompts.

    For comparisons, and for convolutional networks.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2510.25372"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = softmax.DECLARES
    n: ClassVar[int] = 0  # prompt tokens

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    # what a site counts by in the mean: its training images, or all sites alike (default ours)
    weighting: Weighting = "samples"

    travels = averaged_prompts.travels("weights")
    phases = averaged_prompts.phases
    start = averaged_prompts.start
    broadcast = averaged_prompts.broadcast
    local_round = averaged_prompts.local_round
    aggregate = averaged_prompts.aggregate
    predictor = averaged_prompts.predictor

    def insert_for(self, backbone: BackboneSpec) -> None:
        """Insert no prompt."""

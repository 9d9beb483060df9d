"""FedMoCo: FedAvg of momentum contrast, the row "without feature exchange" of FedCLF (arXiv 2208.11278) section V-A.

    server sends theta                                              broadcast
    site i: Q_CL = Q_l, its own features; E epochs of MoCo           contrast_round
    theta = sum_c n_c/n theta_c                                      aggregate

This is `fedclf` with `negatives=local`, whose code it runs.

Differs from the paper: as FedCLF does; a bank begins with features of the site's own images in its first round.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from edgefl_trainer.contract import Declaration
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe
from edgefl_trainer.methods.fedclf import FedCLF


@dataclass(frozen=True, kw_only=True)
class FedMoCo:
    """Federated momentum contrast against a site's own features.

    For many pictures without labels, where features may not leave; FedCLF's baseline.
    """

    family: ClassVar[str] = FedCLF.family
    paper: ClassVar[str] = "arXiv 2208.11278"
    travels: ClassVar[tuple[str, ...]] = ("weights",)
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = self_supervised.DECLARES

    contrast: ContrastRecipe = field(default_factory=ContrastRecipe)

    @property
    def base(self) -> FedCLF:
        """FedCLF without feature exchange."""
        return FedCLF(contrast=self.contrast, negatives="local")

    phases = method_parts.phases_of_base
    start = method_parts.start_of_base
    broadcast = method_parts.broadcast_of_base
    local_round = method_parts.local_round_of_base
    aggregate = method_parts.aggregate_of_base
    predictor = method_parts.no_predictor

"""FedMoCo: FedAvg of momentum contrast, the row "without feature exchange" of FedCLF (arXiv 2208.11278) section V-A.

    server sends theta                                              broadcast
    site i: Q_CL = Q_l, its own features; E epochs of MoCo           contrast_round
    theta = sum_c n_c/n theta_c                                      aggregate

Bit for bit what `fedclf` does with `negatives=local` (tested).

Differs from the paper: as FedCLF does; a bank begins with features of the site's own images in its first round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning.unlabelled import contrast, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe


@dataclass(frozen=True, kw_only=True)
class FedMoCo:
    """Federated momentum contrast against a site's own features."""

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2208.11278"
    needs_labels: ClassVar[bool] = False
    least_images: ClassVar[int] = self_supervised.LEAST_IMAGES

    contrast: ContrastRecipe = field(default_factory=ContrastRecipe)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`."""
        return ("weights",)

    def phases(self, rounds: int) -> Sequence[Phase]:
        """R rounds."""
        return self_supervised.phases(self.contrast.sgd, rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """A fresh network, or the backbone to learn on, and a fresh projection."""
        return contrast.start(self.contrast, task)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """The averaged weights."""
        return dict.fromkeys(sites, Payload(contrast.weights_to_send(state, phase), {}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs; the last exchange collects batch norm where it stayed."""
        if broadcast.scalars["phase"] == "final":
            return contrast.last_exchange(site, state)
        round_ = int(broadcast.scalars["round"])
        learned = contrast.contrast_round(self.contrast, site, state, broadcast.arrays, round_)
        new, weights = contrast.divided(self.contrast, learned, state)
        return new, Payload(weights, {"n_train": len(site.unlabelled)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """The mean of the weights by numbers of images."""
        return contrast.average(state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """None: features name no class."""
        return None

    def backbone(self, state: State) -> Arrays:
        """The learned network by timm's names; the projection is dropped."""
        return self_supervised.encoder_of(state)

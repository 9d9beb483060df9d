"""Local CL: momentum contrast at each site alone, the baseline of FedCLF (arXiv 2208.11278) section V-A; MoCo v2.

    site i: R·E epochs of MoCo on its own images, encoder, momentum encoder and queue its own      local_round

Nothing travels. The server holds the common start; a site's encoder is in its own state, and fine-tuning starts from it
at that site (`engine.own_networks`).

Differs from the paper: K, tau and m as FedCLF has them; optimiser moments start afresh each round, as in the federated
methods it is compared with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.unlabelled import contrast, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe


@dataclass(frozen=True, kw_only=True)
class LocalCL:
    """Momentum contrast without a federation."""

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2208.11278"
    needs_labels: ClassVar[bool] = False
    least_images: ClassVar[int] = self_supervised.LEAST_IMAGES

    contrast: ContrastRecipe = field(default_factory=lambda: ContrastRecipe(momentum_encoder="local"))

    def __post_init__(self) -> None:
        if self.contrast.momentum_encoder == "averaged":
            raise SettingError("momentum_encoder is 'averaged', but local-cl sends nothing; allowed: local, reset.")

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`: nothing."""
        return ()

    def phases(self, rounds: int) -> Sequence[Phase]:
        """R rounds, for progress and checkpoints."""
        return [Phase("train", r) for r in range(1, rounds + 1)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """The common start: a fresh network, or the backbone to learn on."""
        return contrast.start(self.contrast, task)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Nothing: every site makes the common start itself."""
        return dict.fromkeys(sites, Payload({}, {}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs from where the site stopped."""
        round_ = int(broadcast.scalars["round"])
        learned = contrast.contrast_round(self.contrast, site, state, state.arrays, round_)
        new, network = contrast.divided(self.contrast, learned, state)
        return State({**new.arrays, **network}), Payload({}, {"n_train": len(site.unlabelled)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Nothing to sum up."""
        return state

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """None: features name no class."""
        return None

    def backbone(self, state: State) -> Arrays:
        """The common start by timm's names: the server learns nothing."""
        return self_supervised.encoder_of(state)

    def site_backbone(self, state: State) -> Arrays:
        """The network that a site learned, by timm's names; the projection is dropped."""
        return self_supervised.encoder_of(state)

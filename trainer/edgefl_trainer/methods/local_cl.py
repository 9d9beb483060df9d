"""Local CL: momentum contrast at each site alone, the baseline of FedCLF (arXiv 2208.11278) section V-A; MoCo v2.

    site i: R·E epochs of MoCo on its own images, encoder, momentum encoder and queue its own      local_round

Nothing travels. The server holds the common start; a site's encoder is in its own state, and fine-tuning starts from it
at that site (`engine.own_networks`).

Differs from the paper: K, tau and m as FedCLF has them; SGD's momentum begins each round as in the federated methods it
is compared with (`optimizer_state`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_trainer.contract import Declaration, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.unlabelled import contrast, self_supervised
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe


@dataclass(frozen=True, kw_only=True)
class LocalCL:
    """Momentum contrast without a federation.

    For comparisons: what a site learns without labels and alone.
    """

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2208.11278"
    travels: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = replace(self_supervised.DECLARES, apart=True)

    contrast: ContrastRecipe = field(default_factory=lambda: ContrastRecipe(momentum_encoder="local"))

    def __post_init__(self) -> None:
        if self.contrast.momentum_encoder == "averaged":
            raise SettingError("momentum_encoder is 'averaged', but local-cl sends nothing; allowed: local, reset.")

    phases = method_parts.train_rounds
    broadcast = method_parts.nothing_sent  # every site makes the common start itself
    aggregate = method_parts.nothing_averaged
    predictor = method_parts.no_predictor

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Make the common start: a fresh network, or the backbone to learn on."""
        return contrast.start(self.contrast, task)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs from where the site stopped."""
        round_ = int(broadcast.scalars["round"])
        learned = contrast.contrast_round(self.contrast, site, state, state.arrays, round_)
        new, network = contrast.divided(self.contrast, learned, state)
        return State({**new.arrays, **network}), Payload({}, {"n_train": len(site.unlabelled)})

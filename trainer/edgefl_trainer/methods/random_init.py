"""Random init: no pre-training, the baseline of FedCLF and FedMAE (arXiv 2208.11278) section V.

    server: a fresh network, the one that every other self-supervised method begins with at this seed      start

No exchange, no learning: a run ends at once with the network that fine-tuning then starts from. Only FedMAE begins with
another class token, which is drawn behind its decoder.

Differs from the paper: nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_trainer.contract import Declaration, Phase, Site, State, Task
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import BACKBONE
from edgefl_trainer.models.backbones import build_network, weights_of


@dataclass(frozen=True, kw_only=True)
class RandomInit:
    """A network that has learned nothing.

    For comparisons: where fine-tuning starts without pre-training.
    """

    family: ClassVar[str] = "self-supervised"
    paper: ClassVar[str] = "arXiv 2208.11278"
    travels: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = False
    declares: ClassVar[Declaration] = replace(self_supervised.DECLARES, least_images=1)

    broadcast = method_parts.nothing_sent
    aggregate = method_parts.nothing_averaged
    predictor = method_parts.no_predictor

    def phases(self, rounds: int) -> Sequence[Phase]:
        """List no exchange."""
        return ()

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with the fresh network of the seed."""
        weights = weights_of(build_network(task.backbone, task.seed))
        return State({f"{BACKBONE}{name}": value for name, value in weights.items()})

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Leave everything as it is: nothing is learned."""
        return state, Payload({}, {"n_train": len(site.unlabelled)})

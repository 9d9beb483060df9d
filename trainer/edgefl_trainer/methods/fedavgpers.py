"""FedAvgPers. FedAvg, then every site fine-tunes the final model on its own images (arXiv 2411.10071, Table 1).

    R rounds of FedAvg                                                     local_round, `train`
    site c: E more epochs from the final model; nothing is sent            local_round, `final`
    site c scores with its own fine-tuned model                            predictor

Differs from the paper: it gives no length for the fine-tuning; one round's worth of epochs here, `final_epochs` for
another number (docs/methods.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgPers:
    """One model learned together, then one for each site."""

    family: ClassVar[str] = FedAvg.family
    paper: ClassVar[str] = "arXiv 2411.10071"
    needs_labels: ClassVar[bool] = True

    fedavg: FedAvg = field(default_factory=FedAvg)
    final_epochs: int = 0  # of the fine-tuning; 0: as many as a round has

    def __post_init__(self) -> None:
        if not 0 <= self.final_epochs <= 10_000:
            raise SettingError(f"final_epochs is {self.final_epochs}; allowed: 0 (as many as a round has) to 10000.")

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; those of FedAvg."""
        return self.fedavg.travels

    def phases(self, rounds: int) -> Sequence[Phase]:
        """FedAvg's, then the fine-tuning."""
        return [*self.fedavg.phases(rounds), Phase("final", rounds + 1)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """As FedAvg."""
        return self.fedavg.start(task, sites)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """As FedAvg."""
        return self.fedavg.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """A round of FedAvg; in the final phase the same at home, with nothing sent."""
        if broadcast.scalars["phase"] != "final":
            return self.fedavg.local_round(site, state, broadcast)
        own = self.fedavg.learned(site, state, broadcast, epochs=self.final_epochs or None)
        return State(own.arrays, {**own.values, "personal": 1}), Payload({}, {})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """As FedAvg; the final phase changes nothing."""
        return self.fedavg.aggregate(state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The fine-tuned model; before it exists, the averaged one."""
        if "personal" in state.values:
            return self.fedavg.scoring(site, state)
        return self.fedavg.predictor(site, state, broadcast)

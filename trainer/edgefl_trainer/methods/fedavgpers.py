"""FedAvgPers. FedAvg, then every site fine-tunes the final model on its own images (arXiv 2411.10071, Table 1).

    R rounds of FedAvg                                                     local_round, `train`
    site c: E more epochs from the final model; nothing is sent            local_round, `final`
    site c scores with its own fine-tuned model                            predictor

Differs from the paper: it gives no length for the fine-tuning; one round's worth of epochs here, `final_epochs` for
another number (docs/methods.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Phase, Predictor, Site, State
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.learners.answers import AnswerRecipe
from edgefl_trainer.learning.learners.learner import SiteLearner, declares_over
from edgefl_trainer.methods.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class FedAvgPers:
    """One model learned together, then one for each site.

    For sites that may send weights and look different from one another.
    """

    family: ClassVar[str] = FedAvg.family
    paper: ClassVar[str] = "arXiv 2411.10071"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = declares_over(
        FedAvg.declares, lambda: FedAvgPers(base=FedAvg(recipe=AnswerRecipe()))
    )

    base: FedAvg = field(default_factory=FedAvg)
    final_epochs: int = 0  # epochs of the fine-tuning at the end; 0: as many as a round has (default ours)

    travels = property(method_parts.travels_of_base)
    start = method_parts.start_of_base
    broadcast = method_parts.broadcast_of_base
    aggregate = method_parts.aggregate_of_base

    @property
    def learner(self) -> SiteLearner:
        """What learns at a site."""
        return self.base.learner

    def __post_init__(self) -> None:
        check_bounds(self, final_epochs=(0 <= self.final_epochs <= 10_000, "0 (as many as a round has) to 10000"))

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan FedAvg's, then the fine-tuning."""
        return [*self.base.phases(rounds), Phase("final", rounds + 1)]

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Do a round of FedAvg; in the final phase the same at home, with nothing sent."""
        if broadcast.scalars["phase"] != "final":
            return self.base.local_round(site, state, broadcast)
        own = self.base.learned(site, state, broadcast, epochs=self.final_epochs or None)
        return State(own.arrays, {**own.values, "personal": 1}), Payload({}, {})

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the fine-tuned model; before it exists, the averaged one."""
        if "personal" in state.values:
            return self.base.scoring(site, state)
        return self.base.predictor(site, state, broadcast)

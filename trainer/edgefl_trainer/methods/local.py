"""Local. The floor of every comparison: each site learns prompts and head alone (arXiv 2411.10071, Table 1).

    site c: E epochs of b-prompts, t-prompts and head on its own images      local_round
    server: nothing is sent, nothing is averaged                             aggregate

Differs from the paper: AdamW, softplus evidence and standardised features where the paper is silent (docs/methods.md);
where pictures are asked questions, a site learns an answer model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgefl_protocol import Payload
from edgefl_trainer.contract import Declaration, Predictor, Site, State, Task
from edgefl_trainer.learning import method_parts
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.learning.learners.answers import AnswerRecipe
from edgefl_trainer.learning.learners.learner import Recipe, SiteLearner, declares_both, learner_of


@dataclass(frozen=True, kw_only=True)
class Local:
    """Every site for itself.

    For comparisons: what a site reaches without a federation.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 2411.10071"
    travels: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = declares_both(lambda: Local(recipe=AnswerRecipe()))

    recipe: Recipe = field(default_factory=EvidentialRecipe)
    # what a site's optimiser does between rounds: keep its moments, or begin afresh (reset), which makes one site equal
    # to `fedavg` (ours)
    optimizer_state: Literal["keep", "reset"] = "keep"

    phases = method_parts.train_rounds
    broadcast = method_parts.nothing_sent
    aggregate = method_parts.nothing_averaged

    @property
    def learner(self) -> SiteLearner:
        """What learns at a site."""
        return learner_of(self.recipe)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with an empty state: the server knows nothing."""
        self.learner.initial(task)  # raises where the task does not fit
        return State()

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs at home."""
        before = self.learner.begun(site, state, broadcast)
        keep = self.optimizer_state == "keep"
        return self.learner.learned(site, before, broadcast, keep_optimizer=keep), Payload({}, {})

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the site's own model; the initial one where it took part in no round."""
        return self.learner.predictor(site, self.learner.begun(site, state, broadcast))

"""P-PT. The baseline that PEP-FedPT (arXiv 2510.25372, section 5) names: FedVPT whose prompts are personal.

    server sends H                                                    broadcast
    site c: E epochs of its own P_c and of H; P_c stays               local_round
    server: H = sum_c n_c/n H_c                                       aggregate

Differs from the paper: it says no more than that the prompts are personalised; prompts at the input, a site that took
part in no round uses the initial ones; `head=local` keeps the head, too, at its site; a warm phase pools readout and
feature statistics where they are asked for; images are turned and mirrored (docs/methods.md 5.7).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Declaration, Predictor, Site, State, Task
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.features import features_sent
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.softmax import HEAD_WEIGHT, PROMPTS, SoftmaxRecipe, check_count
from edgefl_trainer.models.inserts import Tokens


@dataclass(frozen=True, kw_only=True)
class PPT:
    """Prompts for each site, one head for all.

    For sites whose pictures differ and whose classes are alike.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2510.25372"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = softmax.DECLARES

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n: int = 1  # number of prompt tokens (ours)
    # where the head is kept: averaged, or at its site (local), so that nothing that learns leaves it (ours)
    head: Literal["averaged", "local"] = "averaged"
    # what a site counts by in the mean: its training images, or all sites alike (default ours)
    weighting: Weighting = "samples"

    phases = averaged_prompts.phases
    broadcast = averaged_prompts.broadcast
    aggregate = averaged_prompts.aggregate

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; moments of features once."""
        return (*(("weights",) if self.head == "averaged" else ()), *features_sent(self.recipe.head_norm))

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with a fresh head; with nothing for `head=local`."""
        initial = averaged_prompts.fresh_tensors(task, Tokens(), self.n)
        shared = {HEAD_WEIGHT: initial[HEAD_WEIGHT]} if self.head == "averaged" else {}
        return averaged_prompts.begin(self.recipe, task, shared)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs of the own prompts and of H; the prompts stay."""
        if broadcast.scalars["phase"] == "warm":
            return State(), averaged_prompts.warm_reply(self.recipe, site)
        model = self._model(site, state, broadcast)
        learned = averaged_prompts.train(self.recipe, site, Tokens(), model, broadcast, (PROMPTS, HEAD_WEIGHT))
        shared = {HEAD_WEIGHT: learned[HEAD_WEIGHT]} if self.head == "averaged" else {}
        return State(learned), averaged_prompts.reply(site, shared)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the site's model: its prompts, else the initial ones, and the averaged head, or its own."""
        model = self._model(site, state, broadcast)
        return averaged_prompts.scoring(self.recipe, site, Tokens(), model, broadcast)

    def _model(self, site: Site, state: State, broadcast: Payload) -> Arrays:
        own = state.arrays or as_arrays(averaged_prompts.fresh_tensors(site.task, Tokens(), self.n))
        return {**own, **broadcast.arrays, PROMPTS: own[PROMPTS]}

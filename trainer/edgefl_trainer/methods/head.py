"""Head tuning. Sun et al., arXiv 2210.01708, as PEP-FedPT (arXiv 2510.25372) compares with it: only the head learns.

    server sends H                                                    broadcast
    site c: E epochs of H on the frozen network's class token         local_round
    server: H = sum_c n_c/n H_c                                       aggregate

Differs from the paper: the head has no bias, as in the family's parameter counts; a warm phase pools readout and
feature statistics where they are asked for; images are turned and mirrored (docs/methods.md 5).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import averaged_prompts
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.softmax import HEAD, SoftmaxRecipe, check_fits, head_init


@dataclass(frozen=True, kw_only=True)
class Head:
    """One linear head for all sites, on a network without prompts."""

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2510.25372"
    needs_labels: ClassVar[bool] = True

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    weighting: Weighting = "samples"

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; moments of features once."""
        return averaged_prompts.travels(self.recipe, "weights")

    def phases(self, rounds: int) -> Sequence[Phase]:
        """A warm exchange where features have to be looked at, then R rounds."""
        return averaged_prompts.phases(self.recipe, rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """A fresh head."""
        check_fits(task, None)
        generator = torch.Generator().manual_seed(task.seed)
        return averaged_prompts.start(self.recipe, task, {HEAD: head_init(task.backbone, len(task.classes), generator)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """H to everyone."""
        return averaged_prompts.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs of H."""
        if broadcast.scalars["phase"] == "warm":
            return State(), averaged_prompts.warm_reply(self.recipe, site)
        learned = averaged_prompts.train(self.recipe, site, None, broadcast.arrays, broadcast, (HEAD,))
        return State(learned), averaged_prompts.reply(site, learned)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """The mean of the heads."""
        return averaged_prompts.aggregate(self.recipe, self.weighting, state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The averaged head."""
        return averaged_prompts.predictor(self.recipe, site, None, broadcast.arrays, broadcast)

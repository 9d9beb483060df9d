"""P-PT. The baseline that PEP-FedPT (arXiv 2510.25372, section 5) names: FedVPT whose prompts are personal.

    server sends H                                                    broadcast
    site c: E epochs of its own P_c and of H; P_c stays               local_round
    server: H = sum_c n_c/n H_c                                       aggregate

Differs from the paper: it says no more than that the prompts are personalised; prompts at the input, a site that took
part in no round uses the initial ones; `head=local` keeps the head, too, at its site; a warm phase pools readout and
feature statistics where they are asked for; images are turned and mirrored (docs/methods.md 5.7).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import averaged_prompts, steps
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.softmax import (
    HEAD,
    PROMPTS,
    SoftmaxRecipe,
    check_count,
    check_fits,
    head_init,
    token_init,
)
from edgefl_trainer.models.inserts import Tokens


@dataclass(frozen=True, kw_only=True)
class PPT:
    """Prompts for each site, one head for all."""

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2510.25372"
    needs_labels: ClassVar[bool] = True

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n: int = 1  # prompt tokens
    head: Literal["averaged", "local"] = "averaged"  # local: nothing that learns leaves its site
    weighting: Weighting = "samples"

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; moments of features once."""
        return averaged_prompts.travels(self.recipe, *(("weights",) if self.head == "averaged" else ()))

    def phases(self, rounds: int) -> Sequence[Phase]:
        """A warm exchange where features have to be looked at, then R rounds."""
        return averaged_prompts.phases(self.recipe, rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """A fresh head; with `head=local` nothing."""
        check_fits(task, Tokens())
        shared = {HEAD: self._initial(task)[HEAD]} if self.head == "averaged" else {}
        return averaged_prompts.start(self.recipe, task, shared)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """H to everyone."""
        return averaged_prompts.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs of the own prompts and of H; the prompts stay."""
        if broadcast.scalars["phase"] == "warm":
            return State(), averaged_prompts.warm_reply(self.recipe, site)
        model = self._model(site, state, broadcast)
        learned = averaged_prompts.train(self.recipe, site, Tokens(), model, broadcast, (PROMPTS, HEAD))
        shared = {HEAD: learned[HEAD]} if self.head == "averaged" else {}
        return State(learned), averaged_prompts.reply(site, shared)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """The mean of the heads."""
        return averaged_prompts.aggregate(self.recipe, self.weighting, state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The site's prompts, initial ones where it has none, and the averaged head, or its own."""
        model = self._model(site, state, broadcast)
        return averaged_prompts.predictor(self.recipe, site, Tokens(), model, broadcast)

    def _model(self, site: Site, state: State, broadcast: Payload) -> Arrays:
        own = state.arrays or steps.as_arrays(self._initial(site.task))
        return {**own, **broadcast.arrays, PROMPTS: own[PROMPTS]}

    def _initial(self, task: Task) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(task.seed)
        prompts = token_init(task.backbone, (1, self.n, task.backbone.width), generator)
        return {PROMPTS: prompts, HEAD: head_init(task.backbone, len(task.classes), generator)}

"""FedVPT and FedVPT-Deep. Jia et al., "Visual prompt tuning", arXiv 2203.12119, averaged over sites as PEP-FedPT
(arXiv 2510.25372) compares with it.

    server sends theta = (P, H)                                       broadcast
    site c: E epochs of P and H; P stands behind the class token      local_round → models.inserts.Tokens
    server: theta = sum_c n_c/n theta_c                               aggregate

Shallow: n tokens enter before block 0 and stay (eq. 4 to 6). Deep: n fresh tokens before every further block take the
place of those before them (eq. 7 and 8).

Differs from the paper: deep prompts end at block L-2, as PEP-FedPT's count of 85,248 asks (`last_block=L-1` for all);
a head without bias, N(0, 0.02); momentum starts afresh each round; a warm phase pools readout and feature statistics
where they are asked for; images are turned and mirrored; no prompt dropout, no projection (docs/methods.md 5.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import averaged_prompts
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
from edgefl_trainer.models.spec import BackboneSpec, require_vit


@dataclass(frozen=True, kw_only=True)
class FedVPT:
    """Prompt tokens before the first block and a head, one model for all sites."""

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2203.12119"
    needs_labels: ClassVar[bool] = True

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n: int = 1  # prompt tokens; PEP-FedPT's n_S
    weighting: Weighting = "samples"

    def __post_init__(self) -> None:
        check_count("n", self.n)

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; moments of features once."""
        return averaged_prompts.travels(self.recipe, "prompts", "weights")

    def phases(self, rounds: int) -> Sequence[Phase]:
        """A warm exchange where features have to be looked at, then R rounds."""
        return averaged_prompts.phases(self.recipe, rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Fresh prompts and head."""
        return self.start_with(Tokens(), task)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """P and H to everyone."""
        return averaged_prompts.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs of P and H."""
        return self.round_with(Tokens(), site, broadcast)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """The mean of prompts and heads."""
        return averaged_prompts.aggregate(self.recipe, self.weighting, state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The averaged model."""
        return averaged_prompts.predictor(self.recipe, site, Tokens(), broadcast.arrays, broadcast)

    def start_with(self, insert: Tokens, task: Task) -> State:
        """Fresh prompts for the blocks of `insert`, and a fresh head."""
        check_fits(task, insert)
        generator = torch.Generator().manual_seed(task.seed)
        prompts = token_init(task.backbone, (len(insert.blocks), self.n, task.backbone.width), generator)
        head = head_init(task.backbone, len(task.classes), generator)
        return averaged_prompts.start(self.recipe, task, {PROMPTS: prompts, HEAD: head})

    def round_with(self, insert: Tokens, site: Site, broadcast: Payload) -> tuple[State, Payload]:
        """One round with prompts where `insert` says."""
        if broadcast.scalars["phase"] == "warm":
            return State(), averaged_prompts.warm_reply(self.recipe, site)
        learned = averaged_prompts.train(self.recipe, site, insert, broadcast.arrays, broadcast, (PROMPTS, HEAD))
        return State(learned), averaged_prompts.reply(site, learned)


@dataclass(frozen=True, kw_only=True)
class FedVPTDeep:
    """Fresh prompt tokens before every block, one model for all sites."""

    family: ClassVar[str] = FedVPT.family
    paper: ClassVar[str] = FedVPT.paper
    needs_labels: ClassVar[bool] = True

    fedvpt: FedVPT = field(default_factory=FedVPT)
    last_block: Literal["L-2", "L-1"] = "L-2"  # the last block that gets fresh tokens, counted from 0

    def insert(self, depth: int) -> Tokens:
        """Where tokens enter a network of L = `depth` blocks."""
        return Tokens(tuple(range(depth - 1 if self.last_block == "L-2" else depth)))

    @property
    def travels(self) -> tuple[str, ...]:
        """As FedVPT."""
        return self.fedvpt.travels

    def phases(self, rounds: int) -> Sequence[Phase]:
        """As FedVPT."""
        return self.fedvpt.phases(rounds)

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Fresh prompts for every block, and a fresh head."""
        return self.fedvpt.start_with(self._insert(task.backbone), task)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """As FedVPT."""
        return self.fedvpt.broadcast(state, phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """E epochs of all prompts and H."""
        return self.fedvpt.round_with(self._insert(site.task.backbone), site, broadcast)

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """As FedVPT."""
        return self.fedvpt.aggregate(state, phase, replies)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The averaged model."""
        insert = self._insert(site.task.backbone)
        return averaged_prompts.predictor(self.fedvpt.recipe, site, insert, broadcast.arrays, broadcast)

    def _insert(self, backbone: BackboneSpec) -> Tokens:
        return self.insert(require_vit(backbone, "fedvpt-deep").depth)

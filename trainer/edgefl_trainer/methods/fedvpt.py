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

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgefl_trainer.contract import Declaration
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.softmax import SoftmaxRecipe, check_count
from edgefl_trainer.models.inserts import Tokens
from edgefl_trainer.models.spec import BackboneSpec, require_vit


@dataclass(frozen=True, kw_only=True)
class FedVPT:
    """Prompt tokens before the first block and a head, one model for all sites.

    For sites that send little: some tokens and a head.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2203.12119"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = softmax.DECLARES

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n: int = 1  # number of prompt tokens; PEP-FedPT's n_S (arXiv 2510.25372)
    # what a site counts by in the mean: its training images, or all sites alike (arXiv 2510.25372; default ours)
    weighting: Weighting = "samples"

    travels = averaged_prompts.travels("prompts", "weights")
    phases = averaged_prompts.phases
    start = averaged_prompts.start
    broadcast = averaged_prompts.broadcast
    local_round = averaged_prompts.local_round
    aggregate = averaged_prompts.aggregate
    predictor = averaged_prompts.predictor

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def insert_for(self, backbone: BackboneSpec) -> Tokens:
        """Insert behind the class token, before block 0."""
        return Tokens()


@dataclass(frozen=True, kw_only=True)
class FedVPTDeep:
    """Fresh prompt tokens before every block, one model for all sites.

    For sites that send little, where prompts of the first block alone learn too little.
    """

    family: ClassVar[str] = FedVPT.family
    paper: ClassVar[str] = FedVPT.paper
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = softmax.DECLARES

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n: int = 1  # prompt tokens of a block (arXiv 2510.25372)
    # what a site counts by in the mean: its training images, or all sites alike (arXiv 2510.25372; default ours)
    weighting: Weighting = "samples"
    last_block: Literal["L-2", "L-1"] = "L-2"  # the last block that gets fresh tokens, counted from 0 (default ours)

    travels = averaged_prompts.travels("prompts", "weights")
    phases = averaged_prompts.phases
    start = averaged_prompts.start
    broadcast = averaged_prompts.broadcast
    local_round = averaged_prompts.local_round
    aggregate = averaged_prompts.aggregate
    predictor = averaged_prompts.predictor

    def __post_init__(self) -> None:
        check_count("n", self.n)

    def insert(self, depth: int) -> Tokens:
        """Say where tokens enter a network of L = `depth` blocks."""
        return Tokens(tuple(range(depth - 1 if self.last_block == "L-2" else depth)))

    def insert_for(self, backbone: BackboneSpec) -> Tokens:
        """Insert before every block of that network."""
        return self.insert(require_vit(backbone, "fedvpt-deep").depth)

"""Local. The floor of every comparison: each site learns prompts and head alone (arXiv 2411.10071, Table 1).

    site c: E epochs of b-prompts, t-prompts and head on its own images      local_round
    server: nothing is sent, nothing is averaged                             aggregate

Differs from the paper: AdamW, softplus evidence and standardised features where the paper is silent (docs/methods.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgefl_protocol import Payload
from edgefl_trainer.contract import Declaration, Site, State, Task
from edgefl_trainer.learning import evidential, method_parts, private_prompts
from edgefl_trainer.learning.evidential import EvidentialRecipe, check_fits
from edgefl_trainer.learning.private_prompts import private_round


@dataclass(frozen=True, kw_only=True)
class Local:
    """Every site for itself.

    For comparisons: what a site reaches without a federation.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 2411.10071"
    travels: ClassVar[tuple[str, ...]] = ()
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = evidential.DECLARES

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    optimizer_state: Literal["keep", "reset"] = "keep"  # across rounds; reset makes one site equal to `fedavg`

    phases = method_parts.train_rounds
    broadcast = method_parts.nothing_sent
    aggregate = method_parts.nothing_averaged
    predictor = private_prompts.predictor

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with an empty state: the server knows nothing."""
        check_fits(self.recipe, task.backbone, len(task.classes))
        return State()

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs at home."""
        keep = self.optimizer_state == "keep"
        return private_round(self.recipe, site, state, broadcast, keep_optimizer=keep), Payload({}, {})

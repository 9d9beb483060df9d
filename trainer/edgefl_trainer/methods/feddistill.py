"""FedDistill. Seo et al., "Federated knowledge distillation", arXiv 2011.02367 (FD of Jeong et al., arXiv 1811.11479).

    server sends the mean output p_k of every class (nothing in round 1)              broadcast
    site c: E epochs on L + lambda·KL(p_y || p(x))                                    local_round → ToMeanOutput
            then the mean output over its images of each class goes                   local_round
    server: p_k = mean over the sites that have class k                               aggregate

Prompts and head stay at their site.

Differs from the paper: what is shared is the mean Dirichlet mean (or softmax) of a class, a distribution, since ReLU
evidence hides negative logits; means are taken in one pass after local training; `exclude_own=on` leaves a site's own
mean out of what it receives, as FD first proposed (docs/methods.md).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import kl_div

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Phase, Site, State, Task
from edgefl_trainer.learning import evidential, method_parts, private_prompts
from edgefl_trainer.learning.evidential import EvidentialRecipe, check_fits
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.named_arrays import by_class, class_rows
from edgefl_trainer.learning.private_prompts import private_round
from edgefl_trainer.learning.training_scores import class_means, training_scores

LEAST_PROBABILITY = 1e-7  # of an answer, so that its logarithm is finite


@dataclass(frozen=True)
class ToMeanOutput:
    """lambda·KL(p_y || p(x)), batch mean, 0 for a class without target; a `Term`."""

    weight: float  # lambda
    outputs: Float[Tensor, "K K"]  # row k: the federation's mean output of class k
    known: Bool[Tensor, " K"]
    name: str = field(default="distill", init=False)
    needs_maps: bool = field(default=False, init=False)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """See `Term`."""
        answers = step.probabilities.clamp(min=LEAST_PROBABILITY).log()  # (B, K)
        divergence = kl_div(answers, self.outputs[step.target], reduction="none").sum(dim=1)  # (B,)
        return self.weight * torch.where(self.known[step.target], divergence, 0).mean()


def _site_of(name: str) -> str | None:
    """Whose outputs an array of the server's state holds: `outputs.<class>.<site>`."""
    parts = name.split(".", 2)
    return parts[2] if parts[0] == "outputs" else None


@dataclass(frozen=True, kw_only=True)
class FedDistill:
    """Private models that agree on what a typical image of each class is answered with.

    For sites that may send mean answers, and no weights.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 2011.02367"
    travels: ClassVar[tuple[str, ...]] = ("logits",)
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = replace(evidential.DECLARES, site_of=_site_of)

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    distill_weight: float = 1.0  # lambda, weight of the distance to the mean answers (default ours)
    # whether a site's own answers are left out of the mean it is sent (arXiv 1811.11479; default ours)
    exclude_own: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, distill_weight=(0 <= self.distill_weight <= 1000, "0 to 1000"))

    phases = method_parts.train_rounds  # nothing is known in the first
    predictor = private_prompts.predictor

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin without outputs."""
        check_fits(self.recipe, task.backbone, len(task.classes))
        return State({}, {"classes": len(task.classes)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send `outputs.<class>` (K,): the mean over the sites that have the class."""
        return {name: Payload(self._mean_outputs(state, name), {}) for name in sites}

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn E epochs drawn to the federation's outputs, then send the site's own."""
        terms = self._terms(site, broadcast)
        new = private_round(self.recipe, site, state, broadcast, keep_optimizer=True, terms=terms)
        predictor = private_prompts.scoring(self.recipe, site, new)
        means = class_means(training_scores(site, predictor).probabilities, site.train.targets)
        return new, Payload({f"outputs.{k}": mean for k, mean in means.items()}, {})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Keep each site's latest outputs as `outputs.<class>.<site>`; those of sites that did not reply stay."""
        kept = {name: value for name, value in state.arrays.items() if _site_of(name) not in replies}
        for site in sorted(replies):
            found = by_class(replies[site].arrays, "outputs", int(state.values["classes"]))
            kept.update({f"outputs.{k}.{site}": mean for k, mean in found.items()})
        return State(kept, state.values)

    def _mean_outputs(self, state: State, receiver: str) -> dict[str, NDArray[np.generic]]:
        by_class: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
        for name in sorted(state.arrays):
            _, label, holder = name.split(".", 2)
            if not (self.exclude_own and holder == receiver):
                by_class[label].append(state.arrays[name].astype(np.float64))
        return {f"outputs.{k}": np.mean(found, axis=0).astype(np.float32) for k, found in by_class.items()}

    def _terms(self, site: Site, broadcast: Payload) -> list[ToMeanOutput]:
        if not broadcast.arrays or self.distill_weight == 0:
            return []
        classes = len(site.task.classes)
        found = class_rows(broadcast.arrays, "outputs", classes, classes)
        outputs, known = (torch.from_numpy(array).to(site.device) for array in found)
        return [ToMeanOutput(self.distill_weight, outputs, known)]

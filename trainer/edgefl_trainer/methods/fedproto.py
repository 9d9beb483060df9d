"""FedProto. Tan et al., "FedProto: federated prototype learning across heterogeneous clients", arXiv 2105.00243.

    server sends the mean feature of every class (nothing in round 1)                        broadcast
    site c: E epochs on L + lambda·||f(x) - proto_y||^2 / D                                  local_round → ToPrototype
            then the mean feature of each of its classes, with n_{c,k}, goes                 local_round
    server: proto_k = sum_c n_{c,k}/n_k proto_{c,k}                                          aggregate

Prompts and head stay at their site. A run reports the answers of the head and, beside them, those of the nearest
prototype; with `predict=nearest` that one is evaluated in full and exported, and the head stands beside it.

Differs from the paper: prototypes are computed in one pass after local training (`prototypes=during`: over the batches
of the last epoch while weights move, as the authors' code has it); a warm phase pools feature statistics, without which
the sites' standardised features had no common scale; a class without a prototype adds no term; the loss beside the term
is that of the evidential family (docs/methods.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Declaration, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import evidential, private_prompts
from edgefl_trainer.learning.averaging import image_count
from edgefl_trainer.learning.evidential import EvidentialRecipe, check_fits
from edgefl_trainer.learning.features import common_features, feature_reply, features_sent
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.named_arrays import by_class, class_rows
from edgefl_trainer.learning.private_prompts import private_round
from edgefl_trainer.learning.training_scores import class_means, training_features
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.spec import settled_readout

Prototypes = NDArray[np.float32]  # (K, D)
FAR = -1e9  # score of a class without prototype: infinitely far


@dataclass(frozen=True)
class ToPrototype:
    """lambda times the mean squared difference of a feature and its class's prototype; a `Term`."""

    weight: float  # lambda
    prototypes: Float[Tensor, "K D"]
    known: Bool[Tensor, " K"]
    name: str = field(default="prototype", init=False)
    needs_maps: bool = field(default=False, init=False)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """See `Term`."""
        distance = (step.features - self.prototypes[step.target]).square().mean(dim=1)  # (B,)
        return self.weight * torch.where(self.known[step.target], distance, 0).mean()


@dataclass(frozen=True)
class LastEpoch:
    """What the head read of the images of the last epoch, step by step."""

    features: list[Prototypes] = field(default_factory=list)  # (B, D) each
    targets: list[NDArray[np.int64]] = field(default_factory=list)  # (B,) each

    def __call__(self, epochs_left: int, step: Step) -> None:
        """See `evidential.learn`."""
        if epochs_left == 0:
            self.features.append(step.features.detach().cpu().numpy())
            self.targets.append(step.target.cpu().numpy())


@dataclass(frozen=True, kw_only=True)
class FedProto:
    """Private models that agree on where each class lies in feature space.

    For sites that may send a mean feature of each class, and no weights.
    """

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 2105.00243"
    needs_labels: ClassVar[bool] = True

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    proto_weight: float = 1.0  # lambda, weight of the distance to the prototypes
    # what a site's prototype of a class counts by: its images of the class, or all sites alike
    weighting: Literal["samples", "uniform"] = "samples"
    predict: Literal["head", "nearest"] = "head"  # what answers: the head, or the nearest prototype (default ours)
    # when prototypes are taken: after local training, or in its last epoch, while weights move (public code; default
    # ours)
    prototypes: Literal["after", "during"] = "after"

    def __post_init__(self) -> None:
        check_bounds(self, proto_weight=(0 <= self.proto_weight <= 1000, "0 to 1000"))

    @property
    def travels(self) -> tuple[str, ...]:
        """See `Method`; moments of features once."""
        return ("prototypes", *features_sent(self.recipe.head_norm))

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan one warm exchange of feature moments, then R rounds."""
        return [Phase("warm", 0), *(Phase("train", r) for r in range(1, rounds + 1))]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin without prototypes."""
        check_fits(self.recipe, task.backbone, len(task.classes))
        standardise = int(self.recipe.standardises(task.backbone))
        wanted = settled_readout(self.recipe.readout, task.backbone)
        return State({}, {"wanted": wanted, "standardise": standardise, "classes": len(task.classes)})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send `prototypes.<class>` and the common feature statistics; nothing in the warm phase."""
        if phase.kind == "warm":
            return dict.fromkeys(sites, Payload({}, {}))
        return dict.fromkeys(sites, Payload(state.arrays, {"readout": state.values["readout"]}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Send moments in the warm phase; then learn E epochs drawn to the prototypes, and send the site's own."""
        if broadcast.scalars["phase"] == "warm":
            standardise = self.recipe.standardises(site.task.backbone)
            return State(), feature_reply(site, self.recipe.readout, standardise=standardise)
        terms, seen = self._terms(site, broadcast), LastEpoch() if self.prototypes == "during" else None
        new = private_round(self.recipe, site, state, broadcast, keep_optimizer=True, terms=terms, watch=seen)
        if seen is not None:
            means = class_means(np.concatenate(seen.features), np.concatenate(seen.targets))
        else:
            predictor = private_prompts.scoring(self.recipe, site, new)
            means = class_means(training_features(site, predictor), site.train.targets)
        counts = site.train.counts(len(site.task.classes))
        arrays = {f"prototypes.{k}": mean for k, mean in means.items()}
        return new, Payload(arrays, {f"n.{k}": int(counts[k]) for k in means})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Average each class's prototype over the sites that have it; a class nobody sent keeps its own."""
        if phase.kind == "warm":
            found = common_features(replies, str(state.values["wanted"]), standardise=bool(state.values["standardise"]))
            return State(found.arrays, {**state.values, **found.values})
        sums: dict[int, NDArray[np.float64]] = {}
        weights: dict[int, float] = {}
        for site in sorted(replies):
            for k, mean in by_class(replies[site].arrays, "prototypes", int(state.values["classes"])).items():
                weight = 1.0 if self.weighting == "uniform" else image_count(replies[site], f"n.{k}")
                sums[k] = sums.get(k, 0.0) + weight * mean.astype(np.float64)
                weights[k] = weights.get(k, 0.0) + weight
        new = {f"prototypes.{k}": (sums[k] / weights[k]).astype(np.float32) for k in sums if weights[k] > 0}
        return State({**state.arrays, **new}, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the site's model: its own head, or the nearest prototype."""
        return self._answers(site, state, broadcast)[self.predict]

    def further_predictors(self, site: Site, state: State, broadcast: Payload) -> Mapping[str, Predictor]:
        """Return the other of the two models."""
        answers = self._answers(site, state, broadcast)
        return {name: answers[name] for name in answers if name != self.predict}

    declares: ClassVar[Declaration] = replace(evidential.DECLARES, further_predictors=further_predictors)

    def _answers(self, site: Site, state: State, broadcast: Payload) -> dict[str, Predictor]:
        head = private_prompts.predictor(self, site, state, broadcast)
        return {"head": head, "nearest": _nearest(head, *_stacked(site, broadcast))}

    def _terms(self, site: Site, broadcast: Payload) -> list[ToPrototype]:
        prototypes, known = _stacked(site, broadcast)
        if not known.any() or self.proto_weight == 0:
            return []
        tensors = (torch.from_numpy(prototypes).to(site.device), torch.from_numpy(known).to(site.device))
        return [ToPrototype(self.proto_weight, *tensors)]


def _stacked(site: Site, broadcast: Payload) -> tuple[Prototypes, NDArray[np.bool_]]:
    """Prototypes (K, D), zero where there is none, and which exist (K,)."""
    return class_rows(broadcast.arrays, "prototypes", len(site.task.classes), site.task.backbone.width)


def _nearest(predictor: Predictor, prototypes: Prototypes, known: NDArray[np.bool_]) -> Predictor:
    """-||f - p_k||^2/D is linear in f up to a term common to all classes: a softmax head with those weights."""
    wide = prototypes.astype(np.float64)
    width = wide.shape[1]
    bias = np.where(known, -(wide**2).sum(axis=1) / width, FAR)
    head = {"head.weight": (2 * wide / width).astype(np.float32), "head.bias": bias.astype(np.float32)}
    options = replace(predictor.score_module.options, output="softmax")
    kept = {name: value for name, value in predictor.tensors.items() if name in options.tensors}
    return replace(predictor, module=ScoreModule(predictor.score_module.backbone, options), tensors={**kept, **head})

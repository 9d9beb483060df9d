"""The uncertainty-aware attention buffer: rollout maps as what a federation shares.

    site:   of each class, the M training images of lowest vacuity; their maps travel, or    chosen_maps
            the mean of these
    server: a reply replaces all maps of its site; a site receives those of all others       rules.maps
    site:   lambda·L_KD pulls its maps of class k to the mean of the peers' mean maps of k   distillation

Ranking, names and means of maps are shared with devices (`edgefl_protocol.rules.maps`); `select=random` and `correct`
exist here alone. Source: FedEvPrompt (arXiv 2411.10071) section 3.2, eq. 6 and 7; docs/methods.md, distillation.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from edgefl_protocol.rules.bounds import FEDEVPROMPT
from edgefl_protocol.rules.defaults import FedEvPromptDefaults as Default
from edgefl_protocol.rules.maps import (
    PeerWeight,
    SentMaps,
    first_of_each_class,
    is_maps,
    most_certain,
    peer_targets,
    reply_maps,
)
from edgefl_trainer.bounds import check_ranges
from edgefl_trainer.contract import Arrays, Predictor, Site
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.training_scores import training_scores
from edgefl_trainer.losses import rollout_distillation
from edgefl_trainer.models.spec import BackboneSpec, require_vit
from edgefl_trainer.rollout import PrefixMode, Rollout, bilinear_gram, nearest_gram


@dataclass(frozen=True, kw_only=True)
class MapSharing:
    """Hyper-parameters of the buffer; symbols of FedEvPrompt in the comments."""

    paper: ClassVar[str] = "arXiv 2411.10071"

    kd_weight: float = Default.kd_weight  # lambda, weight of the distance to the others' maps
    maps_per_class: int = Default.maps_per_class  # M, most maps of a class that a site sends
    # which maps are sent: those of lowest vacuity, of lowest vacuity among correct answers (correct), or random ones
    select: Literal["vacuity", "random", "correct"] = Default.select
    # what is sent of these: each map, or of every class their mean, from which others learn the same (ours)
    sent_maps: SentMaps = Default.sent_maps
    # what rollout does with the prefix columns: drop them and divide each row by its rest, or drop them alone (sink)
    # (ours)
    rollout: PrefixMode = Default.rollout
    # blocks at the input that rollout leaves out; one less than the network has: the last block's attention (ours)
    rollout_from: int = Default.rollout_from
    # how maps are upsampled to 224 px before they are compared (ours)
    kd_metric: Literal["bilinear", "nearest"] = Default.kd_metric
    # how the others' distances add up: their sum, or five times their mean (mean5)
    kd_peers: PeerWeight = Default.kd_peers
    # how the distances of a batch's images add up: their mean, as the loss beside them, or their sum (ours)
    kd_batch: Literal["mean", "sum"] = Default.kd_batch

    def __post_init__(self) -> None:
        check_ranges(self, FEDEVPROMPT)

    @property
    def made(self) -> Rollout:
        """How maps are made."""
        return Rollout(self.rollout, self.rollout_from)

    def check_fits(self, spec: BackboneSpec) -> None:
        """Refuse a network without a block behind those that rollout leaves out, with a `SettingError`."""
        depth = require_vit(spec, "a rollout map").depth
        if self.rollout_from >= depth:
            raise SettingError(
                f"rollout_from is {self.rollout_from}; allowed: 0 to {depth - 1} with this backbone: give --set "
                f"rollout_from={depth - 1}, or a backbone with more blocks."
            )


@dataclass(frozen=True)
class Distillation:
    """lambda·L_KD of one training step (eq. 7 without its constant); a `Term`."""

    weight: float  # lambda
    peer_means: Float[Tensor, "K N"]
    peer_counts: Float[Tensor, " K"]
    gram: Float[Tensor, "N N"]
    summed: bool = False  # over the images of the batch
    name: str = field(default="kd", init=False)
    needs_maps: bool = field(default=True, init=False)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """See `Term`."""
        assert step.maps is not None
        weight = self.weight * (len(step.maps) if self.summed else 1)
        return weight * rollout_distillation(step.maps, step.target, self.peer_means, self.peer_counts, self.gram)


def distillation(sharing: MapSharing, site: Site, broadcast: Arrays) -> list[Distillation]:
    """Make the term of the peers' maps; none while there are no maps or lambda is 0."""
    if sharing.kd_weight == 0 or not any(map(is_maps, broadcast)):
        return []
    spec = require_vit(site.task.backbone, "a rollout map")
    targets = peer_targets(broadcast, len(site.task.classes), spec.tokens, sharing.kd_peers)
    means, counts = (torch.from_numpy(target).to(site.device) for target in targets)
    gram = (bilinear_gram if sharing.kd_metric == "bilinear" else nearest_gram)(spec.grid)
    gram = gram.float().to(site.device)
    return [Distillation(sharing.kd_weight, means, counts, gram, summed=sharing.kd_batch == "sum")]


def chosen_maps(sharing: MapSharing, site: Site, predictor: Predictor, round_: int) -> Arrays:
    """Choose the maps of a reply by `select`: at most M of each class of the site's training images, or their mean."""
    scores, targets = training_scores(site, predictor), site.train.targets
    assert scores.maps is not None
    uncertainty = scores.vacuity if scores.vacuity is not None else 1 - scores.probabilities.max(axis=1)
    if sharing.select == "vacuity":
        chosen = most_certain(uncertainty, targets, sharing.maps_per_class)
        return reply_maps(scores.maps, chosen, sharing.sent_maps)
    if sharing.select == "random":
        order = site.rng("select", round_).permutation(len(targets))
    else:
        order = np.argsort(uncertainty, kind="stable")
        named = np.where(site.seen, scores.probabilities, -1).argmax(axis=1)  # never a class that the site lacks
        order = order[(named == targets)[order]]
    return reply_maps(scores.maps, first_of_each_class(order, targets, sharing.maps_per_class), sharing.sent_maps)

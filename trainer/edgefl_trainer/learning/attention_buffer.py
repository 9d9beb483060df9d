"""The uncertainty-aware attention buffer: rollout maps as what a federation shares.

    site:   of each class, the M training images of lowest vacuity; their maps travel        most_certain_maps
    server: a reply replaces all maps of its site; a site receives those of all others       replaced, others_maps
    site:   lambda·L_KD pulls its maps of class k to the mean of the peers' mean maps of k   distillation

The server keeps maps as `maps.<class>.<site>`, (m, N) float16; they travel as `maps.<peer>.<class>`, the peer a number
that changes from round to round. Source: FedEvPrompt (arXiv 2411.10071) section 3.2, eq. 6 and 7; docs/methods.md,
distillation.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_protocol.rules.defaults import FedEvPrompt as Default
from edgefl_trainer.contract import Arrays, Predictor, Site
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import steps
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.training_scores import training_scores
from edgefl_trainer.losses import distillation_targets, rollout_distillation
from edgefl_trainer.models.spec import require_vit
from edgefl_trainer.rollout import PrefixMode, bilinear_gram, nearest_gram


@dataclass(frozen=True, kw_only=True)
class MapSharing:
    """Hyper-parameters of the buffer; symbols of FedEvPrompt in the comments."""

    kd_weight: float = Default.kd_weight  # lambda
    maps_per_class: int = Default.maps_per_class  # M
    select: Literal["vacuity", "random", "correct"] = Default.select  # correct: lowest vacuity among correct answers
    rollout: PrefixMode = Default.rollout  # what rollout does with the prefix columns
    kd_metric: Literal["bilinear", "nearest"] = Default.kd_metric  # upsampling to 224 px
    kd_peers: Literal["sum", "mean5"] = Default.kd_peers  # mean5: five times the mean over peers

    def __post_init__(self) -> None:
        if not 1 <= self.maps_per_class <= 100:
            raise SettingError(f"maps_per_class is {self.maps_per_class}; allowed: 1 to 100.")
        if not 0 <= self.kd_weight <= 1:
            raise SettingError(f"kd_weight is {self.kd_weight}; allowed: 0 to 1.")


@dataclass(frozen=True)
class Distillation:
    """lambda·L_KD of one training step (eq. 7 without its constant); a `Term`."""

    weight: float  # lambda
    peer_means: Float[Tensor, "K N"]
    peer_counts: Float[Tensor, " K"]
    gram: Float[Tensor, "N N"]
    name: str = field(default="kd", init=False)
    needs_maps: bool = field(default=True, init=False)

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """See `Term`."""
        assert step.maps is not None
        return self.weight * rollout_distillation(step.maps, step.target, self.peer_means, self.peer_counts, self.gram)


def others_maps(buffer: Arrays, seed: int, round_: int, sites: Sequence[str]) -> dict[str, Arrays]:
    """What each of `sites` receives: the maps of all others, sites replaced by numbers drawn anew each round."""
    held = {name: maps for name, maps in buffer.items() if name.startswith("maps.")}
    holders = sorted({name.split(".", 2)[2] for name in held})
    found: dict[str, Arrays] = {}
    for receiver in sites:
        peers = [name for name in holders if name != receiver]
        np.random.default_rng([seed, round_]).shuffle(peers)
        number = {peer: index for index, peer in enumerate(peers)}
        own: dict[str, NDArray[np.generic]] = {}
        for key, maps in held.items():
            _, label, holder = key.split(".", 2)
            if holder in number:
                own[f"maps.{number[holder]}.{label}"] = maps
        found[receiver] = own
    return found


def replaced(buffer: Arrays, replies: Mapping[str, Payload], classes: int) -> dict[str, NDArray[np.generic]]:
    """The buffer after a round: `maps.<class>` of a reply replace all maps of its site; other arrays stay.

    Args:
        buffer: `maps.<class>.<site>` among other arrays.
        replies: by site.
        classes: K.

    Raises:
        TrainingError: maps of a class that the task does not have.
    """
    kept = {
        name: maps
        for name, maps in buffer.items()
        if not name.startswith("maps.") or name.split(".", 2)[2] not in replies
    }
    for site in sorted(replies):
        found = steps.by_class(replies[site].arrays, "maps", classes)
        kept.update({f"maps.{k}.{site}": maps for k, maps in found.items()})
    return kept


def distillation(sharing: MapSharing, site: Site, broadcast: Arrays) -> list[Distillation]:
    """The term that the peers' maps make; none while there are no maps or lambda is 0."""
    by_peer: dict[Hashable, dict[int, torch.Tensor | NDArray[np.floating[Any]]]] = defaultdict(dict)
    for name, maps in broadcast.items():
        if name.startswith("maps."):
            _, peer, label = name.split(".")
            by_peer[peer][int(label)] = torch.from_numpy(np.array(maps))
    if not by_peer or sharing.kd_weight == 0:
        return []
    spec = require_vit(site.task.backbone, "a rollout map")
    means, counts = distillation_targets(by_peer, len(site.task.classes), spec.tokens)
    if sharing.kd_peers == "mean5":
        counts = 5.0 * (counts > 0)
    gram = (bilinear_gram if sharing.kd_metric == "bilinear" else nearest_gram)(spec.grid)
    device = site.device
    return [Distillation(sharing.kd_weight, means.to(device), counts.float().to(device), gram.float().to(device))]


def most_certain_maps(
    sharing: MapSharing, site: Site, predictor: Predictor, round_: int
) -> dict[str, NDArray[np.generic]]:
    """`maps.<class>` (m, N) float16 of the site's own training images, m at most M, in the deterministic view."""
    scores = training_scores(site, predictor)
    assert scores.maps is not None
    uncertainty = scores.vacuity if scores.vacuity is not None else 1 - scores.probabilities.max(axis=1)
    targets = site.train.targets
    order = np.argsort(uncertainty, kind="stable")  # ties by row
    if sharing.select == "random":
        order = site.rng("select", round_).permutation(len(order))
    elif sharing.select == "correct":
        order = order[(scores.probabilities.argmax(axis=1) == targets)[order]]
    chosen = {int(k): order[targets[order] == k][: sharing.maps_per_class] for k in np.unique(targets)}
    return {f"maps.{k}": scores.maps[rows].astype(np.float16) for k, rows in chosen.items() if len(rows)}

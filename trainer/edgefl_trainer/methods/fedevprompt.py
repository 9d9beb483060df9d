"""FedEvPrompt. "FedEvPrompt: federated evidential prompt tuning", arXiv 2411.10071 (ICPR 2024), section 3 and Fig. 1.

    server keeps, for each (site, class), at most M rollout maps                     State of the server
    server sends site c the maps of all others, sites replaced by numbers            broadcast
    site c: E epochs of prompts and head, L_eps + lambda·L_KD (eq. 2, 4, 7)          local_round → private_round
            prompts and head stay; the M maps of lowest vacuity of each class go     _most_certain_maps
    server: the new maps of (c, k) replace the old ones                              aggregate

Differs from the paper: maps travel at patch resolution as float16 and are compared through the Gram matrix of the
upsampling to 224 px (the same distance); a peer with fewer than M maps of a class weighs as one with M; images are
turned and mirrored; AdamW and softplus evidence where the paper is silent. docs/methods.md gives each decision.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning.evidential import Distillation, EvidentialRecipe, check_fits, make_predictor
from edgefl_trainer.learning.private import begun, private_round, readout_of
from edgefl_trainer.losses import distillation_targets
from edgefl_trainer.rollout import PrefixMode, bilinear_gram, nearest_gram

SCORE_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class FedEvPrompt:
    """Private evidential prompts; the federation shares only where its most certain models look."""

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 2411.10071"
    travels: ClassVar[tuple[str, ...]] = ("maps",)
    needs_labels: ClassVar[bool] = True

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    kd_weight: float = 1e-6  # lambda
    maps_per_class: int = 5  # M
    select: Literal["vacuity", "random", "correct"] = "vacuity"  # correct: lowest vacuity among correct answers
    rollout: PrefixMode = "renormalise"  # what rollout does with the prefix columns
    kd_metric: Literal["bilinear", "nearest"] = "bilinear"  # upsampling to 224 px
    kd_peers: Literal["sum", "mean5"] = "sum"  # mean5: five times the mean over peers

    def __post_init__(self) -> None:
        if not 1 <= self.maps_per_class <= 100:
            raise SettingError(f"maps_per_class is {self.maps_per_class}; allowed: 1 to 100.")
        if not 0 <= self.kd_weight <= 1:
            raise SettingError(f"kd_weight is {self.kd_weight}; allowed: 0 to 1.")

    def phases(self, rounds: int) -> Sequence[Phase]:
        """R rounds; the buffer is empty in the first."""
        return [Phase("train", r) for r in range(1, rounds + 1)]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """An empty buffer."""
        check_fits(self.recipe, task.backbone, len(task.classes))
        return State({}, {"seed": task.seed})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """The others' maps as `maps.<peer>.<class>`; a peer's number changes from round to round."""
        holders = sorted({name.split(".", 2)[2] for name in state.arrays})
        payloads = {}
        for receiver in sites:
            peers = [name for name in holders if name != receiver]
            np.random.default_rng([int(state.values["seed"]), phase.round]).shuffle(peers)
            number = {peer: index for index, peer in enumerate(peers)}
            arrays = {}
            for key, maps in state.arrays.items():
                _, label, holder = key.split(".", 2)
                if holder in number:
                    arrays[f"maps.{number[holder]}.{label}"] = maps
            payloads[receiver] = Payload(arrays, {})
        return payloads

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Learn with the others' maps as targets, then offer the own most certain ones."""
        distillation = self._distillation(site, broadcast)
        new = private_round(
            self.recipe, site, state, broadcast, keep_optimizer=True, distillation=distillation, mode=self.rollout
        )
        return new, Payload(self._most_certain_maps(site, new, int(broadcast.scalars["round"])), {})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """A reply replaces all maps of its site: the buffer is `maps.<class>.<site>`."""
        kept = {name: maps for name, maps in state.arrays.items() if name.split(".", 2)[2] not in replies}
        for site in sorted(replies):
            for name, maps in replies[site].arrays.items():
                kept[f"{name}.{site}"] = maps
        return State(kept, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The site's own model; the initial one where it took part in no round."""
        own = begun(self.recipe, site, state)
        return make_predictor(self.recipe, site, own.arrays, readout_of(own), self.rollout)

    def _distillation(self, site: Site, broadcast: Payload) -> Distillation | None:
        """Eq. 7 from the broadcast; None while the buffer is empty or lambda is 0."""
        if not broadcast.arrays or self.kd_weight == 0:
            return None
        by_peer: dict[Hashable, dict[int, torch.Tensor | NDArray[np.floating[Any]]]] = defaultdict(dict)
        for name, maps in broadcast.arrays.items():
            _, peer, label = name.split(".")
            by_peer[peer][int(label)] = torch.from_numpy(np.array(maps))
        spec = site.task.backbone
        means, counts = distillation_targets(by_peer, len(site.task.classes), spec.tokens)
        if self.kd_peers == "mean5":
            counts = 5.0 * (counts > 0)
        gram = (bilinear_gram if self.kd_metric == "bilinear" else nearest_gram)(spec.grid)
        device = site.device
        return Distillation(self.kd_weight, means.to(device), counts.float().to(device), gram.float().to(device))

    def _most_certain_maps(self, site: Site, state: State, round_: int) -> dict[str, NDArray[np.float16]]:
        """`maps.<class>` (m, N) float16 of the site's own training images, m at most M, in the deterministic view."""
        predictor = make_predictor(self.recipe, site, state.arrays, readout_of(state), self.rollout)
        tensors = {name: torch.from_numpy(np.array(value)).to(site.device) for name, value in predictor.tensors.items()}
        vacuity, correct, maps = [], [], []
        with torch.inference_mode():
            for images, target in site.train.in_order(SCORE_BATCH):
                score = predictor.module(images.to(site.device), tensors)
                vacuity.append(score.vacuity.cpu().numpy())
                correct.append((score.probabilities.argmax(dim=1).cpu() == target).numpy())
                maps.append(score.map.cpu().numpy())
        order = self._order(site, np.concatenate(vacuity), np.concatenate(correct), round_)
        stacked, targets = np.concatenate(maps), site.train.targets
        chosen = {int(k): order[targets[order] == k][: self.maps_per_class] for k in np.unique(targets)}
        return {f"maps.{k}": stacked[rows].astype(np.float16) for k, rows in chosen.items() if len(rows)}

    def _order(
        self, site: Site, vacuity: NDArray[np.float32], correct: NDArray[np.bool_], round_: int
    ) -> NDArray[np.int64]:
        """Training rows in the order in which they are offered; ties by row."""
        if self.select == "random":
            return site.rng("select", round_).permutation(len(vacuity))
        order = np.argsort(vacuity, kind="stable")
        return order[correct[order]] if self.select == "correct" else order

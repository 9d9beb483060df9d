"""PEP-FedPT. "Prompt estimation from prototypes for federated prompt tuning", arXiv 2510.25372, Algorithm 2.

    WarmStartUp: sites of S_0 send class means mu_{l,k,0} of the bare network     local_round, `warm`
    server sends theta = (H, P_S, P_C) and prototypes mu_l                        broadcast
    site k: mu_{l,k,t}, its class means under theta before it learns (eq. 18)     local_round → class_tokens
            [cls, m, P_S, patches], m = P_C s, s from mu_l and delta_k            models.inserts.Mixed
            E epochs of theta; delta_k never leaves the site (eq. 22 to 25)       local_round → averaged.train
    server: theta = mean of the sites' theta_k                                    aggregate
            after every R rounds mu_l = rho mu_l + (1 − rho) mean (eq. 20, 21)    aggregate → moved

Nothing trainable stays at a site. `prior=off` mixes with equal class shares; `dp_epsilon` puts noise on class means.

Differs from the paper: blocks count from 0; the warm start divides by the sites that have the class; a class first seen
later takes its mean as it is; under noise a class of one image is not sent, and the centre is the federation's
prototype; sites weigh by images unless `weighting=uniform`; rho = 0.5, not printed there. docs/methods.md 5.1 and 6.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_protocol.sentences import joined_by_and
from edgefl_trainer.bounds import check_bounds
from edgefl_trainer.contract import Arrays, Declaration, NoiseTerms, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import SettingError
from edgefl_trainer.gaussian_noise import PROTECTED, told_epsilon
from edgefl_trainer.learning import averaged_prompts, softmax
from edgefl_trainer.learning.averaged_prompts import Weighting
from edgefl_trainer.learning.named_arrays import as_tensors
from edgefl_trainer.learning.prototypes import (
    PROTOTYPES,
    LaplaceNoise,
    class_prototypes,
    class_tokens,
    contributions,
    moved,
)
from edgefl_trainer.learning.softmax import HEAD_WEIGHT, SoftmaxRecipe, check_fits, head_init, rising, token_init
from edgefl_trainer.models.inserts import Mixed
from edgefl_trainer.models.spec import BackboneSpec, require_vit

TRAINED = ("prompts.s", "prompts.c", HEAD_WEIGHT)  # theta: P_S, P_C, H
NO_GUARANTEE = "its scale comes from the data that it should hide (--set dp_clip_l1=B gives one)"
SUM, COUNT = "period.sum", "period.count"  # of the prototypes sent since the last update


@dataclass(frozen=True, kw_only=True)
class PepFedPT:
    """Shared prompts only; each image mixes the class prompts by prototypes and its site's class shares.

    For sites that hold other classes in other shares, and want one set of weights.
    """

    family: ClassVar[str] = "prompt tokens"
    paper: ClassVar[str] = "arXiv 2510.25372"
    needs_labels: ClassVar[bool] = True
    declares: ClassVar[Declaration] = replace(softmax.DECLARES, noise=lambda method: method.noise_terms)

    recipe: SoftmaxRecipe = field(default_factory=SoftmaxRecipe)
    n_s: int = 1  # n_S, number of shared prompts
    # blocks before which prompts are mixed, rising, from 0; empty: 5, 6, 7 of 12, in proportion of other depths
    ccmp_blocks: tuple[int, ...] = ()
    slot: Literal["replace", "append"] = "replace"  # whether the next mix takes the place of the one before (ours)
    tau: float = 0.05  # temperature of the similarity to the prototypes
    rho: float = 0.5  # share of the old prototypes that an update keeps (default ours)
    period: int = 10  # R, rounds between updates of the prototypes
    prior: bool = True  # whether delta_k comes from the site's labels; off: equal shares
    # what a site counts by in the mean: its training images, or all sites alike (default ours)
    weighting: Weighting = "samples"
    dp_epsilon: float = 0.0  # epsilon of the noise on each prototype sent, which dp_clip_l1 makes a bound; 0: no noise
    dp_clip_l1: float = 0.0  # B, radius around the centre; 0: the paper's estimate from the data, no guarantee (ours)

    travels = averaged_prompts.travels("prompts", "weights", "prototypes")

    def __post_init__(self) -> None:
        check_bounds(
            self,
            n_s=(1 <= self.n_s <= 1000, "1 to 1000"),
            ccmp_blocks=(rising(self.ccmp_blocks), "rising, from 0"),
            tau=(1e-6 <= self.tau <= 1e6, "0.000001 to 1000000"),
            rho=(0 <= self.rho <= 1, "0 to 1"),
            period=(self.period >= 1, "1 or more"),
            dp_epsilon=(self.dp_epsilon == 0 or 1e-6 <= self.dp_epsilon <= 1e6, "0 (no noise), 0.000001 to 1000000"),
            dp_clip_l1=(0 <= self.dp_clip_l1 <= 1e9, "0 (not clipped) to 1000000000"),
        )
        if self.dp_clip_l1 > 0 and self.dp_epsilon == 0:
            raise SettingError(
                f"dp_clip_l1 is {self.dp_clip_l1}, but there is no noise: give dp_epsilon too, or leave dp_clip_l1 out."
            )

    @property
    def noise_terms(self) -> NoiseTerms | None:
        """What the noise on class means promises (docs/methods.md 6); None without noise."""
        if self.dp_epsilon == 0:
            return None
        return NoiseTerms(
            kind=PROTOTYPES,
            on="class means",
            given="the prompts and head, and how many images each class has",
            no_guarantee=None if self.dp_clip_l1 > 0 else NO_GUARANTEE,
        )

    def insert(self, depth: int) -> Mixed:
        """Say where prompts enter a network of that many blocks."""
        first = 5 * depth // 12
        blocks = self.ccmp_blocks or tuple(range(first, min(first + 3, depth)))
        return Mixed(blocks=blocks, tau=self.tau, slot=self.slot)

    def phases(self, rounds: int) -> Sequence[Phase]:
        """Plan the warm start of one round's sample of sites (S_0), then R rounds."""
        return [Phase("warm", 0, sampled=True), *(Phase("train", r) for r in range(1, rounds + 1))]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Begin with fresh prompts and head, without prototypes."""
        insert, spec, classes = self._insert(task.backbone), task.backbone, len(task.classes)
        check_fits(task, insert)
        draw = torch.Generator().manual_seed(task.seed)
        theta = {
            "prompts.s": token_init(spec, (1, self.n_s, spec.width), draw),
            "prompts.c": token_init(spec, (classes, spec.width), draw),
            HEAD_WEIGHT: head_init(spec, classes, draw),
        }
        model = averaged_prompts.begin(self.recipe, task, theta)
        none = np.zeros((len(insert.blocks), classes, spec.width), dtype=np.float32)
        return State({**model.arrays, PROTOTYPES: none, **_empty(none)}, model.values)

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """Send theta, prototypes and the common feature statistics; nothing for the warm start."""
        model = {name: value for name, value in state.arrays.items() if name not in (SUM, COUNT)}
        return averaged_prompts.broadcast(self, State(model, state.values), phase, sites)

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Compute class means under what was received, then learn E epochs."""
        insert = self._insert(site.task.backbone)
        if broadcast.scalars["phase"] == "warm":
            found = averaged_prompts.warm_reply(self.recipe, site)
            sent, spent = self._prototypes(site, state, broadcast, class_tokens(site, insert.blocks))
            return State({}, spent), Payload({**found.arrays, **sent}, {**found.scalars, **spent})
        model = {**broadcast.arrays, "class_shares": self.class_shares(site)}
        tokens = class_tokens(site, insert.blocks, insert, as_tensors(model, site.device))
        sent, spent = self._prototypes(site, state, broadcast, tokens)
        learned = averaged_prompts.train(self.recipe, site, insert, model, broadcast, TRAINED)
        return State(learned, spent), Payload({**learned, **sent}, {"n_train": len(site.train), **spent})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Average theta as FedAvg; prototypes at once after the warm start, then after every R rounds."""
        if phase.kind == "final":
            return state
        own: dict[str, NDArray[Any]] = {name: state.arrays[name] for name in (PROTOTYPES, SUM, COUNT)}
        theta = State({name: value for name, value in state.arrays.items() if name not in own}, state.values)
        new = averaged_prompts.aggregate(self, theta, phase, replies)
        total, count = contributions(replies)
        total, count = own[SUM] + total, own[COUNT] + count
        if phase.kind == "warm" or phase.round % self.period == 0:
            prototypes = moved(own[PROTOTYPES], total, count, self.rho)
            own = {PROTOTYPES: prototypes, **_empty(prototypes)}
        else:
            own = {PROTOTYPES: own[PROTOTYPES], SUM: total, COUNT: count}
        return State({**new.arrays, **own}, new.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """Return the shared model with this site's class shares; a site that never took part has them too."""
        model = {**broadcast.arrays, "class_shares": self.class_shares(site)}
        return averaged_prompts.scoring(self.recipe, site, self._insert(site.task.backbone), model, broadcast)

    def class_shares(self, site: Site) -> NDArray[np.float32]:
        """Compute delta_k (eq. 22) from the labels of the training rows; equal shares where there are none."""
        counts = site.train.counts(len(site.task.classes)).astype(np.float64)
        known = self.prior and counts.sum() > 0
        return np.asarray(counts / counts.sum() if known else np.full_like(counts, 1 / len(counts)), dtype=np.float32)

    def _insert(self, backbone: BackboneSpec) -> Mixed:
        return self.insert(require_vit(backbone, "pep-fedpt").depth)

    def _prototypes(
        self, site: Site, state: State, broadcast: Payload, tokens: NDArray[np.float32]
    ) -> tuple[Arrays, Mapping[str, float]]:
        """What a site sends of its class tokens (n, J, D), and the epsilon it has spent so far.

        Nothing is spent without noise; where the noise is no guarantee, how often it sent stands in its place.
        """
        targets, classes = site.train.targets, len(site.task.classes)
        if self.dp_epsilon == 0:
            return {PROTOTYPES: class_prototypes(tokens, targets, classes)}, {}
        zeros = np.zeros((tokens.shape[1], classes, tokens.shape[2]), dtype=np.float32)
        centres = np.asarray(broadcast.arrays.get(PROTOTYPES, zeros), dtype=np.float32)
        rng = site.noise_rng("laplace", int(broadcast.scalars["round"]))  # the warm start is 0
        sent = LaplaceNoise(self.dp_epsilon, self.dp_clip_l1).prototypes(tokens, targets, centres, rng)
        cost = self.dp_epsilon * len(zeros)
        if not state.values:
            site.report({"warning": self._noise_sentence(site, cost)})
        if self.dp_clip_l1 == 0:
            return {PROTOTYPES: sent}, {"releases": int(state.values.get("releases", 0)) + 1}
        return {PROTOTYPES: sent}, {"epsilon_spent": float(state.values.get("epsilon_spent", 0.0)) + cost}

    def _noise_sentence(self, site: Site, cost: float) -> str:
        """What a person should know before the first reply under noise, which costs `cost`."""
        terms = self.noise_terms
        assert terms is not None
        if terms.no_guarantee:
            told = f"noise on class means of site {site.name} is no guarantee: {terms.no_guarantee}. It is on them only"
        else:
            most = told_epsilon(cost * (site.task.rounds + 1))
            told = (
                f"class means of site {site.name} cost epsilon {told_epsilon(cost)} a round and {most} in all, "
                f"{PROTECTED}, given {terms.given}"
            )
        return f"{told}; {joined_by_and(terms.without(self.travels))} leave without noise.{site.noise_warning}"


def _empty(prototypes: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """A period in which nothing has been sent yet."""
    return {SUM: np.zeros(prototypes.shape), COUNT: np.zeros(prototypes.shape[:2], dtype=np.int64)}

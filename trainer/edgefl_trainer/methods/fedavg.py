"""FedAvg over prompts and head. McMahan et al., arXiv 1602.05629, as FedEvPrompt (arXiv 2411.10071) compares with it.

    before round 1: sites send moments of the frozen network's features, and how     local_round, `warm`
                    well each readout probes; the server pools them                  aggregate, `warm`
    server sends prompts and head                                                    broadcast
    site c: E epochs from them                                                       local_round, `train`
    server: theta = sum_c n_c/n theta_c                                              aggregate, `train`

Differs from the paper: the warm phase (standardised features need one scale for all sites); optimiser moments start
afresh each round; AdamW and softplus evidence where the paper is silent (docs/methods.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import evidential, steps
from edgefl_trainer.learning.evidential import EvidentialRecipe, make_predictor
from edgefl_trainer.learning.features import (
    READOUTS,
    FeatureMoments,
    best_readout,
    frozen_features,
    moments,
    probe_readouts,
)
from edgefl_trainer.models.vit import Readout


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """One model for all sites: the mean of what each learned."""

    family: ClassVar[str] = "evidential prompts"
    paper: ClassVar[str] = "arXiv 1602.05629"
    travels: ClassVar[tuple[str, ...]] = ("prompts", "weights", "features")  # features: moments, once
    needs_labels: ClassVar[bool] = True

    recipe: EvidentialRecipe = field(default_factory=EvidentialRecipe)
    weighting: Literal["samples", "uniform"] = "samples"

    def phases(self, rounds: int) -> Sequence[Phase]:
        """One warm exchange of feature moments, then R rounds."""
        return [Phase("warm", 0), *(Phase("train", r) for r in range(1, rounds + 1))]

    def start(self, task: Task, sites: Sequence[str]) -> State:
        """Initial prompts and head."""
        initial = evidential.initial_tensors(self.recipe, task.backbone, len(task.classes), task.seed)
        return State(steps.as_arrays(initial), {"standardise": int(self.recipe.standardises(task.backbone))})

    def broadcast(self, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
        """The averaged tensors; nothing in the warm phase."""
        if phase.kind == "warm":
            return dict.fromkeys(sites, Payload({}, {}))
        return dict.fromkeys(sites, Payload(state.arrays, {"readout": state.values["readout"]}))

    def local_round(self, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
        """Moments and probes in the warm phase, then E epochs from the averaged tensors."""
        if broadcast.scalars["phase"] == "warm":
            return State(), _feature_reply(site)
        tensors = evidential.trainable(broadcast.arrays, site.device)
        optimizer = evidential.make_optimizer(self.recipe, tensors, None)
        round_ = int(broadcast.scalars["round"])
        evidential.learn(
            self.recipe, site, tensors, _readout(broadcast.scalars["readout"]), round_, optimizer=optimizer
        )
        learned = steps.as_arrays({name: tensors[name] for name in evidential.TRAINED})
        return State(learned), Payload(learned, {"n_train": len(site.train)})

    def aggregate(self, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
        """Pooled feature statistics and the readout that probes best; then the mean of the sites' tensors."""
        if phase.kind == "warm":
            readout = self._choose_readout(replies)
            pooled = _pool(replies, readout).statistics() if state.values["standardise"] else {}
            return State({**state.arrays, **pooled}, {**state.values, "readout": readout})
        weights = dict.fromkeys(replies, 1.0) if self.weighting == "uniform" else steps.sample_weights(replies)
        return State({**state.arrays, **steps.weighted_mean(replies, weights)}, state.values)

    def predictor(self, site: Site, state: State, broadcast: Payload) -> Predictor | None:
        """The averaged model with the site's own prior."""
        return make_predictor(self.recipe, site, broadcast.arrays, _readout(broadcast.scalars["readout"]))

    def _choose_readout(self, replies: Mapping[str, Payload]) -> Readout:
        if self.recipe.readout != "auto":
            return self.recipe.readout
        scores = {
            name: float(np.mean([float(replies[site].scalars[f"probe.{name}"]) for site in sorted(replies)]))
            for name in READOUTS
        }
        return best_readout(scores)


def _feature_reply(site: Site) -> Payload:
    """Moments (2, D) of both readouts over a site's training images, and their probe figures."""
    assert site.backbone is not None
    features = frozen_features(site.backbone, site.train, site.device)
    found = {name: moments(features[name]) for name in READOUTS}
    arrays = {f"moments.{name}": np.stack([found[name].mean, found[name].square]) for name in READOUTS}
    probes = {f"probe.{name}": score for name, score in probe_readouts(site, features).items()}
    return Payload(arrays, {"n_train": len(site.train), **probes})


def _pool(replies: Mapping[str, Payload], readout: Readout) -> FeatureMoments:
    """Moments over all sites' images: the sites' moments, weighted by their numbers of images."""
    key = f"moments.{readout}"
    only = {name: Payload({key: reply.arrays[key]}, reply.scalars) for name, reply in replies.items()}
    mean, square = steps.weighted_mean(only, steps.sample_weights(replies))[key]
    return FeatureMoments(sum(int(reply.scalars["n_train"]) for reply in replies.values()), mean, square)


def _readout(value: object) -> Readout:
    return "mean" if value == "mean" else "cls"

"""Rounds of a prompt-tuning method whose learned tensors are one model for all sites: FedAvg over prompts and head.

    before round 1, where features have to be looked at: what each site finds, pooled     local_round, aggregate
    server sends theta, and what the head reads                                           broadcast
    site c: E epochs from theta                                                           local_round
    server: theta = sum_c w_c theta_c, w_c = n_c/n or 1/C                                 aggregate

A method takes over the functions that fit, see `learning.method_parts`. Where the readout is named and features are
taken as they are (the papers' setting) there is no warm phase. PEP-FedPT (arXiv 2510.25372) sections 3.2 and 5.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import softmax
from edgefl_trainer.learning.averaging import site_weights, weighted_mean
from edgefl_trainer.learning.features import common_features, feature_reply, features_sent, readout_named
from edgefl_trainer.learning.named_arrays import as_arrays
from edgefl_trainer.learning.softmax import (
    HEAD_WEIGHT,
    PROMPTS,
    STATISTICS,
    SoftmaxRecipe,
    check_fits,
    head_init,
    token_init,
)
from edgefl_trainer.models.inserts import Insert, Tokens
from edgefl_trainer.models.spec import BackboneSpec, settled_readout

Weighting = Literal["samples", "uniform"]
"""Of the sites in a mean: by training images, or each the same (PEP-FedPT section 3.2)."""


class AveragesTensors(Protocol):
    """A method of which some tensors are averaged."""

    @property
    def recipe(self) -> SoftmaxRecipe:
        """Hyper-parameters of local learning."""

    @property
    def weighting(self) -> Weighting:
        """Of the sites in the mean."""


class AveragesAll(AveragesTensors, Protocol):
    """A method whose prompts and head are all averaged."""

    @property
    def n(self) -> int:
        """Prompt tokens of a block; 0 without any."""

    def insert_for(self, backbone: BackboneSpec) -> Tokens | None:
        """Say where the prompts enter that network; None without any."""


def travels(*kinds: str) -> property:
    """Say what sites send (`Method.travels`): those kinds, and moments of features once where they are asked for."""

    def sent(method: AveragesTensors) -> tuple[str, ...]:
        return (*kinds, *features_sent(method.recipe.head_norm))

    return property(sent)


def phases(method: AveragesTensors, rounds: int) -> Sequence[Phase]:
    """Plan one warm exchange where features have to be looked at, then R rounds."""
    warm = [Phase("warm", 0)] if method.recipe.asks_features else []
    return [*warm, *(Phase("train", r) for r in range(1, rounds + 1))]


def start(method: AveragesAll, task: Task, sites: Sequence[str]) -> State:
    """Begin with fresh prompts and head."""
    return begin(method.recipe, task, fresh_tensors(task, method.insert_for(task.backbone), method.n))


def fresh_tensors(task: Task, insert: Tokens | None, n: int) -> dict[str, Tensor]:
    """Draw n prompt tokens for each block of `insert`, and a head; raises as `softmax.check_fits`."""
    check_fits(task, insert)
    spec, generator = task.backbone, torch.Generator().manual_seed(task.seed)
    prompts = {PROMPTS: token_init(spec, (len(insert.blocks), n, spec.width), generator)} if insert else {}
    return {**prompts, HEAD_WEIGHT: head_init(spec, len(task.classes), generator)}


def begin(recipe: SoftmaxRecipe, task: Task, tensors: Mapping[str, Tensor]) -> State:
    """Begin the server: initial tensors, and the readout as far as it is known.

    A `SettingError` where the backbone has no such readout.
    """
    readout = settled_readout(recipe.readout, task.backbone)
    standardise = int(recipe.standardises(task.backbone))
    return State(as_arrays(tensors), {"readout": readout, "standardise": standardise})


def broadcast(method: object, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """Send model and readout, the same for all; nothing in the warm phase."""
    if phase.kind == "warm":
        return dict.fromkeys(sites, Payload({}, {}))
    return dict.fromkeys(sites, Payload(state.arrays, {"readout": state.values["readout"]}))


def local_round(method: AveragesAll, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
    """Look at the features in the warm phase; then learn prompts and head for E epochs."""
    if broadcast.scalars["phase"] == "warm":
        return State(), warm_reply(method.recipe, site)
    insert = method.insert_for(site.task.backbone)
    names = (HEAD_WEIGHT,) if insert is None else (PROMPTS, HEAD_WEIGHT)
    learned = train(method.recipe, site, insert, broadcast.arrays, broadcast, names)
    return State(learned), reply(site, learned)


def warm_reply(recipe: SoftmaxRecipe, site: Site) -> Payload:
    """Answer what a site finds in its features, as far as it is asked."""
    return feature_reply(site, recipe.readout, standardise=recipe.standardises(site.task.backbone))


def train(
    recipe: SoftmaxRecipe, site: Site, insert: Insert | None, model: Arrays, received: Payload, names: Sequence[str]
) -> Arrays:
    """Learn the tensors of `names` for E epochs and return them.

    `insert` says where prompt tokens enter, if any; of `received` the `round` and `readout` are read.
    """
    module = recipe.module(site, readout_named(received.scalars["readout"]), insert)
    tensors = softmax.trainable(model, names, site.device)
    softmax.learn(recipe, site, module, tensors, names, int(received.scalars["round"]))
    return as_arrays({name: tensors[name] for name in names})


def reply(site: Site, learned: Arrays) -> Payload:
    """Send some tensors and the site's number of training images."""
    return Payload(learned, {"n_train": len(site.train)})


def aggregate(method: AveragesTensors, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
    """Pool statistics and readout after the warm phase, then average the sites' tensors."""
    if phase.kind == "final":
        return state
    if phase.kind == "warm":
        found = common_features(replies, str(state.values["readout"]), standardise=bool(state.values["standardise"]))
        return State({**state.arrays, **found.arrays}, {**state.values, **found.values})
    shared = [name for name in state.arrays if name not in STATISTICS]
    mean = weighted_mean(replies, site_weights(method.weighting, replies), shared)
    return State({**state.arrays, **mean}, state.values)


def predictor(method: AveragesAll, site: Site, state: State, broadcast: Payload) -> Predictor | None:
    """Make the averaged model."""
    return scoring(method.recipe, site, method.insert_for(site.task.backbone), broadcast.arrays, broadcast)


def scoring(recipe: SoftmaxRecipe, site: Site, insert: Insert | None, model: Arrays, received: Payload) -> Predictor:
    """Make what a site scores with: all tensors, and the readout of a broadcast."""
    module = recipe.module(site, readout_named(received.scalars["readout"]), insert)
    return softmax.make_predictor(site, module, model)

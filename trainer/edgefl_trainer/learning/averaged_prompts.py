"""Rounds of a prompt-tuning method whose learned tensors are one model for all sites: FedAvg over prompts and head.

    before round 1, where features have to be looked at: what each site finds, pooled     warm_reply, aggregate
    server sends theta, and what the head reads                                           broadcast
    site c: E epochs from theta                                                           train
    server: theta = sum_c w_c theta_c, w_c = n_c/n or 1/C                                 aggregate

A method names its tensors and where they enter; these functions do the rest. Where the readout is named and features
are taken as they are (the papers' setting) there is no warm phase. PEP-FedPT (arXiv 2510.25372) sections 3.2 and 5.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from edgefl_protocol import Payload
from edgefl_trainer.contract import Arrays, Phase, Predictor, Site, State, Task
from edgefl_trainer.learning import softmax, steps
from edgefl_trainer.learning.features import common_features, feature_reply, features_sent, readout_named
from edgefl_trainer.learning.softmax import STATISTICS, SoftmaxRecipe
from edgefl_trainer.models.inserts import Insert
from edgefl_trainer.models.spec import settled_readout

Weighting = Literal["samples", "uniform"]
"""Of the sites in a mean: by training images, or each the same (PEP-FedPT section 3.2)."""


def travels(recipe: SoftmaxRecipe, *kinds: str) -> tuple[str, ...]:
    """What sites send: what a method averages, and moments of features once where they are asked for."""
    return (*kinds, *features_sent(recipe.head_norm))


def phases(recipe: SoftmaxRecipe, rounds: int) -> Sequence[Phase]:
    """One warm exchange where features have to be looked at, then R rounds."""
    warm = [Phase("warm", 0)] if recipe.asks_features else []
    return [*warm, *(Phase("train", r) for r in range(1, rounds + 1))]


def start(recipe: SoftmaxRecipe, task: Task, tensors: Mapping[str, Tensor]) -> State:
    """The server before the first exchange: initial tensors, and the readout as far as it is known.

    Raises:
        SettingError: the backbone has no such readout.
    """
    readout = settled_readout(recipe.readout, task.backbone)
    standardise = int(recipe.standardises(task.backbone))
    return State(steps.as_arrays(tensors), {"readout": readout, "standardise": standardise})


def broadcast(state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """The model and the readout, the same for all; nothing in the warm phase."""
    if phase.kind == "warm":
        return dict.fromkeys(sites, Payload({}, {}))
    return dict.fromkeys(sites, Payload(state.arrays, {"readout": state.values["readout"]}))


def warm_reply(recipe: SoftmaxRecipe, site: Site) -> Payload:
    """What a site finds in its features, as far as it is asked."""
    return feature_reply(site, recipe.readout, standardise=recipe.standardises(site.task.backbone))


def train(
    recipe: SoftmaxRecipe, site: Site, insert: Insert | None, model: Arrays, received: Payload, names: Sequence[str]
) -> Arrays:
    """E epochs of some tensors.

    Args:
        recipe: hyper-parameters.
        site: who learns.
        insert: where prompt tokens enter; None without any.
        model: all tensors to start from.
        received: its `round` and `readout` are read.
        names: which tensors learn.

    Returns:
        What was learned, by name.
    """
    module = recipe.module(site, readout_named(received.scalars["readout"]), insert)
    tensors = softmax.trainable(model, names, site.device)
    softmax.learn(recipe, site, module, tensors, names, int(received.scalars["round"]))
    return steps.as_arrays({name: tensors[name] for name in names})


def reply(site: Site, learned: Arrays) -> Payload:
    """What a site sends: some tensors and its number of training images."""
    return Payload(learned, {"n_train": len(site.train)})


def aggregate(
    recipe: SoftmaxRecipe, weighting: Weighting, state: State, phase: Phase, replies: Mapping[str, Payload]
) -> State:
    """Pooled statistics and readout after the warm phase, then the mean of the sites' tensors."""
    if phase.kind == "final":
        return state
    if phase.kind == "warm":
        found = common_features(replies, str(state.values["readout"]), standardise=bool(state.values["standardise"]))
        return State({**state.arrays, **found.arrays}, {**state.values, **found.values})
    shared = [name for name in state.arrays if name not in STATISTICS]
    sent = {site: Payload({name: one.arrays[name] for name in shared}, one.scalars) for site, one in replies.items()}
    weights = dict.fromkeys(replies, 1.0) if weighting == "uniform" else steps.sample_weights(replies)
    return State({**state.arrays, **steps.weighted_mean(sent, weights)}, state.values)


def predictor(recipe: SoftmaxRecipe, site: Site, insert: Insert | None, model: Arrays, received: Payload) -> Predictor:
    """What a site scores with: all tensors, and the readout of a broadcast."""
    module = recipe.module(site, readout_named(received.scalars["readout"]), insert)
    return softmax.make_predictor(site, module, model)

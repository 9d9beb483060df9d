"""Rounds of a self-supervised method whose whole network is averaged and whose sites remember nothing else.

    server: theta as the network begins            start
    server sends theta                             broadcast
    site c: E epochs from theta                    local_round
    server: theta = sum_c n_c/n theta_c            aggregate

With `bn=local` batch norm stays at its site until one last exchange. A method takes these functions over, see
`learning.method_parts`. FedCLF (arXiv 2208.11278) section V-A, baselines.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn

from edgefl_protocol import Payload
from edgefl_protocol.rules.slow_encoder import BUFFER
from edgefl_trainer.contract import Phase, Site, State, Task
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork, Pixels, Prepare, SgdRecipe, Split


class AveragesNetwork(Protocol):
    """What a method says of itself: the rest is alike."""

    @property
    def sgd(self) -> SgdRecipe:
        """Hyper-parameters of local learning."""

    def head(self, width: int) -> nn.Module:
        """Make what stands on a network of D pooled features."""

    def views(self, site: Site) -> Prepare:
        """Draw the views of a batch of images."""

    def loss(self, model: LearningNetwork, views: tuple[Pixels, ...]) -> Float[Tensor, ""]:
        """Compute the loss of the network on these views."""


def phases(method: AveragesNetwork, rounds: int) -> Sequence[Phase]:
    """Plan R rounds, and a last exchange where batch norm stays."""
    return self_supervised.phases(method.sgd, rounds)


def start(method: AveragesNetwork, task: Task, sites: Sequence[str]) -> State:
    """Begin with a fresh network, or the backbone to learn on, and a fresh head."""
    return self_supervised.start(method.sgd, task, method.head)


def broadcast(method: AveragesNetwork, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """Send the averaged tensors, the same for all; nothing in the last exchange."""
    return dict.fromkeys(sites, Payload({} if phase.kind == "final" else state.arrays, {}))


def local_round(method: AveragesNetwork, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
    """Learn E epochs; the last exchange collects batch norm where it stayed."""
    n_train = len(site.unlabelled)
    if broadcast.scalars["phase"] == "final":
        own = {name: value for name, value in state.arrays.items() if not name.startswith(BUFFER)}
        return state, Payload(own, {"n_train": n_train})
    model = self_supervised.build(site.task, method.head)
    split = Split.of(model, method.sgd.bn)
    self_supervised.fill(model, {**broadcast.arrays, **split.own(state.arrays)})
    loss, round_ = partial(method.loss, model), int(broadcast.scalars["round"])
    momentum = self_supervised.learn(
        method.sgd, site, model.at(site), method.views(site), loss, round_, before=state.arrays
    )
    learned = self_supervised.tensors_of(model)
    return State({**split.own(learned), **momentum}), Payload(split.sent(learned), {"n_train": n_train})


def aggregate(method: AveragesNetwork, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
    """Average the weights by numbers of images."""
    return self_supervised.average(state, replies)

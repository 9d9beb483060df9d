"""Rounds of a self-supervised method whose whole network is averaged and whose sites remember nothing else.

    server: theta as the network begins            self_supervised.start
    server sends theta                             broadcast
    site c: E epochs from theta                    local_round
    server: theta = sum_c n_c/n theta_c            self_supervised.average

With `bn=local` batch norm stays at its site until one last exchange. FedCLF (arXiv 2208.11278) section V-A, baselines.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn

from edgefl_protocol import Payload
from edgefl_trainer.contract import Phase, Site, State
from edgefl_trainer.learning.unlabelled import self_supervised
from edgefl_trainer.learning.unlabelled.self_supervised import Learner, Pixels, Prepare, SgdRecipe, Split

Head = Callable[[int], nn.Module]
Loss = Callable[[Learner, tuple[Pixels, ...]], Float[Tensor, ""]]


def broadcast(state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """The averaged tensors, the same for all; nothing in the last exchange."""
    return dict.fromkeys(sites, Payload({} if phase.kind == "final" else state.arrays, {}))


def local_round(
    recipe: SgdRecipe, site: Site, state: State, received: Payload, head: Head, prepare: Prepare, loss: Loss
) -> tuple[State, Payload]:
    """One site's work in one phase.

    Args:
        recipe: hyper-parameters.
        site: who learns.
        state: its batch norm with `bn=local`, else empty.
        received: the averaged tensors.
        head: makes what stands on the network.
        prepare: views of a batch.
        loss: of the network on these views.

    Returns:
        The new state, and what travels.
    """
    n_train = len(site.unlabelled)
    if received.scalars["phase"] == "final":
        return state, Payload(state.arrays, {"n_train": n_train})
    model = self_supervised.build(site.task, head)
    split = Split.of(model, recipe.bn)
    self_supervised.fill(model, {**received.arrays, **split.own(state.arrays)})
    self_supervised.learn(recipe, site, model.at(site), prepare, partial(loss, model), int(received.scalars["round"]))
    learned = self_supervised.tensors_of(model)
    return State(split.own(learned)), Payload(split.sent(learned), {"n_train": n_train})

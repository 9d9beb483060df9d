"""Parts of `contract.Method` that many methods have alike: plain functions whose first argument is the method.

A class takes one over by assignment, `aggregate = method_parts.aggregate_of_base`; mypy checks that it fits. A method
that is another one but for some parts holds the other as `base` and leaves the rest to it.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from edgefl_protocol import Payload
from edgefl_trainer.contract import Method, Phase, Predictor, Site, State, Task


def train_rounds(method: object, rounds: int) -> Sequence[Phase]:
    """Plan R rounds, nothing before and nothing behind them."""
    return [Phase("train", r) for r in range(1, rounds + 1)]


def nothing_sent(method: object, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """Send an empty broadcast to each site."""
    return dict.fromkeys(sites, Payload({}, {}))


def nothing_averaged(method: object, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
    """Leave the server's state as it was."""
    return state


def no_predictor(method: object, site: Site, state: State, broadcast: Payload) -> Predictor | None:
    """Return no predictor: what is learned names no class."""
    return None


class HasBase(Protocol):
    """A method that is built on another."""

    @property
    def base(self) -> Method:
        """The other, with its hyper-parameters."""


def travels_of_base(method: HasBase) -> tuple[str, ...]:
    """See `Method`."""
    return method.base.travels


def phases_of_base(method: HasBase, rounds: int) -> Sequence[Phase]:
    """See `Method`."""
    return method.base.phases(rounds)


def start_of_base(method: HasBase, task: Task, sites: Sequence[str]) -> State:
    """See `Method`."""
    return method.base.start(task, sites)


def broadcast_of_base(method: HasBase, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """See `Method`."""
    return method.base.broadcast(state, phase, sites)


def local_round_of_base(method: HasBase, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
    """See `Method`."""
    return method.base.local_round(site, state, broadcast)


def aggregate_of_base(method: HasBase, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
    """See `Method`."""
    return method.base.aggregate(state, phase, replies)


def predictor_of_base(method: HasBase, site: Site, state: State, broadcast: Payload) -> Predictor | None:
    """See `Method`."""
    return method.base.predictor(site, state, broadcast)

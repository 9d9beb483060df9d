"""Call a method's halves, and say in one sentence which of them broke its contract, and for which site.

Guarantees: what a half is given and returns is not changed; a reply holds no array of a kind that `Method.travels` does
not declare, so that what `run`, `init` and a device's owner are told of leaves a site and nothing else. An error of the
package itself passes as it is. Source: docs/design.md 4.
"""

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pae import pae
from edgefl_protocol.rules.maps import renumbered
from edgefl_protocol.rules.travels import KINDS, kind_of
from edgefl_protocol.sentences import counted, listed
from edgefl_trainer.contract import Method, Phase, Predictor, Site, State, Task
from edgefl_trainer.errors import MethodError, SettingError, TrainingError

_RULE = "docs/design.md 4 says what each half accepts and returns"
_NO_MISTAKES = (EdgeflError, OSError, MemoryError)  # of the method's code: what failed says so itself


def check_travels(method: Method) -> None:
    """Refuse, by a `SettingError`, a method that declares kinds which nobody knows."""
    unknown = [kind for kind in method.travels if kind not in KINDS]
    if unknown:
        raise SettingError(f"{_name(method)} declares travels {listed(unknown)}; known kinds are {', '.join(KINDS)}.")


def call_start(method: Method, task: Task, sites: Sequence[str]) -> State:
    """Call `Method.start`; a `MethodError` where it fails, or returns something else than a state."""
    with _told(method, "start", f"for {counted(len(sites), 'site')}"):
        found = method.start(task, sites)
    _expect(found, State, method, "start", "the server's first State")
    return found


def call_broadcast(method: Method, state: State, phase: Phase, sites: Sequence[str]) -> Mapping[str, Payload]:
    """Call `Method.broadcast`; a `MethodError` where it fails, or holds nothing for one of the sites."""
    with _told(method, "broadcast", f"in the {phase.kind} phase {phase.round}"):
        found = method.broadcast(state, phase, sites)
        lacking = [name for name in sites if not isinstance(found[name], Payload)]
    if lacking:
        place = _defined(method.broadcast)
        raise MethodError(f"broadcast of {_name(method)} gives no Payload for {listed(lacking)}: {_RULE}{place}.")
    return found


def stamped(payload: Payload, phase: Phase, rounds: int, numbering: np.random.Generator | None = None) -> Payload:
    """Add to a broadcast the scalars that every site reads: `phase`, `round` and `rounds`.

    `numbering` draws new numbers for the peers whose maps it holds (`rules.maps`); None for a broadcast that stays.
    """
    arrays = payload.arrays if numbering is None else renumbered(payload.arrays, numbering)
    return Payload(arrays, {**payload.scalars, "phase": phase.kind, "round": phase.round, "rounds": rounds})


def secret_numbering(key: bytes, receiver: str, exchange: int) -> np.random.Generator:
    """Return what draws the peers' numbers in one receiver's broadcast of an exchange, counted from 1.

    It is for members that a server does not own: they are told the seed, and could undo draws from it. `key` is the
    server's secret. The same arguments give the same numbers, so that a broadcast may be made again.
    """
    seed = hashlib.sha256(pae(key, receiver.encode(), str(exchange).encode())).digest()
    return np.random.default_rng(list(seed))


def call_local_round(method: Method, site: Site, state: State, broadcast: Payload) -> tuple[State, Payload]:
    """Call `Method.local_round`.

    Raises:
        MethodError: it fails, returns something else than a state and a reply, or sends what it does not declare.
    """
    with _told(method, "local_round", _of(site, state)):
        found = method.local_round(site, state, broadcast)
    returned: object = found
    pair = returned if isinstance(returned, tuple) else (returned,)
    if [type(one) for one in pair] != [State, Payload]:
        kinds = listed([type(one).__name__ for one in pair])
        raise MethodError(
            f"local_round of {_name(method)} returned {kinds} for {site.name}, and not the site's new State and its "
            f"reply, a Payload: {_RULE}{_defined(method.local_round)}."
        )
    beside = {name: kind_of(name) for name in found[1].arrays if kind_of(name) not in method.travels}
    if beside:
        name, kind = next(iter(beside.items()))
        raise MethodError(
            f"the reply of {site.name} holds {name}, which is of the kind {kind}, and {_name(method)} declares travels "
            f"{listed(method.travels) or 'nothing'}: name {kind} in `travels`, or do not send it from "
            f"local_round{_defined(method.local_round)}."
        )
    return found


def call_aggregate(method: Method, state: State, phase: Phase, replies: Mapping[str, Payload]) -> State:
    """Call `Method.aggregate`; a `MethodError` where it fails, naming the sites whose reply lacks what it reads."""
    try:
        with _told(method, "aggregate", f"in the {phase.kind} phase {phase.round}", replies):
            found = method.aggregate(state, phase, replies)
    except TrainingError as error:  # of what the replies hold
        raise TrainingError(f"aggregate of {_name(method)}: {error}", error.code) from error
    _expect(found, State, method, "aggregate", "the server's new State")
    return found


def call_predictor(method: Method, site: Site, state: State, broadcast: Payload) -> Predictor | None:
    """Call `Method.predictor`; a `MethodError` where it fails, or returns neither a predictor nor None."""
    with _told(method, "predictor", _of(site, state)):
        found = method.predictor(site, state, broadcast)
    if found is not None:
        _expect(found, Predictor, method, "predictor", "a Predictor or None")
    return found


def _expect(found: object, kind: type, method: Method, half: str, wanted: str) -> None:
    """Refuse what a half returned where it is of another type."""
    if not isinstance(found, kind):
        told = f"{half} of {_name(method)} returned {type(found).__name__}, and not {wanted}"
        raise MethodError(f"{told}: {_RULE}{_defined(getattr(method, half))}.")


def _defined(half: Callable[..., object]) -> str:
    """Say, in brackets, in which file and line a half begins; nothing where Python cannot tell."""
    code = getattr(half, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _failed_in(method: Method, error: Exception) -> str:
    """Say in which file and line of the method an error arose, and where it was raised, if that is another file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(type(method).__module__), "__file__", None)
    own = [frame for frame in frames if frame.filename == file]
    places = dict.fromkeys(f"{Path(one.filename).name}, line {one.lineno}" for one in (*own[-1:], frames[-1]))
    return "; raised in ".join(places)


@contextmanager
def _told(method: Method, half: str, when: str, replies: Mapping[str, Payload] | None = None) -> Iterator[None]:
    """Turn a mistake of a half into one sentence; errors of the package pass, and so does a signal to stop."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the card's memory was full in {half} of {_name(method)} {when}: start again in another --out with a "
            "smaller --batch, or with --batch auto."
        ) from error
    except _NO_MISTAKES:
        raise
    except Exception as error:
        what = f"{type(error).__name__} {error}"
        lacking = [] if not isinstance(error, KeyError) else _lacking(str(error.args[0]), replies or {})
        if lacking:
            what += f", which the reply of {listed(lacking)} does not hold"
        raise MethodError(
            f"{half} of {_name(method)} failed {when}: {what} ({_failed_in(method, error)}); {_RULE}."
        ) from error


def _lacking(key: str, replies: Mapping[str, Payload]) -> list[str]:
    return [name for name, one in replies.items() if key not in one.arrays and key not in one.scalars]


def _of(site: Site, state: State) -> str:
    """Say for which site a half was called, and that its state is empty, which each half must accept."""
    empty = not state.arrays and not state.values
    return f"for {site.name}, whose state is empty" if empty else f"for {site.name}"


def _name(method: Method) -> str:
    """A method's name in the table; of one that does not stand there, its class's."""
    from edgefl_trainer.methods import METHODS

    return next((name for name, kind in METHODS.items() if kind is type(method)), type(method).__name__)

"""What a reply changed, how much of each kind, and robust centres of many such updates.

The update of a floating array is the reply minus the broadcast, or the whole array where nothing of that name was sent
(first prototypes, moments). Maps and a site's own features have none: they are passed on, not averaged. Arrays are
compared by group, since one kind changes by far more than another: the first word of a name, statistics of batch norm
apart, and each class by itself. Pure, in float64.

No update is held whole: a changed one is made when somebody asks for its array
(`changed_replies`), and what needs all replies at once takes them in blocks of `_NUMBERS`, all together.

Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018 (median, trimmed mean); Blanchard et al.,
"Machine learning with adversaries", NeurIPS 2017 (multi-Krum); Allouah et al., "Fixing by mixing", AISTATS 2023
(nearest-neighbour mixing).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_coordinator.rounds.protection.changed_replies import (
    WHOLE,
    MadeArray,
    Numbers,
    as_it_came,
    changed,
    numbers_of,
)
from edgefl_protocol import Payload

Values = NDArray[np.float64]
Centre = Callable[[Values], Values]  # (n, …) updates → (…)

_DEALT = ("maps", "features")
_OF_A_CLASS = re.compile(r".+\.(?:0|[1-9][0-9]*)")
_STATISTICS = ("running_mean", "running_var")  # of batch norm
_BLOCK = 2**18  # numbers of each update in memory at once, at most
_NUMBERS = 2**22  # of all updates together
_EVEN = 64  # numbers: BLAS rounds the last few of a block otherwise, so blocks end where this ends


def group_of(name: str) -> str:
    """Return what an array is compared with: `head`, `backbone`, `statistics`, `prototypes.3` …."""
    if _OF_A_CLASS.fullmatch(name):
        return name
    return "statistics" if name.endswith(_STATISTICS) else name.partition(".")[0]


def updated(reply: Payload) -> list[str]:
    """Return the names of the arrays that have an update, in order."""
    return sorted(
        name
        for name, array in as_it_came(reply).items()
        if array.dtype.kind == "f" and name.partition(".")[0] not in _DEALT
    )


def update_of(reply: Payload, broadcast: Payload, name: str, part: slice = WHOLE) -> Values:
    """Return what a reply changed of an array, number by number; of a class that its site lacks, zeros."""
    numbers, sent = numbers_of(reply, name, part).astype(np.float64), broadcast.arrays.get(name)
    with np.errstate(over="ignore"):  # infinitely far is far
        change = numbers if sent is None else numbers - sent.reshape(-1)[part]
    held = _held(reply, name, part)
    return change if held is None else np.where(held, change, 0.0)


def lengths(reply: Payload, broadcast: Payload) -> dict[str, float]:
    """Measure the update of each group: its root mean square over rows, so that to hold fewer classes is no change."""
    squares: dict[str, float] = {}
    rows: dict[str, int] = {}
    for name in updated(reply):
        group = group_of(name)
        with np.errstate(over="ignore"):
            squares[group] = squares.get(group, 0.0) + float(np.square(update_of(reply, broadcast, name)).sum())
        rows[group] = rows.get(group, 0) + int(_held_rows(name, reply.arrays[name]).sum())
    return {group: math.sqrt(squares[group] / rows[group]) for group in squares if rows[group]}


def distance(reply: Payload, broadcast: Payload) -> float | None:
    """Measure how far a reply lies from what was broadcast (L2); None where it changed nothing of it."""
    names = [name for name in updated(reply) if name in broadcast.arrays]
    with np.errstate(over="ignore"):
        squares = [float(np.square(update_of(reply, broadcast, name)).sum()) for name in names]
    return math.sqrt(sum(squares)) if names else None


def scaled(reply: Payload, broadcast: Payload, factors: Mapping[str, float]) -> Payload:
    """Return the reply with the updates of some groups times a factor."""

    def shorter(name: str, part: slice) -> Numbers:
        update = update_of(reply, broadcast, name, part) * factors[group_of(name)]
        return _moved(reply, broadcast, name, part, update)

    return _remade(reply, [name for name in updated(reply) if group_of(name) in factors], shorter)


def hostile_among(replies: int, share: float) -> int:
    """Count how many replies may be hostile: the share rounded up, and fewer than half."""
    return min(math.ceil(share * replies - 1e-9), (replies - 1) // 2)


def median(updates: Values) -> Values:
    """Compute the median of each number; `updates` are (n, …)."""
    return np.asarray(np.median(updates, axis=0))


def trimmed_mean(updates: Values, share: float) -> Values:
    """Compute the mean of each number without its largest and smallest values, as many as may be hostile."""
    hostile = hostile_among(len(updates), share)
    return np.asarray(np.sort(updates, axis=0)[hostile : len(updates) - hostile].mean(axis=0))


def centred(
    replies: Sequence[Payload],
    broadcasts: Sequence[Payload],
    centre: Centre,
    least: int,
    mixing: Values | None = None,
) -> list[Payload]:
    """Give replies one robust update of every array that `least` of them hold, so that any mean of them is that one.

    With the matrix of `nearest_mixing` the centre is that of mixed updates.
    """
    common: dict[str, Values] = {}
    for name in sorted({name for reply in replies for name in updated(reply)}):
        holders = [place for place, reply in enumerate(replies) if name in reply.arrays]
        if len(holders) < least:
            continue
        having = [replies[place] for place in holders], [broadcasts[place] for place in holders]
        common[name] = np.empty(as_it_came(replies[holders[0]])[name].size)
        among = None if mixing is None else mixing[np.ix_(holders, holders)]  # each has itself among its nearest
        for part, block in _blocks(*having, name):
            mixed = block if among is None else (among / among.sum(axis=1, keepdims=True)) @ block
            common[name][part] = centre(mixed)
    return [_moved_by(common, *both) for both in zip(replies, broadcasts, strict=True)]


def _moved_by(common: Mapping[str, Values], reply: Payload, broadcast: Payload) -> Payload:
    """A reply whose updates of some arrays are those that all have in common."""

    def moved(name: str, part: slice) -> Numbers:
        return _moved(reply, broadcast, name, part, common[name][part])

    return _remade(reply, [name for name in common if name in reply.arrays], moved)


def farthest(replies: Sequence[Payload], broadcasts: Sequence[Payload], share: float) -> list[int]:
    """Return the places of the updates that multi-Krum leaves out: of n, the f with the largest scores.

    The score of an update is the sum of its squared distances to the n − f − 2 nearest others, so n is at least
    2f + 3; f is smaller than `share` says where that asks for more replies. An array that a reply lacks did not change.
    """
    count = len(replies)
    hostile = min(hostile_among(count, share), (count - 3) // 2)
    if hostile < 1:
        return []
    squared = _squared_distances(replies, broadcasts)
    np.fill_diagonal(squared, np.inf)
    scores = np.sort(squared, axis=1)[:, : count - hostile - 2].sum(axis=1)
    return sorted(np.argsort(-scores, kind="stable")[:hostile].tolist())


def nearest_mixing(replies: Sequence[Payload], broadcasts: Sequence[Payload], share: float) -> Values:
    """Return the matrix (n, n) that makes of each update the mean of its n − f nearest, itself among them.

    So what members with other pictures send comes closer together, and what lies apart from most is mixed with them.
    """
    count = len(replies)
    nearest = count - hostile_among(count, share)
    squared = _squared_distances(replies, broadcasts)
    np.fill_diagonal(squared, -1.0)  # itself first, however many are equal
    mixing = np.zeros((count, count))
    np.put_along_axis(mixing, np.argsort(squared, axis=1, kind="stable")[:, :nearest], 1 / nearest, axis=1)
    return mixing


def _squared_distances(replies: Sequence[Payload], broadcasts: Sequence[Payload]) -> Values:
    """Measure how far updates lie from one another, (n, n); an array that a reply lacks did not change."""
    count = len(replies)
    products = np.zeros((count, count))
    for name in sorted({name for reply in replies for name in updated(reply)}):
        for _, block in _blocks(replies, broadcasts, name):
            products += block @ block.T
    own = np.diag(products)
    return np.asarray(np.maximum(own[:, None] + own[None, :] - 2 * products, 0))


def _blocks(replies: Sequence[Payload], broadcasts: Sequence[Payload], name: str) -> Iterator[tuple[slice, Values]]:
    """The updates of one array, a part of all replies at a time, (n, numbers); zeros where a reply lacks it."""
    array = next(as_it_came(reply)[name] for reply in replies if name in reply.arrays)
    width = max(1, array.shape[-1]) if array.ndim else 1
    rows = max(1, _BLOCK // width) * width
    most = max(_EVEN, _NUMBERS // len(replies) // _EVEN * _EVEN)
    larger = (slice(start, min(start + rows, array.size)) for start in range(0, array.size, rows))
    for part in (smaller for one in larger for smaller in _cut(one, most)):
        block = np.zeros((len(replies), part.stop - part.start))
        for place, (reply, broadcast) in enumerate(zip(replies, broadcasts, strict=True)):
            if name in reply.arrays:
                block[place] = update_of(reply, broadcast, name, part)
        yield part, block


def _cut(part: slice, most: int) -> Iterator[slice]:
    """Cut a part; a rest of a few numbers belongs to the piece before, for alone it would be summed otherwise."""
    start = part.start
    while start < part.stop:
        stop = start + most if part.stop - start - most >= _EVEN else part.stop
        yield slice(start, stop)
        start = stop


def _remade(reply: Payload, names: Sequence[str], numbers: Callable[[str, slice], Numbers]) -> Payload:
    """The reply with some arrays that are made when they are asked for."""
    own = as_it_came(reply)
    return changed(reply, {name: MadeArray(own[name].shape, partial(numbers, name)) for name in names})


def _moved(reply: Payload, broadcast: Payload, name: str, part: slice, update: Values) -> Numbers:
    """A part of a reply's array with another update; rows of classes that its site lacks stay."""
    sent, held = broadcast.arrays.get(name), _held(reply, name, part)
    moved = update if sent is None else sent.reshape(-1)[part] + update
    if held is not None:
        moved = np.where(held, moved, numbers_of(reply, name, part))
    return moved.astype(as_it_came(reply)[name].dtype)


def _held(reply: Payload, name: str, part: slice) -> NDArray[np.bool_] | None:
    """Which numbers of a part say something; None for all of them."""
    if name.partition(".")[0] != "prototypes":
        return None
    array = reply.arrays[name]
    return np.repeat(_held_rows(name, array), array.shape[-1] if array.ndim else 1)[part]


def _held_rows(name: str, array: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows say something: among prototypes of all classes zeros stand for a class not held."""
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    if name.partition(".")[0] != "prototypes":
        return np.ones(len(rows), dtype=np.bool_)
    return np.asarray((rows != 0).any(axis=1))

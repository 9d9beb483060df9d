"""What a reply changed, how much of each kind, and robust centres of many such updates.

The update of a floating array is the reply minus the broadcast, or the whole array where nothing of that name was sent
(first prototypes, moments). Maps and a site's own features have none: they are passed on, not averaged. Arrays are
compared by group, since one kind changes by far more than another: the first word of a name, statistics of batch norm
apart, and each class by itself. Pure, in float64, in blocks, so that a network of many replies needs little memory.

Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018 (median, trimmed mean); Blanchard et al.,
"Machine learning with adversaries", NeurIPS 2017 (multi-Krum); Allouah et al., "Fixing by mixing", AISTATS 2023
(nearest-neighbour mixing).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload

Values = NDArray[np.float64]
Centre = Callable[[Values], Values]  # (n, …) updates → (…)

_DEALT = ("maps", "features")
_OF_A_CLASS = re.compile(r".+\.(?:0|[1-9][0-9]*)")
_STATISTICS = ("running_mean", "running_var")  # of batch norm
ALL = slice(None)
_BLOCK = 2**18  # numbers of each update in memory at once


def group_of(name: str) -> str:
    """Return what an array is compared with: `head`, `backbone`, `statistics`, `prototypes.3` …."""
    if _OF_A_CLASS.fullmatch(name):
        return name
    return "statistics" if name.endswith(_STATISTICS) else name.partition(".")[0]


def updated(reply: Payload) -> list[str]:
    """Return the names of the arrays that have an update, in order."""
    return sorted(
        name for name, array in reply.arrays.items() if array.dtype.kind == "f" and name.partition(".")[0] not in _DEALT
    )


def update_of(reply: Payload, broadcast: Payload, name: str, rows: slice = ALL) -> Values:
    """Return what a reply changed of one array, (rows, numbers); of a class that its site lacks, a row of zeros."""
    array, sent = _rows(reply.arrays[name])[rows].astype(np.float64), broadcast.arrays.get(name)
    with np.errstate(over="ignore"):  # infinitely far is far
        change = array if sent is None else array - _rows(sent)[rows]
    return np.where(_held(name, array), change, 0.0)


def lengths(reply: Payload, broadcast: Payload) -> dict[str, float]:
    """Measure the update of each group: its root mean square over rows, so that to hold fewer classes is no change."""
    squares: dict[str, float] = {}
    rows: dict[str, int] = {}
    for name in updated(reply):
        group = group_of(name)
        with np.errstate(over="ignore"):
            squares[group] = squares.get(group, 0.0) + float(np.square(update_of(reply, broadcast, name)).sum())
        rows[group] = rows.get(group, 0) + int(_held(name, _rows(reply.arrays[name])).sum())
    return {group: math.sqrt(squares[group] / rows[group]) for group in squares if rows[group]}


def distance(reply: Payload, broadcast: Payload) -> float | None:
    """Measure how far a reply lies from what was broadcast (L2); None where it changed nothing of it."""
    names = [name for name in updated(reply) if name in broadcast.arrays]
    with np.errstate(over="ignore"):
        squares = [float(np.square(update_of(reply, broadcast, name)).sum()) for name in names]
    return math.sqrt(sum(squares)) if names else None


def scaled(reply: Payload, broadcast: Payload, factors: Mapping[str, float]) -> Payload:
    """Return the reply with the updates of some groups times a factor."""
    arrays = dict(reply.arrays)
    for name in updated(reply):
        factor = factors.get(group_of(name))
        if factor is not None:
            arrays[name] = _moved(reply, broadcast, name, update_of(reply, broadcast, name) * factor)
    return Payload(arrays, reply.scalars)


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
    arrays = [dict(reply.arrays) for reply in replies]
    for name in sorted({name for reply in replies for name in updated(reply)}):
        holders = [place for place, reply in enumerate(replies) if name in reply.arrays]
        if len(holders) < least:
            continue
        shape = _rows(replies[holders[0]].arrays[name]).shape
        having = [replies[place] for place in holders], [broadcasts[place] for place in holders]
        blocks = _blocks(*having, name)
        if mixing is not None:
            among = mixing[np.ix_(holders, holders)]  # each has itself among its nearest
            among = among / among.sum(axis=1, keepdims=True)
            blocks = (among @ block for block in blocks)
        common = np.concatenate([centre(block) for block in blocks]).reshape(shape)
        for place in holders:
            arrays[place][name] = _moved(replies[place], broadcasts[place], name, common)
    return [Payload(own, reply.scalars) for own, reply in zip(arrays, replies, strict=True)]


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
        for block in _blocks(replies, broadcasts, name):
            products += block @ block.T
    own = np.diag(products)
    return np.asarray(np.maximum(own[:, None] + own[None, :] - 2 * products, 0))


def _blocks(replies: Sequence[Payload], broadcasts: Sequence[Payload], name: str) -> Iterator[Values]:
    """The updates of one array, some rows of all replies at a time, (n, numbers); zeros where a reply lacks it."""
    shape = next(_rows(reply.arrays[name]).shape for reply in replies if name in reply.arrays)
    step = max(1, _BLOCK // max(1, shape[1]))
    for start in range(0, shape[0], step):
        rows = slice(start, min(start + step, shape[0]))
        nothing = np.zeros((rows.stop - start) * shape[1])
        yield np.stack(
            [
                update_of(reply, broadcast, name, rows).ravel() if name in reply.arrays else nothing
                for reply, broadcast in zip(replies, broadcasts, strict=True)
            ]
        )


def _moved(reply: Payload, broadcast: Payload, name: str, update: Values) -> NDArray[Any]:
    """An array of a reply with another update; rows of classes that its site lacks stay."""
    own = reply.arrays[name]
    sent, rows = broadcast.arrays.get(name), _rows(own)
    moved = update if sent is None else _rows(sent) + update
    return np.where(_held(name, rows), moved, rows).astype(own.dtype).reshape(own.shape)


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1, array.shape[-1] if array.ndim else 1)


def _held(name: str, rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Which rows say something, (rows, 1): among prototypes of all classes zeros stand for a class not held."""
    if name.partition(".")[0] != "prototypes":
        return np.ones((len(rows), 1), dtype=np.bool_)
    return np.asarray((rows != 0).any(axis=1, keepdims=True))

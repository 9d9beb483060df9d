"""What a reply changed of its broadcast, and robust centres of many such updates.

An update is the reply minus the broadcast, of the floating arrays that both hold; other arrays (maps, features, first
prototypes) have none. Pure, in float64, array by array in name order.

Source: Yin et al., "Byzantine-robust distributed learning", ICML 2018 (median, trimmed mean); Blanchard et al.,
"Machine learning with adversaries", NeurIPS 2017 (multi-Krum).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload

Values = NDArray[np.float64]
Change = Callable[[str, Values], Values]
Centre = Callable[[Values], Values]


def updated(reply: Payload, broadcast: Payload) -> list[str]:
    """Return the names of the arrays of which a reply has an update, in order."""
    return sorted(name for name, array in reply.arrays.items() if array.dtype.kind == "f" and name in broadcast.arrays)


def update_of(reply: Payload, broadcast: Payload, name: str) -> Values:
    """Return what a reply changed of one array."""
    with np.errstate(over="ignore"):  # infinitely far is far
        return np.asarray(reply.arrays[name].astype(np.float64) - broadcast.arrays[name])


def length(reply: Payload, broadcast: Payload) -> float | None:
    """Measure an update (L2); None where there is none."""
    names = updated(reply, broadcast)
    with np.errstate(over="ignore"):
        squared = [float(np.square(update_of(reply, broadcast, name)).sum()) for name in names]
    return math.sqrt(sum(squared)) if names else None


def with_update(reply: Payload, broadcast: Payload, change: Change) -> Payload:
    """Return the reply with another update: `change` makes that of an array from its name and the update before."""
    arrays = dict(reply.arrays)
    for name in updated(reply, broadcast):
        moved = broadcast.arrays[name] + change(name, update_of(reply, broadcast, name))
        arrays[name] = np.asarray(moved, reply.arrays[name].dtype)
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


def farthest(replies: Sequence[Payload], broadcasts: Sequence[Payload], share: float) -> list[int]:
    """Return the places of the updates that multi-Krum leaves out: of n, the f with the largest scores.

    The score of an update is the sum of its squared distances to the n − f − 2 nearest others, so n is at least
    2f + 3; f is smaller than `share` says where that asks for more replies.
    """
    count = len(replies)
    hostile = min(hostile_among(count, share), (count - 3) // 2)
    if hostile < 1:
        return []
    squared = np.full((count, count), np.inf)
    for one in range(count):
        for other in range(one):
            squared[one, other] = squared[other, one] = sum(
                float(
                    np.square(
                        update_of(replies[one], broadcasts[one], name)
                        - update_of(replies[other], broadcasts[other], name)
                    ).sum()
                )
                for name in updated(replies[one], broadcasts[one])
                if name in replies[other].arrays
            )
    scores = np.sort(squared, axis=1)[:, : count - hostile - 2].sum(axis=1)
    return sorted(np.argsort(-scores, kind="stable")[:hostile].tolist())

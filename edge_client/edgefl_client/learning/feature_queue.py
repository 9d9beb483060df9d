"""Queues of features, first in first out: the device's own bank and the negatives of a round.

Guarantees: features have unit length; a queue holds features of pictures only, never more than its capacity, and what
came last stays longest. Source: MoCo (arXiv 1911.05722) Algorithm 1; FedCLF (arXiv 2208.11278) section III.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_protocol.bundle.contrast_plan import FEATURES
from edgefl_protocol.payload import Payload

SENT, RECEIVED = "features", "remote"  # arrays of a reply and of a broadcast
BANK = "bank"  # the device's own features in its state
SHORTEST = 1e-12  # as PyTorch's normalize

Features = NDArray[np.float32]  # (n, 128), rows of length 1


@dataclass(frozen=True, eq=False)
class FeatureQueue:
    """The newest features, the oldest first.

    Attributes:
        capacity: most rows.
        rows: (held, 128).
    """

    capacity: int
    rows: Features

    @classmethod
    def empty(cls, capacity: int) -> "FeatureQueue":
        """A queue without a feature."""
        return cls(capacity, np.zeros((0, FEATURES), np.float32))

    def pushed(self, features: Features) -> "FeatureQueue":
        """The queue after features came, the last row last; the oldest leave."""
        return FeatureQueue(self.capacity, np.concatenate([self.rows, features])[-self.capacity :])


def unit(features: NDArray[np.floating]) -> Features:
    """Rows of length 1."""
    wide = features.astype(np.float32)
    length: NDArray[np.float32] = np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), SHORTEST)
    return wide / length


def received(broadcast: Payload) -> Features | None:
    """The others' features Q_r as unit vectors; None where there are none.

    Args:
        broadcast: of a round; array `remote` (M, 128), float16.

    Raises:
        LearningError: it is no such array.
    """
    rows = broadcast.arrays.get(RECEIVED)
    if rows is None:
        return None
    if rows.ndim != 2 or rows.shape[1] != FEATURES or rows.dtype.kind != "f" or not len(rows):
        raise LearningError(
            f"the others' features have shape {rows.shape}, needed is (any, {FEATURES}): the federation runs another "
            "method or version",
            "other_features",
        )
    return unit(rows)


def drawn(rng: np.random.Generator, features: Features, count: int) -> Features:
    """B of the others' features, uniformly; with replacement only where there are fewer than B.

    Args:
        rng: of the purpose `remote`, one draw a step; the trainer's own draws.
        features: Q_r.
        count: B.
    """
    return features[rng.choice(len(features), size=count, replace=len(features) < count)]


def mean_similarity(features: Features) -> float:
    """Mean inner product of two different rows: near 1, all are one."""
    count = len(features)
    return float((np.square(features.sum(axis=0, dtype=np.float64)).sum() - count) / (count * (count - 1)))

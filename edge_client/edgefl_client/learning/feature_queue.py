"""Queues of features, first in first out: the device's own bank and the negatives of a round.

Guarantees: features have unit length; a queue holds features of pictures only, never more than its capacity, and what
came last stays longest. Source: MoCo (arXiv 1911.05722) Algorithm 1; FedCLF (arXiv 2208.11278) section III.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_client.learning.errors import LearningError
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules import feature_rows
from edgefl_protocol.rules.feature_rows import FEATURES, unit

Features = NDArray[np.float32]  # (n, 128), rows of length 1


@dataclass(frozen=True, eq=False)
class FeatureQueue:
    """The newest features, the oldest first."""

    capacity: int  # most rows
    rows: Features  # (held, 128)

    @classmethod
    def empty(cls, capacity: int) -> "FeatureQueue":
        """Make a queue without a feature."""
        return cls(capacity, np.zeros((0, FEATURES), np.float32))

    def pushed(self, features: Features) -> "FeatureQueue":
        """Append features, the last row last; the oldest leave."""
        return FeatureQueue(self.capacity, np.concatenate([self.rows, features])[-self.capacity :])


def received(broadcast: Payload) -> Features | None:
    """Read the others' features Q_r as unit vectors; None where there are none.

    Args:
        broadcast: of a round; array `remote` (M, 128), float16.

    Raises:
        LearningError: it is no such array.
    """
    try:
        rows = feature_rows.received(broadcast.arrays)
    except ValueError as error:
        raise LearningError(
            f"the others' features {error}: the federation runs another method or version", "other_features"
        ) from error
    return None if rows is None else unit(rows)

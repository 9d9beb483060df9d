"""How an epoch's rows are cut into batches where batch norm learns: no batch of fewer than four pictures is left over.

Batch norm divides by the spread of a batch: of one picture that is zero, and of two it leaves signs alone. So what is
left over at the end joins the batch before it. Source: docs/methods.md, FedCLF, batches.
"""

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row")

LEAST_BATCH: Final = 4  # pictures of a batch, where so many are asked for


def in_batches(rows: Iterable[Row], batch: int) -> Iterator[list[Row]]:
    """Collect rows as they come into batches of B; fewer than four at the end join the batch before.

    At most B + 4 rows are held back. Rows that make no whole batch are one batch, however few they are.
    """
    least, waiting = min(batch, LEAST_BATCH), list[Row]()
    for row in rows:
        waiting.append(row)
        if len(waiting) >= batch + least:
            yield waiting[:batch]
            waiting = waiting[batch:]
    if waiting:
        yield waiting


def cut(order: NDArray[np.int64], batch: int) -> list[NDArray[np.int64]]:
    """Cut the positions of an epoch into batches of B, see `in_batches`."""
    return [np.array(part, np.int64) for part in in_batches(order.tolist(), batch)]

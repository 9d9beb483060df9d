"""How an epoch's rows are cut into batches: plainly, or so that batch norm learns from four pictures at least.

Batch norm divides by the spread of a batch: of one picture that is zero, and of two it leaves signs alone. So what is
left over at the end joins the batch before it. Source: docs/methods.md, FedCLF, batches.
"""

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

Row = TypeVar("Row")

LEAST_BATCH: Final = 4  # pictures of a batch


def batches_of(order: NDArray[np.int64], batch: int) -> list[NDArray[np.int64]]:
    """Cut the positions of an epoch into batches of B; the last may be smaller, for no batch norm learns from it."""
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def in_batches(rows: Iterable[Row], batch: int) -> Iterator[list[Row]]:
    """Collect rows as they come into batches of B; fewer than four at the end join the batch before.

    At most B + 4 rows are held back. Rows that make no whole batch are one batch, however few they are.
    """
    waiting = list[Row]()
    for row in rows:
        waiting.append(row)
        if len(waiting) >= batch + LEAST_BATCH:
            yield waiting[:batch]
            waiting = waiting[batch:]
    if waiting:
        yield waiting


def cut(order: NDArray[np.int64], batch: int) -> list[NDArray[np.int64]]:
    """Cut the positions of an epoch into batches of B, see `in_batches`."""
    return [np.array(part, np.int64) for part in in_batches(order.tolist(), batch)]

"""Which features a round of momentum contrast takes as negatives, and when they show that an encoder has collapsed.

    bank Q_l       a site's own features: in every step the keys enter
    negatives      `remote`: Q_CL begins as the others' features Q_r; in every step B of these enter    FedCLF, eq. 3, 5
                   `both`: Q_CL begins as Q_l; in every step the keys enter, then B of Q_r              FedCLF, eq. 4
                   nobody else, or `local`: Q_CL is Q_l                                                 MoCo

All queues are first in, first out. Sources: MoCo (arXiv 1911.05722) Algorithm 1; FedCLF (arXiv 2208.11278) section III;
docs/methods.md, FedCLF.
"""

from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Negatives = Literal["remote", "both", "local"]
Rows = TypeVar("Rows")  # features, (n, 128): an array here, a tensor there

ALIKE: Final = 0.95  # mean similarity of different pictures' keys above which they say next to nothing of the picture


def shares(negatives: Negatives) -> bool:
    """Tell whether features travel."""
    return negatives != "local"


def keeps_local(negatives: Negatives) -> bool:
    """Tell whether local features are negatives beside the others'."""
    return negatives == "both"


def first_negatives(bank: Rows, others: Rows, *, keeps_local: bool) -> Rows:
    """Give what Q_CL holds when a round begins.

    Args:
        bank: Q_l, the oldest first.
        keeps_local: whether local features are negatives, too (`both`).
    """
    return bank if keeps_local else others


def most_negatives(queue: int, others: int, *, keeps_local: bool) -> int:
    """Give the capacity of Q_CL: K, or with others' features (rows of Q_r) alone as many as came."""
    return queue if keeps_local else others


def entering(keys: Rows, drawn: Rows, *, keeps_local: bool) -> tuple[Rows, ...]:
    """Give what enters Q_CL in a step, in this order, of the batch's keys and those that `draw_others` chose."""
    return (keys, drawn) if keeps_local else (drawn,)


def draw_others(rng: np.random.Generator, others: int, count: int) -> NDArray[np.int64]:
    """Draw B of the others' features, uniformly; with replacement only where there are fewer than B.

    Args:
        rng: one draw a step, all steps of a round in order.
        others: rows of Q_r.

    Returns:
        Positions in Q_r, (B,).
    """
    return rng.choice(others, size=count, replace=others < count)


def mean_similarity(total: NDArray[np.floating[Any]], count: int) -> float:
    """Compute the mean inner product of two different ones of n unit rows: (|total|² − n) / (n² − n), n at least 2."""
    square = float(np.square(total.astype(np.float64)).sum())
    return (square - count) / (count * (count - 1))


def collapse_warning(similarity: float, round_: int, rounds: int) -> str | None:
    """Say that features of different pictures are nearly the same, as a clause; None where nobody needs to hear it.

    No loss shows this: against negatives that stay as they are for a round, it also falls where all of a site's
    features move away from them together. It is asked half-way and at the end of a run.

    Args:
        round_: train round, from 1.
    """
    if similarity <= ALIKE or round_ not in (rounds // 2, rounds):
        return None
    return (
        f"features of different pictures are nearly the same in round {round_} (mean similarity {similarity:.2f}): the "
        "encoder tells little apart"
    )

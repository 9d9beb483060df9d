"""Every random draw of learning on the device; the same as the trainer's, so both visit the same pictures turned alike.

A generator depends on seed, site and purpose only (SHA-256 of them, joined by 0x1F, seeds numpy's PCG64), so learning
that was interrupted draws the same numbers again:

    "order", round, epoch     a permutation of the rows, or as many draws with every class equally likely
    "augment", round, epoch   for each batch in turn, one of the eight symmetries of the square for each picture
"""

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SYMMETRIES = 8


def generator(seed: int, site: str, *purpose: str | int) -> np.random.Generator:
    """The generator of one purpose.

    Args:
        seed: of the federation's task.
        site: name of this member.
        purpose: what is drawn, and in which round and epoch.
    """
    text = "\x1f".join(map(str, (seed, site, *purpose)))
    return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))


def epoch_order(
    rng: np.random.Generator, labels: NDArray[np.int64], balance: Literal["none", "class"]
) -> NDArray[np.int64]:
    """The rows that one epoch visits, in order.

    Args:
        rng: of the purpose `order`.
        labels: class index of each row, (n,).
        balance: `class` draws the classes equally often.

    Returns:
        Positions, (n,).
    """
    if balance == "none":
        return rng.permutation(len(labels))
    weights = 1.0 / np.bincount(labels)[labels]
    return rng.choice(len(labels), size=len(labels), p=weights / weights.sum())


def symmetries(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Which symmetry of the square each picture of a batch is given.

    Args:
        rng: of the purpose `augment`.
        count: B.

    Returns:
        Numbers 0 to 7, (B,): that many quarter turns modulo 4, mirrored from 4.
    """
    return rng.integers(SYMMETRIES, size=count)


def dihedral(images: NDArray[np.uint8], drawn: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Turn and mirror each picture: a skin lesion has no upright position.

    Args:
        images: square pictures, (B, S, S, 3).
        drawn: result of `symmetries`, (B,).

    Returns:
        The turned pictures, (B, S, S, 3).
    """
    views = images.copy()
    for symmetry in np.unique(drawn):
        chosen = np.flatnonzero(drawn == symmetry)
        turned = np.rot90(images[chosen], int(symmetry) % 4, axes=(1, 2))
        views[chosen] = turned[:, :, ::-1] if symmetry >= 4 else turned
    return views

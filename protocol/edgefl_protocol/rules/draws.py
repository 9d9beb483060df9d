"""Random draws of learning: the same seed, site and purpose give the same numbers on a server and on a device.

    order_rng     round, epoch   a permutation of the rows, or as many draws with every class equally likely
    augment_rng   round, epoch   for each batch in turn, one of the eight symmetries of the square for each picture
    bank_rng                     the order in which a site's pictures make its first bank of features
    remote_rng    round          for each step in turn, which of the others' features enter

What only one of the two draws (dropout, noise, views, a random choice of maps) names its purpose where it draws.

A generator depends on nothing else (SHA-256 of seed, site and purpose, joined by 0x1F, seeds numpy's PCG64). Learning
that was interrupted therefore draws the same numbers again. Source: docs/methods.md 1.6 and decisions/0028.
"""

import hashlib
from collections.abc import Iterator
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

SYMMETRIES: Final = 8  # of the square: number s is s mod 4 quarter turns, mirrored afterwards from 4 on

Balance = Literal["none", "class"]
Augment = Literal["none", "dihedral"]


def generator(seed: int, site: str, *purpose: str | int) -> np.random.Generator:
    """Make the generator of one purpose: what is drawn, and in which round and epoch."""
    text = "\x1f".join(map(str, (seed, site, *purpose)))
    return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))


def order_rng(seed: int, site: str, round_: int, epoch: int) -> np.random.Generator:
    """Make the generator of an epoch's `epoch_order`; rounds count from 1, epochs from 0."""
    return generator(seed, site, "order", round_, epoch)


def augment_rng(seed: int, site: str, round_: int, epoch: int) -> np.random.Generator:
    """Make the generator of an epoch's turns and crops, batch by batch."""
    return generator(seed, site, "augment", round_, epoch)


def bank_rng(seed: int, site: str) -> np.random.Generator:
    """Make the generator of a site's first bank of features: its order, then the views."""
    return generator(seed, site, "bank")


def remote_rng(seed: int, site: str, round_: int) -> np.random.Generator:
    """Make the generator of which of the others' features enter in a round, step by step."""
    return generator(seed, site, "remote", round_)


def epoch_order(rng: np.random.Generator, labels: NDArray[np.int64], balance: Balance) -> NDArray[np.int64]:
    """Draw the rows that one epoch visits, in order.

    Args:
        rng: generator of this epoch alone, from `order_rng`.
        labels: class index of each row, (n,).
        balance: "none" visits every row once; "class" draws n rows, every class equally often in the mean.

    Returns:
        Positions, (n,).
    """
    if balance == "none":
        return rng.permutation(len(labels))
    weights = 1.0 / np.bincount(labels)[labels]
    return rng.choice(len(labels), size=len(labels), p=weights / weights.sum())


def symmetries(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Draw a symmetry of the square for each picture of a batch, (count,), from 0 to 7; see `SYMMETRIES`."""
    return rng.integers(SYMMETRIES, size=count)


def turned_alike(drawn: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int, bool]]:
    """Group the pictures of a batch by the symmetry drawn for each, (B,).

    Yields positions in the batch, quarter turns (counter-clockwise), and whether left and right are swapped afterwards.
    """
    for symmetry in np.unique(drawn).tolist():
        yield np.flatnonzero(drawn == symmetry), symmetry % 4, symmetry >= 4


def dihedral(images: NDArray[np.uint8], drawn: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Turn and mirror each square picture (B, S, S, 3) as drawn: a skin lesion has no upright position."""
    views = images.copy()
    for chosen, turns, mirrored in turned_alike(drawn):
        turned = np.rot90(images[chosen], turns, axes=(1, 2))
        views[chosen] = turned[:, :, ::-1] if mirrored else turned
    return views

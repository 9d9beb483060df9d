"""Features of pictures as they travel: rows of 128 numbers, of length 1, in half precision.

float16 halves the bytes and moves the length of a row by at most 0.0005. A similarity of two rows moves by less than
0.001. Source: FedCLF (arXiv 2208.11278) section III; docs/methods.md, feature exchange.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

FEATURES: Final = 128  # width of a feature
SENT: Final = "features"  # array of a reply: the bank Q_l of a site, (n, 128) float16
RECEIVED: Final = "remote"  # array of a broadcast: the others' features Q_r, (M, 128) float16
BANK: Final = "bank"  # array of a site's state: Q_l in float32, the oldest first
MOST_ROWS: Final = 65_536  # of a bank, and of what a site receives: MoCo's own queue, 16 MiB in half precision
NORM_TOLERANCE: Final = 0.01  # of a row's length
SHORTEST: Final = 1e-12  # a shorter row is divided by this instead of its length, as PyTorch's `normalize` has it


def unit(features: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """Bring rows to length 1."""
    wide = features.astype(np.float32)
    length: NDArray[np.float32] = np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), SHORTEST)
    return wide / length


def are_features(rows: NDArray[Any]) -> bool:
    """Tell whether an array holds features of any length: at least one row of 128 floating-point numbers."""
    return rows.ndim == 2 and rows.shape[1] == FEATURES and rows.dtype.kind == "f" and len(rows) > 0


def have_unit_length(rows: NDArray[np.floating[Any]]) -> bool:
    """Tell whether every row of an array (n, 128) is finite and of length 1, within the tolerance."""
    return bool((np.abs(_lengths(rows) - 1) <= NORM_TOLERANCE).all())


def sent(rows: NDArray[Any]) -> dict[str, NDArray[np.float16]]:
    """Give the array of a reply."""
    return {SENT: rows.astype(np.float16)}


def made_in_round(bank: NDArray[Any], pictures: int, epochs: int) -> NDArray[Any]:
    """Give the rows of a bank that a train round made, which are those that its reply holds (FedCLF, III-A).

    A bank that pictures fill slowly also holds rows of rounds before. Their age would tell a negative from the picture
    being learned.

    Args:
        bank: Q_l after the round, the oldest first.
        pictures: of the site, each of which gave a row in every epoch.
    """
    return bank[-pictures * epochs :]


def received(broadcast: Mapping[str, NDArray[Any]]) -> NDArray[np.floating[Any]] | None:
    """Give the others' features Q_r as they came, for `unit`; None where there is nobody else.

    Raises:
        ValueError: the array holds no features; the text is the end of the sentence "the others' features".
    """
    rows = broadcast.get(RECEIVED)
    if rows is not None and not are_features(rows):
        raise ValueError(f"are of type {rows.dtype} and shape {rows.shape}, but must be float16 (any, {FEATURES})")
    return rows


def check_bank(rows: NDArray[Any], most: int) -> None:
    """Refuse what cannot be a site's bank as it travels, of at most `most` (K) rows.

    A `ValueError` whose text says what was sent, as the end of the sentence "site a sent".
    """
    if rows.dtype != np.float16 or rows.ndim != 2 or rows.shape[1] != FEATURES:
        raise ValueError(f"features of type {rows.dtype} and shape {rows.shape}; they must be float16 (n, {FEATURES})")
    if not 1 <= len(rows) <= most:
        raise ValueError(f"{len(rows)} features; allowed: 1 to {most}")
    lengths = _lengths(rows)
    if not np.isfinite(lengths).all():
        raise ValueError("a feature that is not finite")
    worst = lengths[np.abs(lengths - 1).argmax()]
    if abs(worst - 1) > NORM_TOLERANCE:
        raise ValueError(f"a feature of length {worst:.3g}; features have length 1")


def first_order(rng: np.random.Generator, pictures: int) -> NDArray[np.int64]:
    """Draw the order in which a site's pictures make its bank where it has none; the first K of them do.

    Args:
        pictures: of the site, n.

    Returns:
        Positions, (n,). Whoever finds that some give no feature goes on with the next.
    """
    return rng.permutation(pictures)


def order_by_content(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Order rows by a hash of their bytes: the order of a set of features then tells nothing of where each came from.

    Returns:
        Positions in that order, (n,).
    """
    keys = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def _lengths(rows: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=1)
    return found

"""Columns of a table that say what share of its model a site sends in a round: of what it learned, and of all of it.

A column is there where a run tells that share: one from before it was kept does not. Source: docs/methods.md 8.4, 11.4.
"""

from collections.abc import Sequence
from typing import Protocol

UNKNOWN = "–"
FULL_MODEL = "full_model_bytes"  # of a site: its tensors and the network, frozen or learned
SIZES = {"share_of_models": "model_bytes", "share_of_full_models": FULL_MODEL}
"""Key of a share in ``summary.json`` → that of the size of one model which it is a share of."""
COLUMNS = {
    "share_of_models": (
        "of what learns",
        "`of what learns` is up / round as a share of what it would be if each site sent all that it learns",
    ),
    "share_of_full_models": (
        "of full model",
        "`of full model` is up / round as a share of full models: all that learns, and the network, frozen or not",
    ),
}
"""Key in ``summary.json`` → head of the column, and what a caption says of it."""


class Sends(Protocol):
    """A row of a table, as far as these columns go; None where a share is not known."""

    @property
    def share_of_models(self) -> float | None:
        """Of what the sites learned."""

    @property
    def share_of_full_models(self) -> float | None:
        """Of that and the network."""


def share_columns(rows: Sequence[Sends]) -> dict[str, list[str]]:
    """Return the head of each column that has a share, with a cell for each row."""
    return {COLUMNS[key][0]: [share_text(getattr(row, key)) for row in rows] for key in _told(rows)}


def share_words(rows: Sequence[Sends]) -> list[str]:
    """Return clauses of a caption that say what the columns are."""
    return [COLUMNS[key][1] for key in _told(rows)]


def share_text(share: float | None) -> str:
    """Write a share in per cent, a small one to two digits."""
    if share is None:
        return UNKNOWN
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _told(rows: Sequence[Sends]) -> list[str]:
    return [key for key in COLUMNS if any(getattr(row, key) is not None for row in rows)]

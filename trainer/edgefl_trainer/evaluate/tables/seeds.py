"""What a table says of seeds: a column and a warning where its rows have different ones, and what ± is over in each.

A seed draws other `tune` rows, another order and other weights: a mean over other seeds compares other runs.
Source: docs/methods.md 8.4.
"""

from collections.abc import Sequence
from typing import Protocol

from edgefl_protocol.sentences import joined_by_and, listed

HEAD = "seeds"  # of the column
UNKNOWN = "–"


class Seeded(Protocol):
    """A row of a table, as far as its seeds go; none where it has no run, or they were not recorded."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of its runs, in order."""


def seeds_column(rows: Sequence[Seeded]) -> dict[str, list[str]]:
    """Return the head of the column with a cell for each row; nothing where all that have seeds have the same."""
    if _alike(rows):
        return {}
    return {HEAD: [", ".join(map(str, row.seeds)) or UNKNOWN for row in rows]}


def unlike_seeds(rows: Sequence[Seeded], names: Sequence[str]) -> list[str]:
    """Return a clause where rows have different seeds: which, and in which rows."""
    if _alike(rows):
        return []
    having: dict[tuple[int, ...], list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        if row.seeds:
            having.setdefault(row.seeds, []).append(name)
    told = [f"{named_seeds(seeds)} of {listed(some)}" for seeds, some in sorted(having.items())]
    return [f"NOT ALL WITH THE SAME SEEDS: {'; '.join(told)}"]


def seeds_words(rows: Sequence[Seeded]) -> list[str]:
    """Return a clause with the seeds of all rows; nothing where they differ, which `unlike_seeds` tells."""
    if not _alike(rows):
        return []
    seeds = max((row.seeds for row in rows), default=())
    return [f"Seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds)) or 'not recorded'}"]


def spread_over(kinds: Sequence[str], names: Sequence[str]) -> str:
    """Say over what a spread runs, `seeds` or `sites`: one word where all rows have it alike, else row by row."""
    having: dict[str, list[str]] = {}
    for kind, name in zip(kinds, names, strict=True):
        having.setdefault(kind, []).append(name)
    if len(having) == 1:
        return next(iter(having))
    return ", ".join(f"over {kind} in {listed(some)}" for kind, some in sorted(having.items())).removeprefix("over ")


def _alike(rows: Sequence[Seeded]) -> bool:
    return len({row.seeds for row in rows if row.seeds}) < 2


def named_seeds(seeds: Sequence[int]) -> str:
    """Name seeds in a sentence: `seed 0`, `seeds 0 and 2`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {joined_by_and([str(seed) for seed in seeds])}"

"""Who gets which lesion: test, tune, limits, iid sites and images of no site.

Guarantees: every choice is by lesion, a pure function of the seed, the purpose and the lesions' names (never of row
order or of a random generator's version), stratified by class. Which lesions are held out as `test` depends on no seed:
a network learned in one run never saw the test lesions of another.
Source: docs/design.md 5 (Rows), docs/methods.md 1.6 and 7.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.rows import SIDES, UNDEALT, Row, SourceRows

TEST_SHARE = 0.25  # docs/methods.md 1.6: "per client 75/25 split"
TEST_SEED = 0  # of no run: all runs hold the same lesions out
TUNE_SHARE = 0.15  # docs/design.md 5: of each site's training lesions


@dataclass(frozen=True, slots=True)
class Shares:
    """How the lesions of a site are dealt where their source names no split."""

    test: float = TEST_SHARE  # share of all lesions that is held out
    tune: float = TUNE_SHARE  # share of the others that selects, stops and calibrates


USUAL = Shares()


def lesion_order(classes_by_lesion: Mapping[str, str], purpose: str, seed: int) -> list[str]:
    """Order lesions so that every prefix holds about an equal share of each class.

    Inside a class the order is that of SHA-256(seed, purpose, lesion), so that choices for different purposes are
    independent; lesion i of the n of a class stands at (i + ½)/n, and the classes are merged by that position.
    """
    strata: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for lesion, label in classes_by_lesion.items():
        rank = hashlib.sha256(f"{seed}\0{purpose}\0{lesion}".encode()).hexdigest()
        strata[label].append((rank, lesion))
    placed = [
        ((i + 0.5) / len(members), rank, lesion)
        for members in strata.values()
        for i, (rank, lesion) in enumerate(sorted(members))
    ]
    return [lesion for _, _, lesion in sorted(placed)]


def choose_share(classes_by_lesion: Mapping[str, str], share: float, purpose: str, seed: int) -> set[str]:
    """Choose `round(share · n)` of the lesions, stratified by class; never the only lesions there are."""
    order = lesion_order(classes_by_lesion, purpose, seed)
    return set(order[: min(round(share * len(order)), max(len(order) - 1, 0))])


def choose_tune(site: str, learning: Sequence[Row], seed: int, share: float = TUNE_SHARE) -> set[str]:
    """Choose a site's tune lesions: a share of those it learns from, stratified by class, each site by itself."""
    class_of = {row.lesion: row.stratum for row in sorted(learning, key=lambda row: row.image, reverse=True)}
    return choose_share(class_of, share, f"tune:{site}", seed)


def choose_limit(lesions: Sequence[str], labels: Sequence[str], limit: int, purpose: str, seed: int) -> set[str]:
    """Choose lesions whose images together are at most `limit`, stratified by class.

    They are filled up greedily: one that no longer fits is passed over. `lesions` and `labels` are those of each image.
    """
    sizes: dict[str, int] = defaultdict(int)
    classes: dict[str, str] = {}
    for lesion, label in zip(lesions, labels, strict=True):
        sizes[lesion] += 1
        classes.setdefault(lesion, label)
    chosen: set[str] = set()
    total = 0
    for lesion in lesion_order(classes, purpose, seed):
        if total + sizes[lesion] <= limit:
            chosen.add(lesion)
            total += sizes[lesion]
    return chosen


def deal_test(rows: Sequence[Row], share: float = TEST_SHARE) -> list[Row]:
    """Give rows whose source names no split `train` or `test`, a share of each site's lesions, in every run alike.

    A lesion that stands in two sites is dealt once, with the first of them in name order; one that the source has put
    on a side, by other rows, stays there. The lesions of a smaller share are among those of a larger one. Rows keep
    their order; those without label become `unlabelled`.
    """
    given = _sides_given(rows)
    site_of: dict[str, str] = {}
    class_of: dict[str, str] = {}
    undealt = (row for row in rows if row.split == UNDEALT and row.label is not None and row.lesion not in given)
    for row in sorted(undealt, key=_row_key):
        site_of.setdefault(row.lesion, row.site or "")
        class_of.setdefault(row.lesion, row.stratum)
    by_site: dict[str, dict[str, str]] = defaultdict(dict)
    for lesion, site in site_of.items():
        by_site[site][lesion] = class_of[lesion]
    test = {lesion for members in by_site.values() for lesion in choose_share(members, share, "test", TEST_SEED)}

    def dealt(row: Row) -> Row:
        if row.split != UNDEALT:
            return row
        if row.label is None:
            return replace(row, split="unlabelled")
        return replace(row, split=given.get(row.lesion, "test" if row.lesion in test else "train"))

    return [dealt(row) for row in rows]


def _sides_given(rows: Sequence[Row]) -> dict[str, str]:
    """The split that the source names for a lesion; of several the last of `SIDES`, so that less is learned twice."""
    return {row.lesion: side for side in SIDES for row in rows if row.split == side}


def tested(table: SourceRows) -> SourceRows:
    """Make all labelled rows of a table without splits `test`; one with questions, or a split, stays as it is."""
    labelled = [row for row in table.rows if row.label is not None]
    if table.asks or any(row.split != UNDEALT for row in labelled):
        return table
    return replace(table, rows=tuple(row if row.label is None else replace(row, split="test") for row in table.rows))


def deal_iid(rows: Sequence[Row], sites: int, seed: int) -> list[Row]:
    """Deal all rows to `sites` new sites `iid-1` … by lesion, stratified by class and split.

    A `DataError` where there are fewer lesions than sites.
    """
    strata = {row.lesion: f"{row.split}\0{row.stratum}" for row in sorted(rows, key=_row_key, reverse=True)}
    if len(strata) < sites:
        what = "lesion" if rows[0].question is None else "picture"
        raise DataError(
            f"@split=iid:{sites} asks for {counted(sites, 'site')}, but the data holds only "
            f"{counted(len(strata), what)}: write @split=iid:{len(strata)} or less."
        )
    width = len(str(sites))
    order = sorted(lesion_order(strata, "iid", seed), key=lambda lesion: strata[lesion])
    site_of = {lesion: f"iid-{i % sites + 1:0{width}d}" for i, lesion in enumerate(order)}
    return [replace(row, site=site_of[row.lesion]) for row in rows]


def spread(lesions: Sequence[str], sizes: Mapping[str, int], seed: int) -> list[str | None]:
    """Deal images of no site to the sites in proportion to their size, whole lesions at a time.

    `sizes` are numbers of training images; where no site has any, the answer is None for all.
    """
    if not sizes:
        return [None] * len(lesions)
    counts: dict[str, int] = defaultdict(int)
    for lesion in lesions:
        counts[lesion] += 1
    total = sum(sizes.values())
    open_places = {site: len(lesions) * sizes[site] / total for site in sorted(sizes)}
    site_of: dict[str, str] = {}
    for lesion in lesion_order(dict.fromkeys(counts, ""), "spread", seed):
        site = max(open_places, key=lambda name: open_places[name])
        site_of[lesion] = site
        open_places[site] -= counts[lesion]
    return [site_of[lesion] for lesion in lesions]


def _row_key(row: Row) -> tuple[str, str]:
    return (row.site or "", row.image)

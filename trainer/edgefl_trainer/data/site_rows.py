"""The rows of each site: who learns from, tunes on and reports which, and the digest that says so.

Guarantees: no lesion of a site stands in two of its train, tune, val and test rows unless the source's own split says
so; every choice is by lesion and seed; the rows of a site do not depend on which other sites are selected.
Source: docs/design.md 5 (Rows).
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.dealing import choose_limit
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.partitions.partition import DealtImage, content_digest
from edgefl_trainer.data.questions import OTHER_ANSWER
from edgefl_trainer.data.rows import Row

Indices = NDArray[np.int64]  # row numbers of a Federation, ascending
ChooseTune = Callable[[str, Sequence[Row]], set[str]]  # a site's name and training rows → its tune lesions

ROW_KINDS = ("train", "tune", "val", "test", "unlabelled")
REPORTED = ("val", "test")


@dataclass(frozen=True, slots=True)
class SiteRows:
    """Row numbers of one site."""

    name: str  # the site
    train: Indices  # rows that learn
    tune: Indices  # 15 % of the training lesions: select, stop, calibrate
    val: Indices  # rows that only report
    test: Indices  # rows that only report; used instead of `val` where there are any
    unlabelled: Indices  # rows for self-supervised learning only

    def rows(self, kind: str) -> Indices:
        """Return the rows of one of `ROW_KINDS`."""
        found: Indices = getattr(self, kind)
        return found


def check_names(rows: Sequence[Row]) -> None:
    """Refuse, by a `DataError`, rows of one site that name an image twice."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if row.site is not None:
            if (row.site, row.image) in seen:
                raise DataError(f"Site {row.site} has the image {row.image!r} twice; name each data source once.")
            seen.add((row.site, row.image))


def deal_sites(
    rows: Sequence[Row],
    labels: NDArray[np.int64],
    *,
    seed: int,
    keep_unlabelled: bool,
    limit: int | None,
    tune: ChooseTune,
) -> dict[str, SiteRows]:
    """Deal the rows that have a site; a `DataError` where a site has none of the chosen classes, or a row twice.

    Rows without a label are left out; a question whose answer is not known is judged, but never learned from.
    """
    check_names(rows)
    groups: dict[str, dict[str, list[int]]] = {}
    for i, row in enumerate(rows):
        if row.site is None:
            continue
        group = groups.setdefault(row.site, defaultdict(list))
        if row.split == "unlabelled":
            if keep_unlabelled:
                group["unlabelled"].append(i)
        elif labels[i] >= 0 or (labels[i] == OTHER_ANSWER and row.split in REPORTED):
            group[row.split].append(i)
    for name in sorted(groups):
        if not any(groups[name].values()):
            raise DataError(f"Site {name} has no image of the chosen classes; leave the site out or choose others.")
    return {name: _deal_site(name, groups[name], rows, seed, limit, tune) for name in sorted(groups)}


def _deal_site(
    name: str,
    group: Mapping[str, list[int]],
    rows: Sequence[Row],
    seed: int,
    limit: int | None,
    choose_tune_lesions: ChooseTune,
) -> SiteRows:
    learning = sorted(group.get("train", []), key=lambda i: rows[i].image)
    tune = choose_tune_lesions(name, [rows[i] for i in learning])
    train = [i for i in learning if rows[i].lesion not in tune]
    if limit is not None:
        class_of = {rows[i].lesion: rows[i].stratum for i in reversed(learning)}
        lesions = [rows[i].lesion for i in train]
        kept = choose_limit(lesions, [class_of[lesion] for lesion in lesions], limit, f"limit:{name}", seed)
        train = [i for i in train if rows[i].lesion in kept]
    held_back = tune | {rows[i].lesion for kind in REPORTED for i in group.get(kind, [])}
    return SiteRows(
        name=name,
        train=_indices(train),
        tune=_indices([i for i in learning if rows[i].lesion in tune]),
        val=_indices(group.get("val", [])),
        test=_indices(group.get("test", [])),
        unlabelled=_indices([i for i in group.get("unlabelled", []) if rows[i].lesion not in held_back]),
    )


def _indices(rows: Sequence[int]) -> Indices:
    return np.array(sorted(rows), dtype=np.int64)


def partition_digest(
    sites: Mapping[str, SiteRows],
    rows: Sequence[Row],
    classes: Sequence[str],
    labels: NDArray[np.int64],
    held_out: Sequence[str],
) -> str:
    """Compute the digest over site → rows → images and labels, or questions and answers, and the held-out sites."""
    asked = [(f"{row.image}\n{row.source}\n{row.question.text}", row.label) for row in rows if row.question is not None]
    if asked:
        return _digest(sites, asked, held_out)
    return pictures_digest(sites, [row.image for row in rows], classes, labels, held_out)


def pictures_digest(
    sites: Mapping[str, SiteRows],
    names: Sequence[str],
    classes: Sequence[str],
    labels: NDArray[np.int64],
    held_out: Sequence[str],
) -> str:
    """Compute the digest over site → rows → image names and labels, int64 (n,), and the held-out sites."""
    told = [classes[label] if label >= 0 else None for label in labels]
    return _digest(sites, list(zip(names, told, strict=True)), held_out)


def _digest(sites: Mapping[str, SiteRows], entries: Sequence[DealtImage], held_out: Sequence[str]) -> str:
    content = {
        name: {kind: [entries[i] for i in site.rows(kind)] for kind in ROW_KINDS} for name, site in sites.items()
    }
    return content_digest(content, held_out)

"""The pictures of an audit: whom an attacker looks for, among whom, and what the public is.

    looked for    training pictures of a site, one of each lesion
    other view    the same picture, cut, turned and lit anew; or another photo of the same lesion
    rivals        199 pictures of other lesions of the same site, of which no photo was learned from
    public        training pictures of the other sites, which an attacker may have

Rivals are of the same site: pictures of another camera would be told apart by their colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from jaxtyping import UInt8

from edgefl_trainer.augment import random_crops
from edgefl_trainer.contract import Examples, Site
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.sites import report_rows

CANDIDATES: Final = 200
LEAST_QUERIES: Final = 20  # below which an interval says nothing
SMALLEST_CUT: Final = 0.8  # of a picture's area
LIGHT: Final = 0.1  # largest change of each colour, as a share
View = Literal["same picture, changed", "same lesion, another photo"]
VIEWS: Final[tuple[View, ...]] = ("same picture, changed", "same lesion, another photo")


@dataclass(frozen=True)
class Queries:
    """Pictures that are looked for at one site, and candidates."""

    pictures: UInt8[np.ndarray, "n px px 3"]  # that made a payload
    others: UInt8[np.ndarray, "n px px 3"]  # another view of each, among the candidates
    labels: np.ndarray  # (n,)
    lesions: tuple[str, ...]
    rivals: UInt8[np.ndarray, "m px px 3"]
    rival_labels: np.ndarray  # (m,)


@dataclass(frozen=True)
class Public:
    """Pictures of other sites."""

    pictures: UInt8[np.ndarray, "n px px 3"]
    labels: np.ndarray  # (n,)


def learned_rows(site: Site, *, needs_labels: bool) -> Examples:
    """Return the rows that a site learns from."""
    return site.train if needs_labels else site.unlabelled


def queries_of(
    federation: Federation, site: Site, learned: Examples, view: View, most: int, seed: int
) -> Queries | str:
    """Choose the pictures of a site that are looked for; where there are too few, a clause that says so."""
    rng = np.random.default_rng([seed, VIEWS.index(view)])
    chosen = _chosen(federation, learned, view, most, rng)
    rivals = _one_of_each_lesion(federation, _never_learned(federation, site, learned), rng)[: CANDIDATES - 1]
    if len(chosen) < LEAST_QUERIES:
        kind = "pictures" if view == VIEWS[0] else "lesions with two photos"
        return f"{site.name} has {len(chosen)} {kind} to look for, and {LEAST_QUERIES} are needed"
    if len(rivals) < CANDIDATES - 1:
        return (
            f"{site.name} has {len(rivals)} lesions that it did not learn from, and "
            f"{CANDIDATES - 1} candidates beside the right one are needed"
        )
    rows, partners = np.array(chosen).T
    pictures, others = (federation.images[federation.places(one)] for one in (rows, partners))
    wrong = federation.images[federation.places(rivals)]
    if view == VIEWS[0]:
        others, wrong = changed(others, rng), changed(wrong, rng)
    lesions = tuple(federation.lesions[row] for row in rows)
    return Queries(pictures, others, federation.labels[rows], lesions, wrong, federation.labels[rivals])


def public_of(federation: Federation, sites: Sequence[Site], most: int, seed: int) -> Public:
    """Take training pictures of some sites, equally many of each where they have them."""
    rng, parts = np.random.default_rng(seed), []
    for site in sites:
        rows = site.train.rows if len(site.train) else site.unlabelled.rows
        parts.append(rng.permutation(rows)[: -(-most // max(1, len(sites)))])
    rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return Public(federation.images[federation.places(rows)], federation.labels[rows])


def changed(pictures: UInt8[np.ndarray, "n px px 3"], rng: np.random.Generator) -> UInt8[np.ndarray, "n px px 3"]:
    """Cut each picture to at least 80 % of its area, turn or mirror it, and change each colour by up to 10 %."""
    cut = random_crops(torch.from_numpy(np.array(pictures)), rng, SMALLEST_CUT).numpy()
    light = rng.uniform(1 - LIGHT, 1 + LIGHT, (len(pictures), 1, 1, 3))
    return np.clip(np.rint(cut * light), 0, 255).astype(np.uint8)


def orientations(pictures: UInt8[np.ndarray, "n px px 3"]) -> UInt8[np.ndarray, "n eight px px 3"]:
    """Turn and mirror each picture in all eight ways."""
    turned = [np.rot90(pictures, turns, axes=(1, 2)) for turns in range(4)]
    return np.stack([*turned, *(one[:, :, ::-1] for one in turned)], axis=1)


def _never_learned(federation: Federation, site: Site, learned: Examples) -> np.ndarray:
    """Rows whose lesion the site did not learn from: a source's own split may put photos of one lesion on both sides.

    Another photo of the lesion that is looked for would be a right answer that counts as a wrong one.
    """
    rows = np.concatenate([report_rows(federation, site.name).rows, site.tune.rows])
    known = {federation.lesions[row] for row in learned.rows}
    return np.array([row for row in rows if federation.lesions[row] not in known], dtype=np.int64)


def _chosen(
    federation: Federation, learned: Examples, view: View, most: int, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Pairs of a row and the row that shows it otherwise: itself, or another row of its lesion."""
    by_lesion: dict[str, list[int]] = {}
    for row in rng.permutation(learned.rows).tolist():
        by_lesion.setdefault(federation.lesions[row], []).append(row)
    if view == VIEWS[0]:
        return [(rows[0], rows[0]) for rows in by_lesion.values()][:most]
    return [(rows[0], rows[1]) for rows in by_lesion.values() if len(rows) > 1][:most]


def _one_of_each_lesion(federation: Federation, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    kept = {federation.lesions[row]: row for row in rng.permutation(rows).tolist()}
    return np.array(list(kept.values()), dtype=np.int64)

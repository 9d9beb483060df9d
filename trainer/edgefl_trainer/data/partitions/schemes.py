"""Partition schemes: which site gets which lesion, drawn from a class mix that the scheme promises.

Guarantees: every lesion goes to exactly one site, 0 … C − 1; the result is a function of seed, classes, lesion names
and image counts, never of the order of rows; every draw comes from numpy's generator under a seed of its own purpose
(the saved partition, not the generator, is what runs share).
Source: docs/methods.md 8.1 (pathological, the rule of SGPT) and 8.2 (Dirichlet by class as in NIID-Bench, by site as
in FedDyn). Counts are images, cuts fall between lesions.
Differs from them: a site of the pathological scheme holds at least one lesion of each of its classes; the redraw loops
have a limit; rounding leftovers go to the last holder.
"""

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.sentences import counted
from edgefl_trainer.data.dealing import lesion_order
from edgefl_trainer.data.errors import PartitionError

TRIES = 200  # draws of the class-wise Dirichlet before it is called impossible
LEAST_IMAGES = 10  # of a site under the class-wise Dirichlet: docs/methods.md 8.2, Flower's min size
SHARE_RANGE = (0.4, 0.6)  # docs/methods.md 8.1: shares of a class among its holders, before they are normalised


@dataclass(frozen=True, slots=True)
class Lesion:
    """What a scheme deals: one lesion with its class and number of images."""

    name: str
    label: str
    images: int


def dirichlet_by_class(
    lesions: Sequence[Lesion], sites: int, alpha: float, seed: int, least: int | None = None
) -> dict[str, int]:
    """Cut each class by shares p ~ Dir(alpha · 1) over sites; sites that have their even share of all get no more.

    Args:
        alpha: Concentration; small means that few sites hold a class.
        least: Images the smallest site must have; None: 10, or half an even share where that is less.

    Raises:
        PartitionError: 200 draws left a site with fewer images.
    """
    total = sum(lesion.images for lesion in lesions)
    wanted = max(1, min(LEAST_IMAGES, total // (2 * sites))) if least is None else least
    for attempt in range(TRIES):
        rng = _rng(seed, "dirichlet by class", attempt)
        held = np.zeros(sites, dtype=np.int64)
        site_of: dict[str, int] = {}
        for ordered in _by_class(lesions, f"dirichlet {attempt}", seed).values():
            unfilled = held < total / sites  # dropping entries of a Dirichlet draw and renormalising leaves a Dirichlet
            shares = np.zeros(sites)
            shares[unfilled] = rng.dirichlet(np.full(int(unfilled.sum()), alpha))
            chosen = cut(ordered, shares)
            site_of.update(zip((lesion.name for lesion in ordered), chosen.tolist(), strict=True))
            np.add.at(held, chosen, [lesion.images for lesion in ordered])
        if held.min() >= wanted:
            return site_of
    raise PartitionError(
        f"{TRIES} draws with alpha {alpha:g} each left a site with fewer than {counted(wanted, 'image')}: give a "
        f"larger --alpha, or lower --sites ({sites})."
    )


def dirichlet_by_site(lesions: Sequence[Lesion], sites: int, alpha: float, seed: int) -> dict[str, int]:
    """Deal to sites of equal size; each draws lesions by its own class prior q ~ Dir(alpha · 1) until it is full.

    A class that is used up leaves a site's prior, which is renormalised over the rest; where nothing of it is left, the
    remaining lesions decide. Where every lesion has one image, sizes differ by at most 1.

    Args:
        alpha: Concentration; small means that a site holds few classes.

    Raises:
        PartitionError: Lesions of several images left a site without any.
    """
    rng = _rng(seed, "dirichlet by site")
    waiting = [deque(ordered) for ordered in _by_class(lesions, "dirichlet by site", seed).values()]
    left = np.array([sum(lesion.images for lesion in queue) for queue in waiting], dtype=np.float64)  # (K,) images
    priors = rng.dirichlet(np.full(len(waiting), alpha), size=sites)  # (C, K)
    total = int(left.sum())
    room = [total * (j + 1) // sites - total * j // sites for j in range(sites)]
    unfilled = [j for j in range(sites) if room[j] > 0]
    site_of: dict[str, int] = {}
    while len(site_of) < len(lesions):
        place = int(rng.integers(len(unfilled)))
        site = unfilled[place]
        mass = np.cumsum(priors[site] * (left > 0))
        if mass[-1] <= 0:
            mass = np.cumsum(left)
        k = int(np.searchsorted(mass, rng.random() * mass[-1], side="right"))
        lesion = waiting[k].popleft()
        site_of[lesion.name] = site
        left[k] -= lesion.images
        room[site] -= lesion.images
        if room[site] <= 0:
            unfilled.pop(place)
    if len(set(site_of.values())) < sites:
        raise PartitionError(f"The lesions are too few, or have too many images, for {sites} sites: lower --sites.")
    return site_of


def pathological(lesions: Sequence[Lesion], sites: int, classes_per_site: int, seed: int) -> dict[str, int]:
    """Deal `classes_per_site` classes to each site, each class to equally many; shares U(0.4, 0.6), normalised.

    Sites draw their classes one by one, evenly among the classes with most places left.

    Args:
        classes_per_site: n; n · C must be a multiple of the number of classes K.

    Raises:
        PartitionError: The numbers do not fit one another, or a class has fewer lesions than places.
    """
    by_class = _by_class(lesions, "pathological", seed)
    labels = list(by_class)
    _check_places(len(labels), sites, classes_per_site)
    rng = _rng(seed, "pathological")
    holders = _draw_holders(len(labels), sites, classes_per_site, rng)
    site_of: dict[str, int] = {}
    for label, held_by in zip(labels, holders, strict=True):
        ordered, places = by_class[label], len(held_by)
        if len(ordered) < places:
            raise PartitionError(
                f"Class {label} has {counted(len(ordered), 'lesion')} for the {places} sites that would hold it: "
                "lower --sites or --classes-per-site."
            )
        shares = rng.uniform(*SHARE_RANGE, size=places)
        rest = cut(ordered[places:], shares / shares.sum()).tolist()
        chosen = [held_by[i] for i in [*range(places), *rest]]  # the first lesions: one for each holder
        site_of.update(zip((lesion.name for lesion in ordered), chosen, strict=True))
    return site_of


def follow(lesions: Sequence[Lesion], counts: Mapping[str, Sequence[int]], purpose: str, seed: int) -> dict[str, int]:
    """Deal the lesions of a split that only reports, by the shares of each class that the sites learn from.

    `counts` are the training images of each class and site: a site without any gets none here, and a class that nobody
    learns from follows the sites' sizes. `purpose` keeps the splits independent.
    """
    sizes = np.sum(np.array(list(counts.values()), dtype=np.int64), axis=0)
    site_of: dict[str, int] = {}
    for label, ordered in _by_class(lesions, purpose, seed).items():
        chosen = cut(ordered, np.asarray(counts.get(label, sizes), dtype=np.int64))
        site_of.update(zip((lesion.name for lesion in ordered), chosen.tolist(), strict=True))
    return site_of


def cut(ordered: Sequence[Lesion], shares: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Deal the lesions of a class in order, cut by cumulative floors of the sites' shares of their images.

    Leftovers go to the last holder; a site whose share is 0 gets none.

    Args:
        shares: (C,) shares that sum to 1, or whole numbers in proportion to them (then no rounding enters).
    """
    ends = np.cumsum([lesion.images for lesion in ordered], dtype=np.int64)
    if not len(ends):
        return ends
    total = int(ends[-1])
    running = np.cumsum(shares)
    whole = np.issubdtype(running.dtype, np.integer)
    cuts = running * total // running[-1] if whole else np.floor(running * total).astype(np.int64)
    holders = np.flatnonzero(np.asarray(shares) > 0)
    cuts = cuts[holders]
    cuts[-1] = total
    return holders[np.searchsorted(cuts, ends, side="left")].astype(np.int64)


def _check_places(classes: int, sites: int, classes_per_site: int) -> None:
    if classes_per_site > classes:
        raise PartitionError(
            f"{classes_per_site} classes a site are more than the {classes} in the data: lower --classes-per-site."
        )
    places = classes_per_site * sites
    if places % classes:
        step = classes // np.gcd(classes, classes_per_site)
        near = [n for n in (sites // step * step, (sites // step + 1) * step) if n > 0]
        raise PartitionError(
            f"{sites} sites with {counted(classes_per_site, 'class', 'classes')} each make {places} places, which "
            f"{classes} classes cannot share equally: give --sites {' or '.join(map(str, near))}, or another "
            "--classes-per-site."
        )


def _draw_holders(classes: int, sites: int, classes_per_site: int, rng: np.random.Generator) -> list[list[int]]:
    """The sites that hold each class. Places left never differ by more than 1, so no site is left without a choice."""
    places = np.full(classes, classes_per_site * sites // classes)
    holders: list[list[int]] = [[] for _ in range(classes)]
    for site in range(sites):
        free = np.ones(classes, dtype=np.bool_)
        for _ in range(classes_per_site):
            most = np.flatnonzero(free & (places == places[free].max()))
            k = int(most[rng.integers(len(most))])
            free[k] = False
            places[k] -= 1
            holders[k].append(site)
    return holders


def _by_class(lesions: Sequence[Lesion], purpose: str, seed: int) -> dict[str, list[Lesion]]:
    """Classes in name order, their lesions in an order that depends on seed, purpose and names."""
    groups: dict[str, dict[str, Lesion]] = defaultdict(dict)
    for lesion in lesions:
        groups[lesion.label][lesion.name] = lesion
    return {
        label: [groups[label][name] for name in lesion_order(dict.fromkeys(groups[label], ""), purpose, seed)]
        for label in sorted(groups)
    }


def _rng(seed: int, *purpose: str | int) -> np.random.Generator:
    text = "\0".join(map(str, (seed, *purpose)))
    return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))

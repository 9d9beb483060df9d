"""`lesions:` options and the rows they plan: which site has which lesions of which class, seen in which views."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.errors import SpecError
from edgefl_trainer.data.lesions.canvas import stream
from edgefl_trainer.data.lesions.signs import SIGNS
from edgefl_trainer.data.rows import UNDEALT, Row

OPTIONS = {
    "sites": "6",
    "images": "600",
    "seed": "0",
    "px": "128",
    "classes": "NV+MEL+BKL+BCC",
    "skew": "0.5",
    "absent": "0",
}
MIN_SHARE = 0.08  # of a class at a site that has it
NEVUS_SHARE = 0.4  # of all lesions where nothing is skewed
_VIEWS = (0.55, 0.30, 0.15)  # share of lesions with one, two, three pictures
_PLAN_STREAM = 4


@dataclass(frozen=True, kw_only=True)
class LesionSettings:
    """What `lesions:` draws."""

    sites: int  # number of sites
    images: int  # images of each site
    seed: int  # of everything drawn
    px: int  # side at which a picture is drawn, pixels
    classes: tuple[str, ...]  # keys of `SIGNS`
    skew: float  # 0 = every site has the same class shares, 1 = shares as Dirichlet(1) draws them
    absent: int  # number of classes, never the first, that each site lacks


def parse_settings(options: Mapping[str, str]) -> LesionSettings:
    """Read the settings from the options of a SPEC.

    Raises:
        SpecError: A value is not a number in its range, or a class is not drawn.
    """
    classes = tuple(options["classes"].split("+"))
    unknown = [name for name in classes if name not in SIGNS]
    if unknown or len(set(classes)) != len(classes):
        raise SpecError(f"lesions:classes={options['classes']} is not known; choose from {'+'.join(SIGNS)}.")
    try:
        skew = float(options["skew"])
    except ValueError:
        skew = -1.0
    if not 0 <= skew <= 1:
        raise SpecError(f"lesions:skew={options['skew']} is not allowed; give a number from 0 to 1.")
    return LesionSettings(
        sites=_whole(options, "sites", 1, 1000),
        images=_whole(options, "images", 1, 100_000),
        seed=_whole(options, "seed", 0, 2**31),
        px=_whole(options, "px", 32, 1024),
        classes=classes,
        skew=skew,
        absent=_whole(options, "absent", 0, len(classes) - 1),
    )


def site_name(site: int, sites: int) -> str:
    """Name a site: `site-1` …, padded so that name order is number order."""
    return f"site-{site + 1:0{len(str(sites))}d}"


def plan_rows(settings: LesionSettings) -> tuple[Row, ...]:
    """Plan one row for each picture; `source` is "site/lesion/view/class", all a picture needs to be drawn."""
    return tuple(row for site in range(settings.sites) for row in _site_rows(settings, site))


def class_shares(settings: LesionSettings, site: int) -> NDArray[np.float64]:
    """Share of each class at one site, (K,); 0 for absent ones, else at least about `MIN_SHARE`."""
    rng = stream(settings.seed, _PLAN_STREAM, site)
    n = len(settings.classes)
    base = np.full(n, 1.0)
    if "NV" in settings.classes and n > 1:
        base[:] = (1 - NEVUS_SHARE) / (n - 1)
        base[settings.classes.index("NV")] = NEVUS_SHARE
    shares: NDArray[np.float64] = (1 - settings.skew) * base / base.sum() + settings.skew * rng.dirichlet(np.ones(n))
    shares = np.maximum(shares, MIN_SHARE)
    if settings.absent:
        shares[1 + rng.permutation(n - 1)[: settings.absent]] = 0
    shares /= shares.sum()
    return shares


def _site_rows(settings: LesionSettings, site: int) -> Sequence[Row]:
    shares = class_shares(settings, site)
    rng = stream(settings.seed, _PLAN_STREAM, site, 1)
    name = site_name(site, settings.sites)
    drawn = np.zeros(len(shares))
    rows: list[Row] = []
    lesion = 0
    while len(rows) < settings.images:
        label = int(np.argmax(shares * (lesion + 1) - drawn - (shares == 0)))
        drawn[label] += 1
        views = 1 + int(rng.choice(3, p=_VIEWS))
        for view in range(min(views, settings.images - len(rows))):
            key = f"{name}-{lesion:05d}"
            source = f"{site}/{lesion}/{view}/{settings.classes[label]}"
            rows.append(Row(f"{key}-{view}", source, settings.classes[label], name, key, UNDEALT))
        lesion += 1
    return rows


def _whole(options: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = options[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
        raise SpecError(f"lesions:{name}={text} is not allowed; give a whole number from {low} to {high}.")
    return int(text)

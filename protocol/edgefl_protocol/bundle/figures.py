"""The figures that a card states of its site, read without trust in their form, and what one of them looks like."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from edgefl_protocol.bundle.model_card import Card
from edgefl_protocol.fields import NAME
from edgefl_protocol.rules.bounds import TEMPERATURE_BOUNDS
from edgefl_protocol.rules.travels import WEIGHTS

HALF: Final = 0.5  # of the answers
LIVE: Final = "live_federation"  # metric: the name of the live federation whose sites do not know one another
_NEAR_BOUND: Final = 1.01  # a search that is stopped by its bound ends within this factor of it


@dataclass(frozen=True, kw_only=True)
class CardFigure:
    """One figure by its name."""

    name: str
    value: float
    interval: tuple[float, float] | None  # 95 %, by lesion or picture; None, too, where the card's has no width
    without_width: str | None = None  # why the card's interval has none
    chance: float | None = None  # what guessing reaches; None where nobody can say

    @property
    def above_chance(self) -> bool | None:
        """Whether its lower end lies above chance; None where nobody can tell."""
        if self.chance is None:
            return None
        if self.interval is None:
            return False if self.value <= self.chance else None
        return self.interval[0] > self.chance

    def __str__(self) -> str:
        beside = [] if self.interval is None else [f"95% interval {self.interval[0]:.3f} to {self.interval[1]:.3f}"]
        beside += [] if self.without_width is None else [f"no interval: {self.without_width}"]
        beside += [] if self.chance is None else [f"chance {self.chance:.3f}"]
        return f"{self.name} {self.value:.3f}" + (f" ({', '.join(beside)})" if beside else "")


def site_figures(card: Card) -> Mapping[str, object]:
    """Give the figures of the site whose model it is; empty where the card states none."""
    found = card.metrics.get("site")
    return found if isinstance(found, dict) else {}


def rounds_without(figures: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Give `took_part` of a site that learned in no round of its federation; None where it did, or nobody tells."""
    part = figures.get("took_part")
    if not isinstance(part, dict) or type(part.get("rounds")) is not int or part["rounds"] != 0:
        return None
    return part


def images_of_sites(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Give the training images of each site of a run but those that learned in no round: these taught nothing.

    Args:
        figures: `sites` of its summary.
    """
    return {name: int(one["n_train"]) for name, one in figures.items() if rounds_without(one) is None}


def learned_from(card: Card) -> tuple[str, ...]:
    """Give the sites whose pictures a model learned from, see `taught_by`."""
    return taught_by(card.site, card.sites, site_figures(card), card.metrics.get("travels"))


def learned_from_federation(card: Card) -> str | None:
    """Give the live federation whose unnamed sites taught a model, see `taught_by_federation`."""
    return taught_by_federation(card.metrics.get(LIVE), card.metrics.get("travels"))


def taught_elsewhere(card: Card) -> str | None:
    """Give the site of a model that other sites taught, too; None of a shared one, and where it learned alone.

    Only that site's own pictures then decide which classes the model names.
    """
    others = learned_from_federation(card) is not None or set(learned_from(card)) - {card.site}
    return card.site if others else None


def taught_by_federation(live: object, travels: object) -> str | None:
    """Give the live federation whose other sites taught a model, too: there no site learns who the others are.

    Args:
        live: the name that the card states; None of a run that knew all of its sites, and on a card from before.
        travels: as for `taught_by`.
    """
    named = isinstance(live, str) and NAME.fullmatch(live) is not None
    return str(live) if named and _shared(travels) else None


def _shared(travels: object) -> bool:
    """Whether weights travelled, so that a model is the average of what all sites learned."""
    return isinstance(travels, list) and WEIGHTS in travels


def taught_by(
    site: str | None, sites: Mapping[str, int], figures: Mapping[str, object], travels: object
) -> tuple[str, ...]:
    """Give the sites whose pictures a model learned from: its own one, and where weights travel all that taught it.

    Of a shared model, or where its site took no part, these are the others.

    Args:
        site: whose model it is; None for a shared one.
        sites: numbers of training images of those that took part.
        figures: of that site.
        travels: a list of the kinds that travelled in the run (`rules.travels`); None where the card does not say.
    """
    if site is not None and sites.get(site) != 0 and rounds_without(figures) is None:
        return tuple(name for name, count in sites.items() if count) if _shared(travels) else (site,)
    return tuple(name for name, count in sites.items() if count and name != site)


def figures_of(
    figures: Mapping[str, object], names: Mapping[str, str], chances: Mapping[str, float | None]
) -> list[CardFigure]:
    """Read figures with their intervals, as far as the card states them.

    Draws that never vary, as where all answers are right, say nothing of how sure a figure is: an interval without
    width is none.

    Args:
        names: what each key is called.
        chances: what guessing reaches, by key; a key that is not there has none.
    """
    found = []
    for key, name in names.items():
        value = number(figures.get(key))
        if value is None:
            continue
        bounds, why = interval_of(figures, key), None
        if bounds is not None and bounds[0] == bounds[1]:
            bounds, why = None, _without_width(key, value)
        found.append(CardFigure(name=name, value=value, interval=bounds, without_width=why, chance=chances.get(key)))
    return found


def _without_width(key: str, value: float) -> str:
    """Say why draws of a figure never vary; an AUROC of 1 does not say that answers are right."""
    why = {} if key == "auroc" else {0.0: "all are wrong", 1.0: "all are right"}
    return why.get(value, "all draws give the same")


def number(value: object) -> float | None:
    """Read a finite number; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def temperature_at_bound(temperature: float, spoils: str) -> str | None:
    """Say that a temperature was stopped by the bound of what may be chosen, and what that spoils; None: it was not."""
    low, high = TEMPERATURE_BOUNDS
    if low * _NEAR_BOUND < temperature < high / _NEAR_BOUND:
        return None
    return (
        f"This model's temperature {temperature:.3f} lies at a bound of what may be chosen ({low:g} to "
        f"{high:g}), so {spoils} may be far from true."
    )


def interval_of(figures: Mapping[str, object], key: str) -> tuple[float, float] | None:
    """Read the interval of a figure; None where it is missing, or is no pair of finite numbers."""
    given = figures.get(f"{key}_interval")
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        return None
    low, high = (number(end) for end in given)
    return None if low is None or high is None else (low, high)

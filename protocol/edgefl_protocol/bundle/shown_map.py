"""What a bundle says of the map that a device shows beside a picture: its kind, and how true it was found.

Guarantees: a `ShownMap` that exists satisfies the form below; anything else is a `ValueError`.

    "map" of card.json   {"shown": bool, "why": null|why, "kind": null|kind, "cells": N|null, "passes": 1 to 257,
                          "pictures": n, "advantage": null|{"value", "low", "high"}, "hidden": null|{"mean": effect,
                          "blur": effect}}
    effect               {"marked", "random", "kept", "kept_random"}, shares of the answers that change

`hidden` says what hiding a quarter of the picture does, by its mean colour and by a blur: the quarter that the map
marks, one at random, all but the marked one, all but a random one. A map is shown where `why` is null, and then only
with figures that are better than chance. The key is missing in bundles from before it: nobody measured their map.
Source: docs/methods.md 1.8, docs/decisions/0040.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from edgefl_protocol.rules.hidden_regions import LEAST_SHOWN_FALL, RANDOM_QUARTERS
from edgefl_protocol.sentences import counted
from edgefl_protocol.strict_json import check_keys

MapKind = Literal["rollout", "attention", "values", "share", "occlusion"]
"""`rollout` to `share`: out of the scoring graph, its output `shown`, or `map` where it has none; `occlusion`: the
device hides one cell after the other."""

WhyNot = Literal["chance", "few_pictures", "no_pictures", "no_map"]
"""`chance`: what the best map marks matters no more than any other place; `few_pictures`: too few to tell;
`no_pictures`: the run's pictures could not be read; `no_map`: the network has none that a device computes in time."""

WAYS: Final = ("mean", "blur")
MAX_CELLS: Final = 256  # of an occlusion map: a device runs the network once more than that
MAX_PICTURES: Final = 10**9
_KEYS: Final = {"shown", "why", "kind", "cells", "passes", "pictures", "advantage", "hidden"}
_EFFECT: Final = {"marked", "random", "kept", "kept_random"}
_INTERVAL: Final = {"value", "low", "high"}


@dataclass(frozen=True, kw_only=True)
class HidingEffect:
    """Shares of the answers that change where parts of a picture are hidden."""

    marked: float  # the quarter that the map marks
    random: float  # a quarter at random
    kept: float  # all but the marked quarter
    kept_random: float  # all but a random quarter

    def __post_init__(self) -> None:
        if not all(_is_share(value) for value in vars(self).values()):
            raise ValueError("an effect must hold shares from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """How much more the marked quarter matters than a random one, under the way of hiding where that is least."""

    value: float
    low: float  # of a 95 % interval over lesions
    high: float

    def __post_init__(self) -> None:
        if not all(_is_number(value) and -1 <= value <= 1 for value in vars(self).values()):
            raise ValueError("an advantage must hold numbers from -1 to 1")


@dataclass(frozen=True, kw_only=True)
class ShownMap:
    """The map of a bundle, and how true it was found."""

    why: WhyNot | None  # why no map is shown; None where one is
    kind: MapKind | None  # of the best map that was measured; None where none was
    cells: int | None = None  # N of an occlusion map, a square number; None for the other kinds
    pictures: int = 0  # on how many pictures it was measured
    advantage: Advantage | None = None
    hidden: Mapping[str, HidingEffect] | None = None  # by way of hiding, see `WAYS`

    def __post_init__(self) -> None:
        if self.why not in (None, *get_args(WhyNot)) or self.kind not in (None, *get_args(MapKind)):
            raise ValueError(f"the map's kind {str(self.kind)[:40]!r} or its reason {str(self.why)[:40]!r} is unknown")
        measured = [part is not None for part in (self.kind, self.advantage, self.hidden)]
        if any(measured) is not all(measured) or all(measured) is not (self.why in (None, "chance")):
            raise ValueError(
                "a map that is shown or is at chance must have a kind and figures; any other must have neither"
            )
        if self.hidden is not None and set(self.hidden) != set(WAYS):
            raise ValueError(f"the effect of hiding must be given for {' and '.join(WAYS)}")
        if type(self.pictures) is not int or not 0 <= self.pictures <= MAX_PICTURES:
            raise ValueError("pictures must be a whole number from 0")
        if (self.kind == "occlusion") is not (self.cells is not None):
            raise ValueError("cells must be given for an occlusion map, and for no other")
        if self.cells is not None and not (
            type(self.cells) is int and 4 <= self.cells <= MAX_CELLS and math.isqrt(self.cells) ** 2 == self.cells
        ):
            raise ValueError(f"cells must be a square number from 4 to {MAX_CELLS}")
        if self.shown and not self._better_than_chance():
            raise ValueError("a map is shown although its own figures are no better than chance")

    @property
    def shown(self) -> bool:
        """Whether a device draws it."""
        return self.why is None

    @property
    def passes(self) -> int:
        """How often a device runs the network for a picture and its map."""
        return 1 + (self.cells or 0)

    @property
    def least(self) -> HidingEffect | None:
        """What hiding does, in the way in which the marked quarter differs least from a random one."""
        if self.hidden is None:
            return None
        return min(self.hidden.values(), key=lambda one: one.marked - one.random)

    def _better_than_chance(self) -> bool:
        least, found = self.least, self.advantage
        return least is not None and found is not None and found.low > 0 and least.marked > least.random

    def to_json(self) -> dict[str, Any]:
        """Give the value of `map` in `card.json`."""
        return {
            "shown": self.shown,
            "why": self.why,
            "kind": self.kind,
            "cells": self.cells,
            "passes": self.passes,
            "pictures": self.pictures,
            "advantage": None if self.advantage is None else asdict(self.advantage),
            "hidden": None if self.hidden is None else {way: asdict(self.hidden[way]) for way in self.hidden},
        }

    @classmethod
    def from_json(cls, record: object) -> "ShownMap":
        """Read what `to_json` gave."""
        found = check_keys(record, _KEYS, what="map")
        hidden, advantage = found["hidden"], found["advantage"]
        effects = None if hidden is None else check_keys(hidden, set(WAYS), what="hidden")
        made = cls(
            why=found["why"],
            kind=found["kind"],
            cells=found["cells"],
            pictures=found["pictures"],
            advantage=None if advantage is None else Advantage(**check_keys(advantage, _INTERVAL, what="advantage")),
            hidden=None
            if effects is None
            else {way: HidingEffect(**check_keys(effects[way], _EFFECT, what=way)) for way in WAYS},
        )
        if found["shown"] is not made.shown or found["passes"] != made.passes:
            raise ValueError("map contradicts itself: shown and passes do not fit why and cells")
        return made


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # the type was just looked at


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def how_true(said: ShownMap | None, noun: str = "picture") -> str:
    """Say what the card says of its map, in a sentence for whoever reads the picture.

    Args:
        said: None for a bundle from before maps were measured.
        noun: what it was measured on: pictures, or questions about them.
    """
    if said is None:
        return "No map is drawn: this model does not say how true its map is."
    least = said.least
    if least is None:
        return f"No map is drawn: {why_no_map(said.why or 'no_pictures', said.pictures, noun)}."
    marked = _answers(least.marked, said.pictures)
    other = _answers(least.random, RANDOM_QUARTERS * said.pictures)
    figures = (
        f"Measured on {counted(said.pictures, noun)}: hiding the strongest quarter of the map changed {marked}; "
        f"hiding a random quarter, {RANDOM_QUARTERS} times for each {noun}, changed {other}."
    )
    if said.shown:
        return figures
    return f"No map is drawn: what the best map marks matters little more than any other place. {figures}"


def no_map(said: ShownMap | None, noun: str = "picture") -> str | None:
    """Say why no map is drawn beside any picture; None where one is."""
    return None if said is not None and said.shown else how_true(said, noun)


def level_words(said: ShownMap) -> str:
    """Say why no map of one picture is drawn although the bundle shows one: no place stands out in it."""
    if said.kind == "occlusion":
        return (
            "No map is drawn, for no single part matters much to this answer: hiding any one of them lowers its "
            f"probability by less than {100 * LEAST_SHOWN_FALL:.0f} points."
        )
    return "No map is drawn: the map of this picture is nearly the same everywhere, so it marks no part."


def why_no_map(why: str, pictures: int, noun: str = "picture") -> str:
    """Say, as a clause, why no map is drawn; `pictures` were there to measure one on."""
    return _WHY[why].format(f"{pictures} {noun}s")


_WHY: Final[Mapping[str, str]] = {
    "no_map": "a device cannot compute a map of this network in time",
    "few_pictures": "{} were too few to find out whether it would be true",
    "no_pictures": "when this model was made, nobody could measure whether it would be true",
    "chance": "it is no better than chance",
}


def _answers(share: float, tries: int) -> str:
    """Write a share as a count of answers, such as `30 of 79 answers (38.0%)`; a card rounds shares to 4 digits.

    A card whose share is no such count, for it was measured otherwise, gets the percentage alone.
    """
    count = round(share * tries)
    if tries and abs(count / tries - share) < 0.0001:
        return f"{count or 'none'} of {counted(tries, 'answer')} ({share:.1%})"
    return f"{share:.1%} of the answers"

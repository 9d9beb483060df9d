"""How true a map is, from the answers that change where it marks: figures, their interval, and which map is shown.

Of a picture, d is 1 where the answer changes when the quarter that the map marks is hidden, r the share of random
quarters whose hiding changes it; d' and r' the same where all but that quarter is hidden. A true map has a large d - r
(deletion) and a large r' - d' (insertion). Its advantage is the mean over pictures of half their sum, for each way of
hiding, and the smaller of the two counts: occlusion is made by one of them, and must hold by the other.

A map is better than chance where, under both ways, the 95 % intervals of advantage and of d - r lie above 0 and the
mean of d - r is at least 0.05. Whole lesions are drawn, as for every interval (`intervals`). docs/decisions/0040.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from edgefl_protocol.bundle.shown_map import WAYS, Advantage, HidingEffect, MapKind, ShownMap, WhyNot
from edgefl_trainer.evaluate.intervals import RESAMPLES, interval, lesion_weights

LEAST_EFFECT = 0.05  # of answers: below one in twenty nobody who reads pictures would notice
LEAST_PICTURES = 20  # as for the temperature and the threshold of referral


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Which answers change under one way of hiding, by picture."""

    marked: Float[np.ndarray, " n"]  # 0 or 1: the marked quarter is hidden
    random: Float[np.ndarray, " n"]  # share of random quarters
    kept: Float[np.ndarray, " n"]  # 0 or 1: all but the marked quarter is hidden
    kept_random: Float[np.ndarray, " n"]  # share of random quarters

    @property
    def effect(self) -> HidingEffect:
        """The means over pictures."""
        return HidingEffect(**{name: round(float(values.mean()), 4) for name, values in vars(self).items()})

    @property
    def deletion(self) -> Float[np.ndarray, " n"]:
        """By how much hiding what is marked changes more answers than hiding anything."""
        return np.asarray(self.marked - self.random)

    @property
    def advantage(self) -> Float[np.ndarray, " n"]:
        """Half of deletion and insertion together."""
        return np.asarray((self.deletion + self.kept_random - self.kept) / 2)


@dataclass(frozen=True, kw_only=True)
class InLesion:
    """What a map marks beside a lesion whose outline is known."""

    marked: float  # share of the marked area that lies in the lesion
    chance: float  # share of the picture that does
    strongest: float  # share of pictures whose strongest cell lies in the lesion by its middle


@dataclass(frozen=True, kw_only=True)
class MapTruth:
    """What was found of one map."""

    pictures: int
    hidden: Mapping[str, HidingEffect]  # by way of hiding
    advantage: Advantage
    better_than_chance: bool
    in_lesion: InLesion | None = None  # where outlines are known


def judged(
    changes: Mapping[str, Changes],
    lesions: Sequence[str],
    in_lesion: InLesion | None = None,
    resamples: int = RESAMPLES,
) -> MapTruth:
    """Judge one map.

    Args:
        changes: by way of hiding (`WAYS`), n pictures each.
        lesions: of each picture.
    """
    deletions = {way: _mean_and_interval(changes[way].deletion, lesions, resamples) for way in WAYS}
    advantages = {way: _mean_and_interval(changes[way].advantage, lesions, resamples) for way in WAYS}
    least = min(advantages.values(), key=lambda one: one.value)
    above = all(one.low > 0 for one in (*deletions.values(), *advantages.values()))
    return MapTruth(
        pictures=len(lesions),
        hidden={way: changes[way].effect for way in WAYS},
        advantage=least,
        better_than_chance=above and all(one.value >= LEAST_EFFECT for one in deletions.values()),
        in_lesion=in_lesion,
    )


def _mean_and_interval(values: Float[np.ndarray, " n"], lesions: Sequence[str], resamples: int) -> Advantage:
    weights = np.concatenate(list(lesion_weights(lesions, resamples)))
    low, high = interval(weights @ values / weights.sum(axis=1)) or (0.0, 0.0)
    value = float(values.mean())
    return Advantage(value=round(value, 4), low=round(low, 4), high=round(high, 4))


def chosen(found: Mapping[MapKind, MapTruth], cells: int | None) -> ShownMap:
    """Choose the map that is shown: of those better than chance the one of largest advantage, else none.

    Args:
        found: the candidates; of equal ones the first counts.
        cells: of the occlusion map, where it is among them.
    """
    if not found:
        return not_measured("no_map", 0)
    pictures = max(truth.pictures for truth in found.values())
    if pictures < LEAST_PICTURES:
        return not_measured("few_pictures", pictures)
    true = {kind: truth for kind, truth in found.items() if truth.better_than_chance}
    kind = max(true or found, key=lambda kind: found[kind].advantage.value)
    best = found[kind]
    return ShownMap(
        why=None if true else "chance",
        kind=kind,
        cells=cells if kind == "occlusion" else None,
        pictures=best.pictures,
        advantage=best.advantage,
        hidden=best.hidden,
    )


def not_measured(why: WhyNot, pictures: int = 0) -> ShownMap:
    """Give what a bundle says where nothing could be measured."""
    return ShownMap(why=why, kind=None, pictures=pictures)


def in_lesion(
    marked: Bool[np.ndarray, "n S S"], strongest: Sequence[tuple[int, int]], masks: Bool[np.ndarray, "n S S"]
) -> InLesion | None:
    """Measure what a map marks of lesions whose outlines are known; None where no picture shows one.

    Args:
        marked: the pixels of the marked cells.
        strongest: row and column of the middle of each map's strongest cell.
        masks: True inside the lesion.
    """
    shown = masks.any(axis=(1, 2))
    if not shown.any():
        return None
    inside = (marked & masks).sum(axis=(1, 2)) / marked.sum(axis=(1, 2))
    hits = [bool(masks[index, row, column]) for index, (row, column) in enumerate(strongest)]
    return InLesion(
        marked=float(inside[shown].mean()),
        chance=float(masks.mean(axis=(1, 2))[shown].mean()),
        strongest=float(np.array(hits)[shown].mean()),
    )

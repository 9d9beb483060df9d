"""95 % intervals of an attack's figure, and of figure minus floor, by drawing what is independent.

Pictures that one item of a payload is of, such as the prototype of their class, share the attacker's guess: each of
them tells nothing of its own. So these are drawn together, with replacement: the cluster bootstrap of
`evaluate.intervals`, whose clusters are lesions where each picture has its own item. Figure and floor are of the same
pictures, so their difference is drawn picture by picture.

Guarantees: below `LEAST_UNITS` units there is no interval; one of a share is never without width.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float

from edgefl_trainer.evaluate.intervals import RESAMPLES, interval, lesion_weights, share_bounds

Between = tuple[float, float]
LEAST_UNITS: Final = 10  # below which draws say little of how sure a figure is
ROUNDING: Final = 1e-9  # within which draws are alike


def unit_bounds(
    values: Float[np.ndarray, " n"], floors: Float[np.ndarray, " n"], units: Sequence[str], *, shares: bool
) -> tuple[Between | None, Between | None]:
    """Compute the intervals of the mean value and of the mean of value minus floor; None below `LEAST_UNITS` units.

    Of a share, draws that are all alike say nothing of how sure it is: Clopper and Pearson's interval takes their
    place, with units as trials, as in `evaluate.intervals.share_interval`. It is exact where each unit has one picture,
    and then always taken: draws of 1 hit in 60 end at 5.0 %, the exact interval at 8.9 %. Figure minus floor rests on
    the same hits, so its draws are as narrow: its interval there reaches at least as far as the exact one minus the
    mean floor.

    Args:
        floors: what is reached of each picture without the payload.
        units: what each picture shares with others.
        shares: whether the values are hits, not similarities.
    """
    count = len(set(units))
    if count < LEAST_UNITS:
        return None, None
    both = np.stack([values, values - floors], axis=1)  # (n, 2)
    draws = np.concatenate([w @ both / w.sum(axis=1, keepdims=True) for w in lesion_weights(units, RESAMPLES)])
    figure, minus_floor = middle(draws[:, 0]), middle(draws[:, 1])
    alike = figure[1] - figure[0] < ROUNDING
    if shares and (alike or count == len(values)):
        figure = share_bounds(float(values.mean()) * count, count)
        exact = (figure[0] - float(floors.mean()), figure[1] - float(floors.mean()))
        paired = not alike and np.ptp(floors) >= ROUNDING  # else the floor only shifts the figure
        minus_floor = (min(minus_floor[0], exact[0]), max(minus_floor[1], exact[1])) if paired else exact
    return figure, minus_floor


def middle(draws: Float[np.ndarray, " R"]) -> Between:
    """Return the middle 95 % of draws, which are all finite."""
    found = interval(draws)
    assert found is not None
    return found[0], found[1]

"""Intervals of an attack where pictures share what was sent: docs/security.md check 53, docs/reference/runs.md."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.audit.bounds import LEAST_UNITS, unit_bounds
from edgefl_trainer.evaluate.intervals import share_bounds


def by_hand(values: np.ndarray, units: list[str]) -> np.ndarray:
    """Efron and Tibshirani 1993, chapter 8: draw whole units, as many as there are, and take all their rows."""
    rng, names = np.random.default_rng(5), sorted(set(units))
    rows = {name: [value for value, unit in zip(values, units, strict=True) if unit == name] for name in names}
    means = []
    for _ in range(4000):
        drawn = [rows[name] for name in rng.choice(names, len(names))]
        means.append(np.mean(np.concatenate(drawn)))
    return np.percentile(means, [2.5, 97.5])


def shared_hits() -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The numbers of FedDistill's logits in docs/results/what_leaves.md: 36 hits in 642 pictures, floor 3.3 %.

    Here 32 pairs of site and class have some twenty pictures each, and in three of them twelve are found.
    """
    units = [f"{row % 32} a" for row in range(642)]
    hits = np.zeros(642)
    for unit in ("0 a", "1 a", "2 a"):
        hits[[row for row, one in enumerate(units) if one == unit][:12]] = 1
    return hits, np.full(642, 0.033), units


def test_the_clustered_interval_is_that_of_whole_units() -> None:
    hits, _, units = shared_hits()
    floors = np.random.default_rng(0).uniform(0, 0.1, 642) + 0.1 * hits
    figure, minus_floor = unit_bounds(hits, floors, units, shares=True)
    assert figure == pytest.approx(by_hand(hits, units), abs=0.006)
    assert minus_floor == pytest.approx(by_hand(hits - floors, units), abs=0.006)
    values = np.random.default_rng(1).normal(size=642) + hits
    assert unit_bounds(values, floors, units, shares=False)[0] == pytest.approx(by_hand(values, units), abs=0.02)


def test_trials_that_share_an_item_do_not_tell_a_figure_from_its_floor() -> None:
    """Each picture counted as a trial: 4.0 % to 7.7 %, "above 3.3 %". Three items of 32 made all the hits."""
    hits, floors, units = shared_hits()
    naive = share_bounds(36, 642)
    assert naive == pytest.approx((0.040, 0.077), abs=5e-4) and naive[0] > 0.033
    figure, minus_floor = unit_bounds(hits, floors, units, shares=True)
    assert figure is not None and figure[0] < 0.033 and figure[1] > naive[1]
    assert minus_floor is not None and minus_floor[0] < 0 < minus_floor[1]
    alone = unit_bounds(hits, floors, [str(row) for row in range(642)], shares=True)
    assert alone[0] == pytest.approx(naive) and alone[1] == pytest.approx((naive[0] - 0.033, naive[1] - 0.033))


def test_a_pair_is_drawn_as_a_pair() -> None:
    """Where each figure lies 0.01 above its own floor, the difference is sure although figure and floor are not."""
    floors = np.random.default_rng(2).uniform(0, 1, 200)
    figure, minus_floor = unit_bounds(floors + 0.01, floors, [str(row // 5) for row in range(200)], shares=False)
    assert figure is not None and figure[1] - figure[0] > 0.05
    assert minus_floor == pytest.approx((0.01, 0.01))


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=14),
    st.integers(2, 3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_more_pictures_of_the_same_items_tell_no_more(drawn: list[list[bool]], copies: int, mixed: object) -> None:
    """Copies of each picture, in any order, leave the intervals as they are; below ten units there are none."""
    rows = [(float(hit), 0.1 * unit, str(unit)) for unit, hits in enumerate(drawn) for hit in hits]
    order = list(range(2 * len(rows)))
    mixed.shuffle(order)  # type: ignore[attr-defined]

    def bounds(times: int, places: list[int]) -> tuple:
        values, floors, units = zip(*[(times * rows)[place] for place in places], strict=True)
        return unit_bounds(np.array(values), np.array(floors), units, shares=True)

    once, more = bounds(2, order), bounds(2 * copies, list(range(2 * copies * len(rows))))
    if len(drawn) < LEAST_UNITS:
        assert once == more == (None, None)
        return
    for one, other in zip(once, more, strict=True):
        assert one == pytest.approx(other) and one[0] < one[1]
    assert once[0][0] <= np.mean([hit for hit, _, _ in rows]) <= once[0][1]


@pytest.mark.parametrize("hit", [0.0, 1 / 200])
def test_draws_that_are_all_alike_are_not_sure(hit: float) -> None:
    """Of ten units without a hit up to 1 - 0.025^(1/10) may be found: no sign that the target of 5 % is kept."""
    units = [str(row % 10) for row in range(640)]
    figure, minus_floor = unit_bounds(np.full(640, hit), np.full(640, 1 / 200), units, shares=True)
    assert figure is not None and figure[1] >= 1 - 0.025 ** (1 / 10) - 1e-9
    assert minus_floor == pytest.approx((figure[0] - 1 / 200, figure[1] - 1 / 200))


def test_a_rare_hit_of_one_item_a_picture_has_the_exact_interval() -> None:
    """Draws of 1 hit in 60 end at 5.0 %, the target; Clopper and Pearson's interval ends at 8.9 %."""
    found, _ = unit_bounds(np.eye(1, 60)[0], np.zeros(60), [str(row) for row in range(60)], shares=True)
    assert found == pytest.approx((0.0004, 0.0894), abs=1e-4)


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_a_rare_hit_is_not_sure_beside_its_floor(spread: float) -> None:
    """Beside a floor of 6 %, of some pictures higher: draws of 1 hit in 60 ended below it, exact ends do not."""
    floors = np.r_[np.full(54, 0.06 - spread / 10), np.full(6, 0.06 + 9 * spread / 10)]
    assert floors.mean() == pytest.approx(0.06)
    _, minus_floor = unit_bounds(np.eye(1, 60)[0], floors, [str(row) for row in range(60)], shares=True)
    assert minus_floor is not None and minus_floor[0] <= 0.0005 - 0.06 and minus_floor[1] >= 0.0893 - 0.06
    _, other_side = unit_bounds(1 - np.eye(1, 60)[0], 1 - floors, [str(row) for row in range(60)], shares=True)
    assert other_side == pytest.approx((-minus_floor[1], -minus_floor[0]))

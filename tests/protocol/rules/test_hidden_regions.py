"""Hiding parts of a picture (docs/methods.md 1.8): what is marked, what is covered, and the map by occlusion."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.rules import hidden_regions as regions

PICTURES = np.random.default_rng(0).integers(0, 256, (3, 21, 21, 3)).astype(np.uint8)


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=80))
def test_a_quarter_is_marked_and_nothing_outside_is_larger(values):
    """By the definition, whatever the order of equal values."""
    maps = np.array([values], np.float32)
    for rng in (None, np.random.default_rng(1)):
        marked = regions.strongest_cells(maps, rng)[0]
        assert marked.sum() == max(1, round(len(values) / 4))
        assert maps[0][marked].min() >= max(maps[0][~marked], default=-np.inf)


@given(st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=80))
def test_what_is_outlined_is_marked_and_half_as_strong_as_the_strongest(values):
    """docs/reference/scores.md: never more than the quarter that was measured; of a level map nothing."""
    found = np.array(values, np.float32)
    outlined, quarter = regions.outlined_cells(found), regions.strongest_cells(found[None])[0]
    assert not (outlined & ~quarter).any()
    low, high = max(0.0, min(values)), max(values)
    if regions.is_level(found):
        assert not outlined.any() and (high < 0.5 or high - low < 0.1 + 1e-6)
    else:
        assert outlined[int(found.argmax())] and (found[outlined] >= low + 0.5 * (high - low) - 1e-6).all()


def test_where_one_cell_of_49_carries_anything_it_alone_is_outlined():
    found = np.full(49, 0.02, np.float32)
    found[[10, 11, 30]] = 1.0, 0.6, 0.4
    assert np.flatnonzero(regions.outlined_cells(found)).tolist() == [10, 11]
    assert not regions.outlined_cells(np.full(49, 0.4, np.float32)).any()  # hiding changes next to nothing


def test_a_part_that_hardly_matters_is_not_shown():
    """One picture of 88.3% had 12 of 49 parts outlined, of which the strongest lowered it to 87.7%."""
    strong = np.array([1.0, 0.2, 0.1, 0.0], np.float32)
    assert regions.marks_nothing(strong, 0.883 - 0.877) and regions.marks_nothing(strong, 0.0199)
    assert not regions.marks_nothing(strong, 0.0201) and not regions.marks_nothing(strong, None)
    assert regions.marks_nothing(np.full(4, 0.9, np.float32), 0.5)  # level


def test_a_level_map_marks_each_cell_equally_often():
    """A map that says nothing must be judged as chance: 1 in 4, within five standard deviations of 4,000 draws."""
    marked = regions.strongest_cells(np.ones((4000, 16), np.float32), np.random.default_rng(2))
    assert np.abs(marked.mean(axis=0) - 0.25).max() < 5 * (0.25 * 0.75 / 4000) ** 0.5
    assert (regions.random_cells(50, 16, np.random.default_rng(3)).sum(axis=1) == 4).all()


@pytest.mark.parametrize("side", [21, 24])
def test_a_cell_hides_its_own_pixels(side):
    """Row by row, and the edges of 7 cells over 24 px where they fall: pixel y is of row floor(7·y/24)."""
    cells = np.zeros((1, 49), bool)
    cells[0, 7 * 2 + 5] = True
    mask = regions.pixels_of(cells, side)[0]
    expected = [[(7 * y // side, 7 * x // side) == (2, 5) for x in range(side)] for y in range(side)]
    np.testing.assert_array_equal(mask, expected)
    with pytest.raises(ValueError, match="not a square grid"):
        regions.pixels_of(np.zeros((1, 50), bool), side)


def test_what_is_hidden_is_covered_and_the_rest_is_untouched():
    cells = np.random.default_rng(4).random((3, 49)) < 0.3
    mask = regions.pixels_of(cells, 21)
    for cover in (regions.mean_colours(PICTURES), regions.blurred(PICTURES)):
        found = regions.hidden(PICTURES, cells, cover)
        np.testing.assert_array_equal(found[~mask], PICTURES[~mask])
        np.testing.assert_array_equal(found[mask], np.broadcast_to(cover, PICTURES.shape)[mask])


def test_the_covers_are_the_mean_and_a_gaussian_of_a_tenth_of_the_side():
    """Both by their definitions, pixel by pixel; beyond the edge lies nothing."""
    mean = [[round(float(picture[..., band].mean())) for band in range(3)] for picture in PICTURES]
    np.testing.assert_array_equal(regions.mean_colours(PICTURES)[:, 0, 0], mean)
    y, x = np.mgrid[0:21, 0:21]
    for row, column in ((0, 0), (10, 7), (20, 3)):
        weight = np.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * 2.1**2))
        expected = (PICTURES[1] * weight[..., None]).sum(axis=(0, 1)) / weight.sum()
        assert regions.blurred(PICTURES)[1, row, column] == pytest.approx(expected, abs=0.51)


def test_occlusion_hides_one_cell_after_the_other_and_maps_the_fall():
    """Zeiler and Fergus (arXiv 1311.2901) 4.2: the fall of the class's probability. A small one is not blown up."""
    pictures = regions.each_cell_hidden(PICTURES[0], 9)
    assert pictures.shape == (9, 21, 21, 3)
    mean = regions.mean_colours(PICTURES[:1])[0, 0, 0]
    for cell, picture in enumerate(pictures):
        row, column = divmod(cell, 3)
        expected = PICTURES[0].copy()
        expected[7 * row : 7 * row + 7, 7 * column : 7 * column + 7] = mean
        np.testing.assert_array_equal(picture, expected)
    without = np.array([0.4, 0.8, 0.9, 0.6], np.float32)
    assert regions.occlusion_map(0.8, without) == pytest.approx([1.0, 0.0, -0.25, 0.5], abs=1e-6)
    assert regions.occlusion_map(0.8, np.full(4, 0.798, np.float32)) == pytest.approx([0.2] * 4, abs=1e-4)

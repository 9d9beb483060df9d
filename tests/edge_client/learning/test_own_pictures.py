"""Which of the owner's pictures judge instead of teaching."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_client.learning.errors import LearningError
from edgefl_client.learning.own_pictures import hold_back
from edgefl_client.learning.picture_rows import PreparedRows

CLASSES = ("a", "b", "c")


def rows(labels: list[int], groups: list[str] | None = None) -> PreparedRows:
    names = groups or [f"lesion {index}" for index in range(len(labels))]
    images = np.zeros((len(labels), 2, 2, 3), np.uint8)
    return PreparedRows(images, np.array(labels), tuple(hashlib.sha256(name.encode()).hexdigest() for name in names))


@settings(max_examples=60)
@given(st.lists(st.integers(25, 200), min_size=2, max_size=3))
def test_hold_back_takes_its_share_and_keeps_sides(sizes):
    """docs/design.md 7 and 5: 15 % and at least 20 of each class; a picture never changes sides when others come."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    held, limits = hold_back(rows(labels), CLASSES, {})
    for label, size in enumerate(sizes):
        assert held[np.array(labels) == label].sum() == max(20, round(0.15 * size))
    more = labels + [0] * 40
    later, kept = hold_back(rows(more), CLASSES, limits)
    assert np.array_equal(later[: len(labels)], held) and kept == limits


def test_a_lesion_stands_on_one_side():
    """Pictures of one lesion never teach and judge at once (data/README: splits by lesion)."""
    groups = [f"{label}-{index // 3}" for label in range(2) for index in range(90)]
    held, _ = hold_back(rows([0] * 90 + [1] * 90, groups), CLASSES, {})
    for group in set(groups):
        assert len({bool(held[index]) for index, name in enumerate(groups) if name == group}) == 1


def test_copies_do_not_count_as_many():
    """Thirty copies of a picture are one picture: they cannot both teach and judge."""
    with pytest.raises(LearningError) as caught:
        hold_back(rows([0] * 30 + [1] * 30, ["same"] * 30 + [str(n) for n in range(30)]), CLASSES, {})
    assert caught.value.code == "few_images"

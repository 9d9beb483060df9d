"""The box that `benchmarks/device/framed_cancers.py` lays over a corner, as over a name."""

import numpy as np
import pytest
from benchmarks.device.framed_cancers import covered  # of benchmarks/, which only pytest has on its path


@pytest.mark.parametrize("share", [0.2, 0.3])
def test_a_box_lies_in_each_corner_and_then_a_little_inside(share):
    """It covers the square of its side's share, whatever corner; every second four keep away from the sides."""
    boxes = [covered(150, 200, "box in a corner", share, place) for place in range(8)]
    assert [box.mean() for box in boxes] == pytest.approx([share**2] * 8, rel=0.05)
    corners = [tuple(box[[0, 0, -1, -1], [0, -1, 0, -1]]) for box in boxes]
    assert len({*corners[:4]}) == 4 and all(sum(found) == 1 for found in corners[:4])
    sides = [box[0].sum() + box[-1].sum() + box[:, 0].sum() + box[:, -1].sum() for box in boxes]
    assert all(sides[:4]) and not any(sides[4:])
    assert np.sum([box > 0 for box in boxes[4:]], axis=0).max() == 1  # four places

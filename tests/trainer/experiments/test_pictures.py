"""Pictures of experiments say what their error bars are over, and of how many: docs/reference/experiment-files.md."""

from types import SimpleNamespace

import pytest

from edgefl_trainer.experiments.pictures import _spread


def runs(*of_row):
    """So many seeds of each row, over three sites that train and one that does not."""
    sites = {name: {"held_out": name == "d"} for name in "abcd"}
    return [
        SimpleNamespace(part="p", row=f"row {place}", summary={"sites": sites})
        for place, many in enumerate(of_row)
        for _ in range(many)
    ]


@pytest.mark.parametrize(
    ("spread", "of_row", "told"),
    [
        ("seeds", (3, 3), "\nerror bars: ± standard deviation over 3 seeds"),
        ("seeds", (2, 3, 1), "\nerror bars: ± standard deviation over 2 to 3 seeds"),
        ("seeds", (1, 1), ""),  # no bar is drawn
        ("sites", (1, 3), "\nerror bars: ± standard deviation over 3 sites"),
    ],
)
def test_a_picture_says_what_its_error_bars_are_over(spread, of_row, told):
    assert _spread(SimpleNamespace(spread=spread), runs(*of_row)) == told

"""docs/reference/experiment-files.md, `plot = "dots"`: every figure of a table beside its own row, whatever the number
of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from edgefl_trainer.evaluate.plots.bars import Bar
from edgefl_trainer.evaluate.plots.dots import _draw, _lines, plot_dots


def _axes(panel):
    axes = Figure().add_subplot()
    _draw(axes, panel, names=True)
    return axes


@given(st.lists(st.none() | st.floats(0.0, 100.0), min_size=1, max_size=12))
def test_each_figure_stands_at_the_height_of_its_row_the_first_on_top(figures):
    axes = _axes({f"row {place}": Bar(ours=value) for place, value in enumerate(figures)})
    names = dict(zip(axes.get_yticks(), (text.get_text() for text in axes.get_yticklabels()), strict=True))
    shown = {names[text.xy[1]]: text.get_text() for text in axes.texts}
    assert shown == {f"row {place}": f"{value:.1f}" for place, value in enumerate(figures) if value is not None}
    bottom, top = axes.get_ylim()
    assert bottom > top  # the axis counts downwards


@pytest.mark.parametrize(("ours", "side"), [(33.0, "right"), (45.0, "right"), (46.0, "left")])
def test_our_number_is_on_the_side_where_the_papers_is_not(ours, side):
    """Over the paper's diamond it would be read as the paper's number."""
    (number,) = _axes({"FedMAE": Bar(ours=ours, paper=45.0)}).texts
    assert number.get_ha() == side  # the end of the text that lies at the dot


def test_a_spread_ends_where_no_figure_can_lie():
    """98 % ± 5 was drawn to 103 %."""
    assert Bar(ours=98.0, std=5.0).spread == (5.0, 2.0) and Bar(ours=3.0, std=5.0).spread == (3.0, 5.0)
    axes = _axes({"FedMAE": Bar(ours=98.0, std=5.0)})
    drawn = [x for lines in axes.collections for x in np.array(lines.get_segments())[..., 0].flat]
    assert (min(drawn), max(drawn)) == (93.0, 100.0)


def test_columns_share_lines_and_each_line_begins_with_the_name_of_its_part():
    rows = {"FedMAE": [Bar(ours=float(place)) for place in range(6)]}
    lines = _lines("80 %\n", rows, ["Recall", "Precision", "F1", "Specificity", "AUC", "Accuracy"])
    assert [list(line) for line in lines] == [
        ["80 %\nRecall", "Precision", "F1", "Specificity"],
        ["80 %\nAUC", "Accuracy"],
    ]
    assert [panel["FedMAE"].ours for line in lines for panel in line.values()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_table_of_more_rows_than_bars_allow_is_drawn(tmp_path):
    rows = {f"row {place}": [Bar(ours=10.0 + place, paper=20.0), Bar()] for place in range(9)}
    picture = tmp_path / "dots.png"
    picture.write_bytes(plot_dots({"80 %": (rows, ["Recall", "F1"]), "10 %": ({}, [])}, title="x"))
    pixels = np.asarray(Image.open(picture).convert("RGB")).reshape(-1, 3)
    assert {(0, 114, 178), (213, 94, 0)} <= {tuple(int(c) for c in colour) for colour in np.unique(pixels, axis=0)}


def test_what_cannot_be_drawn_is_a_sentence():
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_dots({"80 %": ({"FedMAE": [Bar(paper=1.0)]}, ["Recall"])})
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_dots({"80 %": ({}, ["Recall"])})
    with pytest.raises(ValueError, match="41 rows, and at most 40"):
        plot_dots({"80 %": ({str(place): [Bar(ours=1.0)] for place in range(41)}, ["Recall"])})

"""A table as a bar chart: a group for each column, a bar for each row, and the paper's number as a line across its bar.

Bars differ in colour and hatching, and carry their names in the legend, so that no colour need be told apart. Our
figure stands at the end of its bar and the paper's at its line, never one where the other belongs. Values in, bytes
out: no file, no display, no global state of the plotting library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgefl_trainer.evaluate.plots.style import PALETTE, draw_legend, png

PAPER = "the paper, in italics"
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "++")
MAX_BARS = len(PALETTE)
MAX_COLUMNS = 4  # of the legend
MOST = 100.0  # per cent
SPAN = 0.8  # share of a group's width that its bars take
ROOM = 0.07  # share of the axis that a figure needs above its bar
CLEAR = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.8}  # behind a figure


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One figure, in per cent; None where there is none."""

    ours: float | None = None
    std: float | None = None
    paper: float | None = None

    @property
    def spread(self) -> tuple[float, float]:
        """How far the spread reaches down and up, in per cent: it ends at 0 and at 100, beyond which no figure lies."""
        value, std = self.ours or 0.0, self.std or 0.0
        return min(std, value), min(std, MOST - value)


def plot_bars(rows: Mapping[str, Sequence[Bar]], columns: Sequence[str], *, title: str = "") -> bytes:
    """Return the picture as PNG bytes; `rows` names each row's bars, column by column.

    A `ValueError` where there is no figure to draw, or there are too many rows.
    """
    bars = [bar for line in rows.values() for bar in line]
    if not any(bar.ours is not None for bar in bars):
        raise ValueError("there is nothing to draw: no row has a figure")
    if len(rows) > MAX_BARS:
        raise ValueError(f"a group has {len(rows)} bars, and at most {MAX_BARS} can be told apart")
    figure = Figure(figsize=(2.4 + 2.6 * len(columns), 4.4), layout="constrained")
    axes = figure.add_subplot()
    width = SPAN / len(rows)
    low = min(value for bar in bars for value in (bar.ours, bar.paper) if value is not None)
    high = max(value for bar in bars for value in ((bar.ours or 0.0) + bar.spread[1], bar.paper or 0.0))
    floor = max(0.0, 5.0 * (low // 5.0) - 5.0)
    for place, (name, line) in enumerate(rows.items()):
        left = [column - SPAN / 2 + width * (place + 0.5) for column in range(len(columns))]
        _draw(axes, left, line, name, place, width)
        for x, bar in zip(left, line, strict=True):
            _annotate(axes, x, bar, floor, ROOM * (high - floor))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylim(bottom=floor)
    axes.set_ylabel("per cent; the axis does not begin at 0" if axes.get_ylim()[0] > 0 else "per cent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    draw_legend(figure, axes, MAX_COLUMNS)
    if title:
        figure.suptitle(title, fontsize=11)
    return png(figure, dpi=150)


def _draw(axes: Axes, left: Sequence[float], line: Sequence[Bar], name: str, place: int, width: float) -> None:
    """One row's bars, and lines at the paper's numbers across them."""
    axes.bar(
        left,
        [bar.ours or 0.0 for bar in line],
        width * 0.92,
        yerr=np.array([bar.spread for bar in line]).T if any(bar.std for bar in line) else None,
        capsize=3,
        color=PALETTE[place],
        hatch=HATCHES[place],
        edgecolor="white",
        label=name,
    )
    known = axes.get_legend_handles_labels()[1]
    printed = [(x, bar.paper) for x, bar in zip(left, line, strict=True) if bar.paper is not None]
    if printed:
        axes.hlines(
            [value for _, value in printed],
            [x - width / 2 for x, _ in printed],
            [x + width / 2 for x, _ in printed],
            color="black",
            linewidth=1.8,
            label="_" if PAPER in known else PAPER,  # once, at the first row that has a number
        )


def _annotate(axes: Axes, x: float, bar: Bar, floor: float, room: float) -> None:
    """The figures of one bar; `room` is what a figure needs above it, in per cent of the axis."""
    ours = floor if bar.ours is None else bar.ours
    end = ours + bar.spread[1]
    inside = bar.paper is not None and ours <= bar.paper < end + room and ours - floor > room  # the line is in the way
    axes.annotate(
        "–" if bar.ours is None else f"{bar.ours:.2f}",
        (x, ours if inside else end),
        xytext=(0, -4 if inside else 3),
        textcoords="offset points",
        ha="center",
        va="top" if inside else "bottom",
        fontsize=8,
        bbox=CLEAR,
    )
    if bar.paper is not None:
        above = bar.paper >= ours
        axes.annotate(
            f"{bar.paper:.2f}",
            (x, bar.paper),
            xytext=(0, 3 if above else -4),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=7,
            style="italic",
            bbox=CLEAR,
        )

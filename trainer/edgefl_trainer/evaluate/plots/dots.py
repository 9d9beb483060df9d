"""A table as dots: a line for each row, a panel for each column, and the paper's number as an open diamond.

For tables of many rows, where bars side by side could not be told apart: each row has its own height and its name on
the left, so that no colour or hatching is needed. Panels of one column share no axis with those of another, as a
recall and an area under the curve do not compare. Values in, bytes out: no file, no display, no global state of the
plotting library.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from edgefl_trainer.evaluate.plots.bars import Bar
from edgefl_trainer.evaluate.plots.style import png

OURS, PAPER = "#0072B2", "#D55E00"
MAX_ROWS = 40
ACROSS = 4  # panels beside one another
PANEL_INCHES = 1.85  # width of a panel
ROW_INCHES = 0.25  # height of a row
ROOM = 0.3  # share of the span of the figures that stays free on either side, for the numbers

BarRows = Mapping[str, Sequence[Bar]]
"""Name of a row → its figures, column by column."""


def plot_dots(parts: Mapping[str, tuple[BarRows, Sequence[str]]], *, title: str = "") -> bytes:
    """Return the picture as PNG bytes; `parts` holds each part's rows and the names of its columns.

    A `ValueError` where there is no figure to draw, or there are too many rows.
    """
    drawn = {name: part for name, part in parts.items() if part[0]}
    panels = [
        line
        for name, (rows, columns) in drawn.items()
        for line in _lines(f"{name}\n" if len(drawn) > 1 else "", rows, columns)
    ]
    bars = [bar for line in panels for panel in line.values() for bar in panel.values()]
    if not any(bar.ours is not None for bar in bars):
        raise ValueError("there is nothing to draw: no row has a figure")
    heights = [len(next(iter(line.values()))) for line in panels]
    if max(heights) > MAX_ROWS:
        raise ValueError(f"there are {max(heights)} rows, and at most {MAX_ROWS} fit into one picture")
    width = max(len(line) for line in panels)
    size = (2.0 + PANEL_INCHES * width, 1.0 + sum(ROW_INCHES * height + 0.75 for height in heights))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(panels), width, squeeze=False, gridspec_kw={"height_ratios": heights})
    for places, line in zip(grid, panels, strict=True):
        for axes in places[len(line) :]:
            axes.set_axis_off()
        for axes, (name, panel) in zip(places, line.items(), strict=False):
            _draw(axes, panel, names=axes is places[0])
            axes.set_title(name, fontsize=9)
    figure.legend(handles=_kinds(bars), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    return png(figure, dpi=150)


def _lines(part: str, rows: BarRows, columns: Sequence[str]) -> list[dict[str, dict[str, Bar]]]:
    """The panels of a part, as many beside one another as fit: title → row → figure; the first has the part's name."""
    panels = [(name, {row: bars[place] for row, bars in rows.items()}) for place, name in enumerate(columns)]
    lines = [panels[start : start + ACROSS] for start in range(0, len(panels), ACROSS)]
    return [{(part if place == 0 else "") + name: panel for place, (name, panel) in enumerate(line)} for line in lines]


def _kinds(bars: Sequence[Bar]) -> list[Line2D]:
    """What the legend shows."""
    ours = Line2D([], [], marker="o", color=OURS, linestyle="", label="measured here, per cent")
    paper = Line2D([], [], marker="D", color=PAPER, markerfacecolor="white", linestyle="", label="printed in the paper")
    return [ours, paper] if any(bar.paper is not None for bar in bars) else [ours]


def _draw(axes: Axes, panel: Mapping[str, Bar], *, names: bool) -> None:
    """One column: a dot, its spread and its number for each row, the first row on top."""
    values = [value for bar in panel.values() for value in (bar.ours, bar.paper) if value is not None]
    for height, bar in enumerate(panel.values()):
        if bar.paper is not None:
            axes.plot([bar.paper], [height], "D", color=PAPER, markerfacecolor="white", markersize=5)
        if bar.ours is not None:
            ends = [[reach] for reach in bar.spread] if bar.std else None
            axes.errorbar([bar.ours], [height], xerr=ends, fmt="o", color=OURS, markersize=5, capsize=2)
            left = bar.paper is not None and bar.paper >= bar.ours
            _number(axes, bar.ours, bar.spread[0 if left else 1], height, left=left)
    axes.set_yticks(range(len(panel)), list(panel) if names else [""] * len(panel), fontsize=8)
    axes.set_ylim(len(panel) - 0.5, -0.5)
    if values:
        free = ROOM * max(1.0, max(values) - min(values))
        axes.set_xlim(min(values) - free, max(values) + free)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(True)


def _number(axes: Axes, value: float, std: float, height: int, *, left: bool) -> None:
    """Our figure beside its dot, on the side where the paper's number is not."""
    axes.annotate(
        f"{value:.1f}",
        (value - std if left else value + std, height),
        xytext=(-5 if left else 5, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="center",
        fontsize=7,
    )

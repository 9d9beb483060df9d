"""A table as a bar chart: a group for each column, a bar for each row, and the paper's number as a line across its bar.

Bars differ in colour and hatching, and carry their names in the legend and their figures on top, so that no colour need
be told apart. Values in, bytes out: no file, no display, no global state of the plotting library.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from edgefl_trainer.evaluate.plot import COLOURS

HATCHES = ("", "//", "..", "\\\\", "xx", "--", "oo", "++")
MAX_BARS = len(COLOURS)
SPAN = 0.8  # share of a group's width that its bars take


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One figure, in per cent; None where there is none."""

    ours: float | None = None
    std: float | None = None
    paper: float | None = None


def plot_bars(rows: Mapping[str, Sequence[Bar]], columns: Sequence[str], *, title: str = "") -> bytes:
    """Return the picture as PNG bytes.

    Args:
        rows: Name of a row → its bars, column by column.
        columns: Names of the groups.
        title: Above the picture.

    Raises:
        ValueError: There is no figure to draw, or there are too many rows.
    """
    bars = [bar for line in rows.values() for bar in line]
    if not any(bar.ours is not None for bar in bars):
        raise ValueError(f"none of the {len(rows)} rows has a figure; nothing to draw")
    if len(rows) > MAX_BARS:
        raise ValueError(f"{len(rows)} bars in a group are more than the {MAX_BARS} that can be told apart")
    figure = Figure(figsize=(2.4 + 2.6 * len(columns), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = SPAN / len(rows)
    for place, (name, line) in enumerate(rows.items()):
        left = [column - SPAN / 2 + width * (place + 0.5) for column in range(len(columns))]
        _draw(axes, left, line, name, place, width)
    axes.set_xticks(range(len(columns)), columns)
    low = min(value for bar in bars for value in (bar.ours, bar.paper) if value is not None)
    axes.set_ylim(bottom=max(0.0, 5.0 * (low // 5.0) - 5.0))
    axes.set_ylabel("per cent; the axis does not begin at 0" if axes.get_ylim()[0] > 0 else "per cent")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(4, len(rows) + 1), frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _draw(axes: Axes, left: Sequence[float], line: Sequence[Bar], name: str, place: int, width: float) -> None:
    """One row's bars, their figures, and the paper's numbers across them."""
    axes.bar(
        left,
        [bar.ours or 0.0 for bar in line],
        width * 0.92,
        yerr=[bar.std or 0.0 for bar in line] if any(bar.std for bar in line) else None,
        capsize=3,
        color=COLOURS[place],
        hatch=HATCHES[place],
        edgecolor="white",
        label=name,
    )
    for x, bar in zip(left, line, strict=True):  # above whisker and printed line, so that neither runs through it
        top = max((bar.ours or 0.0) + (bar.std or 0.0), bar.paper or 0.0)
        text = f"{bar.ours:.2f}" if bar.ours is not None else "–"
        axes.annotate(text, (x, top), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8)
    printed = [(x, bar.paper) for x, bar in zip(left, line, strict=True) if bar.paper is not None]
    if printed:
        axes.hlines(
            [value for _, value in printed],
            [x - width / 2 for x, _ in printed],
            [x + width / 2 for x, _ in printed],
            color="black",
            linewidth=1.8,
            label="the paper" if place == 0 else "_",
        )

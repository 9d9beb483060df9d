"""Calibration and risk-coverage of each site as small pictures side by side: PNG bytes from what a run kept."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from edgefl_trainer.evaluate.plots.style import CHANCE, PALETTE, png
from edgefl_trainer.evaluate.risk_coverage import CURVE

MOST_PANELS = 12
ACROSS = 4
PANEL_INCHES = 1.9
DOTS_PER_INCH = 170


def plot_reliability(curves: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Draw the share of right answers over the mean top probability, a panel for each site."""
    figure, panels = _panels(list(curves), "top probability", "named rightly")
    for axes, one in zip(panels, curves.values(), strict=True):
        rows, said, right = zip(*one["reliability"], strict=True)
        axes.plot([0, 1], [0, 1], **CHANCE)
        axes.plot(said, right, "-", color=PALETTE[0], linewidth=1.2)
        axes.scatter(said, right, s=[14 + 90 * count / max(rows) for count in rows], color=PALETTE[0], zorder=3)
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.02, 1.02)
    return png(figure, metadata={"Software": None})


def plot_risk(curves: Mapping[str, Mapping[str, Any]], referral: Mapping[str, Mapping[str, Any] | None]) -> bytes:
    """Draw wrong answers over the share that is answered, a panel for each site; a dot is the threshold in force."""
    figure, panels = _panels(list(curves), "answered, the most certain first", "wrong among them")
    for axes, (name, one) in zip(panels, curves.items(), strict=True):
        axes.plot(CURVE, one["risk"], color=PALETTE[0], linewidth=1.8)
        axes.axhline(one["risk"][-1], **CHANCE)
        point = referral.get(name)
        if point and point.get("referred") is not None and point.get("error") is not None:
            axes.plot([1 - point["referred"]], [point["error"]], "o", color=PALETTE[3], markersize=7, clip_on=False)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, max(0.05, *one["risk"]) * 1.1)
    return png(figure, metadata={"Software": None})


def _panels(names: Sequence[str], across: str, up: str) -> tuple[Figure, list[Axes]]:
    columns = min(ACROSS, len(names))
    lines = math.ceil(len(names) / columns)
    figure = Figure(
        figsize=(0.4 + PANEL_INCHES * columns, 0.5 + PANEL_INCHES * 0.95 * lines),
        dpi=DOTS_PER_INCH,
        layout="constrained",
    )
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(grid, names, strict=False):
        axes.set_title(_short(name), fontsize=8, parse_math=False)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(across, fontsize=8)
    figure.supylabel(up, fontsize=8)
    return figure, list(grid[: len(names)])


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:12]}…{name[-15:]}"

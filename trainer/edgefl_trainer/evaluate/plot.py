"""Balanced accuracy over rounds as a PNG, drawn from the lines of ``metrics.jsonl``.

One run: a line per site and a black one for their mean. Several runs: a line per run for the mean over sites, and a
dashed one for its worst site. Values in, bytes out: no file, no display, no global state of the plotting library.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Curves = dict[str, dict[int, float]]
"""Site name to round to figure."""

# Okabe and Ito's colours, told apart with colour-blind eyes too; black is kept for the mean.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C564B", "#7F7F7F")


def curves(lines: Sequence[Mapping[str, Any]], metric: str = "balanced_accuracy") -> Curves:
    """Pick one figure from the lines of a run; a later line of the same round and site replaces an earlier one.

    Args:
        lines: Objects with ``round`` and ``site``; those without the figure, or with ``None``, are passed over.
        metric: Key of the figure.
    """
    found: Curves = {}
    for line in lines:
        value = line.get(metric)
        if value is not None and "site" in line and "round" in line:
            found.setdefault(str(line["site"]), {})[int(line["round"])] = float(value)
    return {name: found[name] for name in sorted(found)}


def plot_rounds(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], *, metric: str = "balanced_accuracy", title: str = ""
) -> bytes:
    """Return the picture as PNG bytes.

    Args:
        runs: Name of a run to the lines of its ``metrics.jsonl``.
        metric: Key of the figure to draw; it must lie in [0, 1].
        title: Above the picture.

    Raises:
        ValueError: No line of any run holds the figure.
    """
    found = {name: sites for name, lines in runs.items() if (sites := curves(lines, metric))}
    if not found:
        raise ValueError(f"no line of the {len(runs)} runs holds {metric!r}; nothing to draw")
    figure = Figure(figsize=(7.5, 4.5), dpi=120, layout="constrained")  # inches
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if len(found) == 1:
        _draw_sites(axes, next(iter(found.values())))
    else:
        _draw_runs(axes, found)
    axes.set_xlabel("round")
    axes.set_ylabel(metric.replace("_", " "))
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _mean_curve(sites: Curves) -> tuple[list[int], list[list[float]]]:
    """Return the rounds and, for each, the figures of the sites that have one."""
    rounds = sorted({number for curve in sites.values() for number in curve})
    return rounds, [[curve[number] for curve in sites.values() if number in curve] for number in rounds]


def _draw_sites(axes: Axes, sites: Curves) -> None:
    for place, (name, curve) in enumerate(sites.items()):
        rounds = sorted(curve)
        colour = COLOURS[place % len(COLOURS)]
        axes.plot(
            rounds, [curve[number] for number in rounds], "o-", color=colour, markersize=3, linewidth=1.2, label=name
        )
    if len(sites) > 1:
        rounds, figures = _mean_curve(sites)
        means = [float(np.mean(values)) for values in figures]
        axes.plot(rounds, means, "o-", color="black", linewidth=2.4, markersize=4, label=f"mean of {len(sites)} sites")


def _draw_runs(axes: Axes, runs: Mapping[str, Curves]) -> None:
    axes.plot([], [], "--", color="black", linewidth=1, label="worst site")
    for place, (name, sites) in enumerate(runs.items()):
        colour = COLOURS[place % len(COLOURS)]
        rounds, figures = _mean_curve(sites)
        axes.plot(rounds, [min(values) for values in figures], "--", color=colour, linewidth=1, alpha=0.8)
        axes.plot(
            rounds, [float(np.mean(v)) for v in figures], "o-", color=colour, linewidth=2, markersize=4, label=name
        )

"""What `uncertainty.py` measured, as Markdown tables and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.uncertainty.uncertainty_measures import ONE_HEAD, TODAY
from edgefl_trainer.evaluate.plots.style import CHANCE, DASHES, PALETTE, draw_legend, png

CURVE = tuple(np.linspace(0.1, 1.0, 46))
RULE = ("referred", "error of the rest")
DRAWN = (TODAY, "vacuity, no discount", "dissonance", "1 - p", "Mahalanobis", "5 heads, 1 - p")
ACROSS = 3  # panels beside one another
MODELS = ("the model", ONE_HEAD, "all new heads")


def tables(found: Mapping[str, Any]) -> Iterator[str]:
    """All figures as Markdown, the rows that decide first."""
    sites = list(found["rows"])
    for kind in ("tune", "reported"):
        part = found[kind]
        yield f"\n## {kind} rows: " + ", ".join(f"{site} {found['rows'][site][kind]:,}" for site in sites) + "\n"
        models = [name for name in MODELS if name in part["mean"]]
        names = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "ece": "ECE", "brier": "Brier"}
        for figure, words in names.items():
            yield from _table(words, part, models, figure, sites)
        measures = [name for name in part["mean"] if name not in models]
        told = {
            "aurc": "AURC",
            "risk 70%": "risk at 70 % over risk at all",
            "risk 90%": "risk at 90 % over risk at all",
        }
        told |= {figure: f"AUROC against {figure}" for figure in part["mean"][TODAY] if figure not in {*told, *RULE}}
        told |= {"referred": "share referred", "error of the rest": "error of the rest"}
        for figure, title in told.items():
            yield from _table(title, part, measures, figure, sites)


def _table(
    title: str, part: Mapping[str, Any], names: Sequence[str], figure: str, sites: Sequence[str]
) -> Iterator[str]:
    """One figure: a line for each measure, a column for each site, then the mean and how it differs from today's.

    Where heads were learned anew, a column tells how several differ from one.
    """
    by_seed = {name: part["mean"][name][figure].get("by_seed", []) for name in names}
    several = any(len(each) > 1 for each in by_seed.values())
    heads = [title, *sites, "mean (95 %)", f"difference from {TODAY} (95 %)", "clearly lower, higher at"]
    of_heads = any("over_one" in part["mean"][name][figure] for name in names)
    heads += [f"minus {ONE_HEAD} (95 %)"] * of_heads + ["by seed"] * several
    yield f"| {' | '.join(heads)} |"
    yield "|---|" + "---:|" * (len(heads) - 1)
    for name in names:
        each = [part[site][name].get(figure) for site in sites]
        mean = part["mean"][name][figure]
        bounds = [one["difference_interval"] for one in each if one and one.get("difference_interval")]
        clear = f"{sum(high < 0 for _, high in bounds)}, {sum(low > 0 for low, _ in bounds)}" if bounds else "–"
        cells = ["–" if one is None else f"{one['value']:.3f}" for one in each]
        less = _spoken(mean["difference"], mean["difference_interval"]) if "difference" in mean else "–"
        line = [name, *cells, _spoken(mean["value"], mean["interval"]), less, clear]
        if of_heads:
            line.append(_spoken(mean["over_one"], mean["over_one_interval"]) if "over_one" in mean else "–")
        if several:
            line.append(", ".join(f"{one:+.3f}" for one in by_seed[name]) or "–")
        yield f"| {' | '.join(line)} |"
    yield ""


def _spoken(value: float, bounds: Sequence[float] | None) -> str:
    return f"{value:.3f}" + (f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else "")


def picture(found: Mapping[str, Any]) -> bytes:
    """The risk-coverage curve of each site on its reported rows, as a PNG."""
    curves = found["curves"]
    lines_of_panels = -(-len(curves) // ACROSS)
    figure = Figure(figsize=(11, 0.7 + 3.1 * lines_of_panels), dpi=110, layout="constrained")
    grid = figure.subplots(lines_of_panels, min(ACROSS, len(curves)), squeeze=False).flatten()
    for axes in grid[len(curves) :]:
        axes.set_axis_off()
    for axes, (site, lines) in zip(grid, curves.items(), strict=False):
        shown = [name for name in DRAWN if name in lines]
        for place, name in enumerate(shown):
            label = f"{name} (today)" if name == TODAY else name
            axes.plot(
                CURVE, lines[name], linestyle=DASHES[place % len(DASHES)], color=PALETTE[place], lw=1.8, label=label
            )
        axes.axhline(lines[TODAY][-1], **CHANCE)
        axes.set_title(f"{site}, {found['rows'][site]['reported']:,} pictures", fontsize=10)
        axes.set_xlim(CURVE[0], 1)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("wrong answers among them", fontsize=10)
    grid[0].set_xlabel("share answered, the most certain first", fontsize=9)
    draw_legend(figure, grid[0], len(DRAWN))
    return png(figure, metadata={"Software": None})

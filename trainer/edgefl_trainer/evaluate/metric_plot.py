"""One figure of finished runs as a PNG: a dot for each site, and the mean with its spread, on an axis that fits it.

Sites differ in colour and marker and stand in the legend. Values in, bytes out.
"""

from collections.abc import Sequence

from matplotlib.figure import Figure

from edgefl_trainer.evaluate.one_class import MARK
from edgefl_trainer.evaluate.plot import MARKERS, PALETTE, png
from edgefl_trainer.evaluate.table import LOWER_IS_BETTER, TableRow

MAX_ROWS = 40
MARGIN = 0.08  # share of the values' span that stays free on both sides
LEAST_SPAN = 0.02
NOTE = f"\n{MARK}, hollow: one class only, says nothing; counts in the mean"


def plot_metric(rows: Sequence[TableRow], metric: str) -> bytes:
    """Return the picture as PNG bytes; a `ValueError` where no run has the figure, or there are too many rows."""
    values = [figure.mean for row in rows for figure in row.sites.values() if figure.mean is not None]
    if not values:
        raise ValueError(f"there is nothing to draw: no row has the figure {metric!r}")
    if len(rows) > MAX_ROWS:
        raise ValueError(f"there are {len(rows)} rows, and at most {MAX_ROWS} fit into one picture")
    ends = [row.mean.mean + side * (row.mean.std or 0) for row in rows for side in (-1, 1) if row.mean.mean is not None]
    names = sorted({name for row in rows for name in row.sites})
    marked = {name for row in rows for name in row.one_class}
    told = len(names) <= len(PALETTE)
    figure = Figure(figsize=(9, 1.8 + 0.42 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for place, name in enumerate(names):
        at = [(row.sites[name].mean, y) for y, row in enumerate(rows) if name in row.sites]
        known = [(x, y) for x, y in at if x is not None]
        axes.plot(
            [x for x, _ in known],
            [y for _, y in known],
            MARKERS[place % len(MARKERS)] if told else ".",
            color=PALETTE[place % len(PALETTE)] if told else "0.6",
            label=f"{name}{MARK if name in marked else ''}" if told else "_",
            alpha=0.9,
            markerfacecolor="none" if name in marked else None,
        )
    for y, row in enumerate(rows):
        if row.mean.mean is not None:
            axes.errorbar(
                [row.mean.mean],
                [y + 0.22],
                xerr=row.mean.std,
                fmt="|",
                color="black",
                capsize=3,
                label="mean ± std" if y == 0 else "_",
            )
    low, high = min([*values, *ends]), max([*values, *ends])
    free = MARGIN * max(high - low, LEAST_SPAN)
    axes.set_xlim(max(low - free, -free), high + free)  # no figure is below 0
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    axes.set_xlabel(f"{metric.replace('_', ' ')} of each site; {better} is better" + (NOTE if marked else ""))
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return png(figure, metadata={"Software": None})

"""One figure of finished runs as a PNG: a dot for each site, and the mean with its spread, on an axis that fits it.

Sites differ in colour and marker and stand in the legend; rows have the table's names. Those of one class are hollow
and in no mean. Chance is a dotted line where the axis need not become twice as long for it; where sites differ in it,
each row has those of its sites and of its mean. Values in, bytes out.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgefl_trainer.evaluate.chance import Chance, labels_of, rounded
from edgefl_trainer.evaluate.one_class import MARK
from edgefl_trainer.evaluate.plot import CHANCE, MARKERS, PALETTE, png
from edgefl_trainer.evaluate.table import LOWER_IS_BETTER, TableRow, named
from edgefl_trainer.evaluate.table import Figure as Spread

MAX_ROWS = 40
MARGIN = 0.08  # share of the values' span that stays free on both sides
LEAST_SPAN = 0.02
NOTE = f"\n{MARK}, hollow: one class only, says nothing; in no mean"


def plot_metric(rows: Sequence[TableRow], metric: str, chance: Sequence[Chance] = (), title: str = "") -> bytes:
    """Return the picture as PNG bytes; a `ValueError` where no run has the figure, or there are too many rows.

    `chance` is what an answer that never changes gets, of each row.
    """
    values = [figure.mean for row in rows for figure in row.sites.values() if figure.mean is not None]
    if not values:
        raise ValueError(f"there is nothing to draw: no row has the figure {metric!r}")
    if len(rows) > MAX_ROWS:
        raise ValueError(f"there are {len(rows)} rows, and at most {MAX_ROWS} fit into one picture")
    figure = Figure(figsize=(9, 1.8 + 0.42 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    marked = {name for row in rows for name in row.one_class}
    _draw_sites(axes, rows, marked)
    means = [row.several if row.one_class else row.mean for row in rows]
    _draw_means(axes, means)
    ends = [max(0.0, mean.mean + side * (mean.std or 0)) for mean in means for side in (-1, 1) if mean.mean is not None]
    low, high = min([*values, *ends]), max([*values, *ends])
    told = ""
    guessed = [of | ({} if one.mean is None else {"the mean": one.mean}) for one in chance for of in [dict(one.sites)]]
    if known := sorted({value for of in guessed for value in of.values()}):
        if max(high, known[-1]) - min(low, known[0]) <= 2 * max(high - low, LEAST_SPAN):
            _draw_chance(axes, guessed)
            low, high = min(low, known[0]), max(high, known[-1])
        else:
            told = f"; chance is {' to '.join(dict.fromkeys(f'{value:.3g}' for value in (known[0], known[-1])))}"
    free = MARGIN * max(high - low, LEAST_SPAN)
    axes.set_xlim(max(low - free, 0.0), high + free)  # no figure is below 0
    axes.set_yticks(range(len(rows)), named(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    axes.set_xlabel(f"{metric.replace('_', ' ')} of each site; {better} is better{told}" + (NOTE if marked else ""))
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    entries = len(axes.get_legend_handles_labels()[1])
    columns = 5 if len({value for of in guessed for value in of.values()}) < 2 else 3  # longer names
    figure.set_figheight(figure.get_figheight() + 0.45 * max(0, entries / columns - 1) + 0.3 * bool(title))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return png(figure, metadata={"Software": None})


def _draw_chance(axes: Axes, guessed: Sequence[Mapping[str, float]]) -> None:
    """Each row's chances across its height, those of one value in one line."""
    labels = labels_of(pair for of in guessed for pair in of.items())
    for value, label in labels.items():
        at = [y for y, of in enumerate(guessed) if value in map(rounded, of.values())]
        axes.vlines([value] * len(at), [y - 0.5 for y in at], [y + 0.5 for y in at], label=label, **CHANCE)


def _draw_sites(axes: Axes, rows: Sequence[TableRow], marked: set[str]) -> None:
    names = sorted({name for row in rows for name in row.sites})
    told = len(names) <= len(PALETTE)
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
            clip_on=False,  # a figure of 0 lies on the edge
        )


def _draw_means(axes: Axes, means: Sequence[Spread]) -> None:
    """Each row's mean below its sites; its spread ends at 0, below which no figure lies."""
    cut = any(mean.mean is not None and (mean.std or 0.0) > mean.mean for mean in means)
    told = "mean ± std, ended at 0" if cut else "mean ± std"
    for y, mean in enumerate(means):
        if mean.mean is not None:
            ends = None if mean.std is None else [[min(mean.std, mean.mean)], [mean.std]]
            axes.errorbar([mean.mean], [y + 0.22], xerr=ends, fmt="|", color="black", capsize=3, label=told)
            told = "_"

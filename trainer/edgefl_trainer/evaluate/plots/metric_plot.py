"""One figure of finished runs as a PNG: a dot for each site, and the mean with its spread, on an axis that fits it.

Sites differ in colour and marker and stand in the legend; rows have the table's names. Those of one class are hollow,
those that never trained half filled; one-class and held-out sites are in no mean. Sites of one figure stand below one
another. What a spread is over, and of how many, stands in the legend, or with each row where rows differ in it. Chance
is a dotted line where the axis need not become twice as long for it; where sites differ in it, each row has those of
its sites and of its mean. Values in, bytes out.
"""

from collections.abc import Mapping, Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgefl_protocol.sentences import counted
from edgefl_trainer.evaluate.chance import Chance, labels_of, rounded
from edgefl_trainer.evaluate.metrics import HIGHEST, metric_words
from edgefl_trainer.evaluate.one_class import MARK
from edgefl_trainer.evaluate.plots.style import CHANCE, MARKERS, PALETTE, draw_legend, png
from edgefl_trainer.evaluate.tables.rows import LOWER_IS_BETTER, TableRow, named
from edgefl_trainer.evaluate.tables.rows import Figure as Spread

MAX_ROWS = 40
NAME_WIDTH = 36  # characters of a line of a row's name: beyond, the axes would be cut
ROW_INCHES = 0.42
MAX_COLUMNS = 5  # of the legend
MARGIN = 0.08  # share of the values' span that stays free on both sides
LEAST_SPAN = 0.02
NOTE = f"\n{MARK}, hollow: one class only, says nothing; in no mean"
HALF = "half filled: a site that never trained"
HELD_OUT, NO_ROUND = "held out: no mean counts it", "took part in no round: the mean counts it"
STEP = 0.13  # of a row's height, between sites that have the same figure


def plot_metric(rows: Sequence[TableRow], metric: str, chance: Sequence[Chance] = (), title: str = "") -> bytes:
    """Return the picture as PNG bytes; a `ValueError` where no run has the figure, or there are too many rows.

    `chance` is what an answer that never changes gets, of each row.
    """
    values = [figure.mean for row in rows for figure in row.sites.values() if figure.mean is not None]
    if not values:
        raise ValueError(f"there is nothing to draw: no row has the figure {metric!r}")
    if len(rows) > MAX_ROWS:
        raise ValueError(f"there are {len(rows)} rows, and at most {MAX_ROWS} fit into one picture")
    over = [_over(row) for row in rows]
    alike = len(set(over)) == 1
    names = [fill(name, NAME_WIDTH) for name in named(rows)]
    if not alike:
        names = [f"{name}\n± {told}" for name, told in zip(names, over, strict=True)]
    deep = ROW_INCHES * sum(max(1.0, (name.count("\n") + 1) / 2) for name in names)  # a row holds two lines
    figure = Figure(figsize=(9, 1.8 + deep), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    marked = {name for row in rows for name in row.one_class}
    _draw_sites(axes, rows, marked)
    means = [row.several if row.one_class else row.mean for row in rows]
    most = HIGHEST.get(metric, 1.0)
    _draw_means(axes, means, over[0] if alike else "over what its row says", most)
    ends = [
        min(most, max(0.0, mean.mean + side * (mean.std or 0)))
        for mean in means
        for side in (-1, 1)
        if mean.mean is not None
    ]
    low, high = min([*values, *ends]), max([*values, *ends])
    notes = (NOTE if marked else "") + _told_of_untrained(rows)
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
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    axes.set_xlabel(f"{metric_words(metric)} of each site; {better} is better{told}" + notes)
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.set_figheight(figure.get_figheight() + 0.3 * bool(title) + 0.2 * notes.count("\n"))
    draw_legend(figure, axes, MAX_COLUMNS)
    return png(figure, metadata={"Software": None})


def _draw_chance(axes: Axes, guessed: Sequence[Mapping[str, float]]) -> None:
    """Each row's chances across its height, those of one value in one line."""
    labels = labels_of(pair for of in guessed for pair in of.items())
    for value, label in labels.items():
        at = [y for y, of in enumerate(guessed) if value in map(rounded, of.values())]
        axes.vlines([value] * len(at), [y - 0.5 for y in at], [y + 0.5 for y in at], label=label, **CHANCE)


def _over(row: TableRow) -> str:
    """Say what the mean of a row and its spread are over."""
    if row.spread_over == "seeds":
        return f"over {counted(len(row.seeds), 'seed')}"
    left = {*row.one_class, *row.held_out}
    return f"over {counted(sum(one.mean is not None for name, one in row.sites.items() if name not in left), 'site')}"


def _draw_sites(axes: Axes, rows: Sequence[TableRow], marked: set[str]) -> None:
    names = sorted({name for row in rows for name in row.sites})
    held_out = {name for row in rows for name in row.held_out}
    told = len(names) <= len(PALETTE)
    beside = [_beside(row) if told else {} for row in rows]
    for place, name in enumerate(names):
        colour = PALETTE[place % len(PALETTE)] if told else "0.6"
        kind = f"{MARK if name in marked else ''}{' (held out)' if name in held_out else ''}"
        label = f"{name}{kind}" if told else "_"
        for untrained in (False, True):  # drawn once for each, as a site may train in one row and not in another
            at = [
                (figure.mean, y + beside[y].get(name, 0.0))
                for y, row in enumerate(rows)
                if (figure := row.sites.get(name)) is not None and figure.mean is not None
                if (name in row.held_out or name in row.no_round) == untrained
            ]
            if not at:
                continue
            axes.plot(
                [x for x, _ in at],
                [y for _, y in at],
                MARKERS[place % len(MARKERS)] if told else ".",
                color=colour,
                label=label,
                alpha=0.9,
                fillstyle="left" if untrained else "full",
                markersize=9 if told and untrained else None,
                markerfacecolor="none" if name in marked else colour,
                markerfacecoloralt="white",
                clip_on=False,  # a figure of 0 lies on the edge
            )
            label = "_"


def _beside(row: TableRow) -> dict[str, float]:
    """How far from the middle of its row each site stands: sites of one figure would hide one another."""
    places: dict[float, list[str]] = {}
    for name, figure in sorted(row.sites.items()):
        if figure.mean is not None:
            places.setdefault(figure.mean, []).append(name)
    return {
        name: STEP * (place - (len(names) - 1) / 2) for names in places.values() for place, name in enumerate(names)
    }


def _told_of_untrained(rows: Sequence[TableRow]) -> str:
    """What half filled means, and which of these sites the means count; nothing where there is none."""
    kinds = [(HELD_OUT, any(row.held_out for row in rows)), (NO_ROUND, any(row.no_round for row in rows))]
    told = [what for what, there in kinds if there]
    return f"\n{HALF}\n{'; '.join(told)}" if told else ""


def _draw_means(axes: Axes, means: Sequence[Spread], over: str, most: float) -> None:
    """Each row's mean below its sites; its spread ends at 0 and at `most`, beyond which no figure lies."""
    known = [(mean.mean, mean.std or 0.0) for mean in means if mean.mean is not None]
    cut = ["0"] * any(mean < std for mean, std in known) + [f"{most:g}"] * any(mean + std > most for mean, std in known)
    spread = " ± std" * any(mean.std is not None for mean in means)
    told = f"mean{spread} {over}" + (f", ended at {' and '.join(cut)}" if cut else "")
    for y, mean in enumerate(means):
        if mean.mean is not None:
            ends = None if mean.std is None else [[min(mean.std, mean.mean)], [min(mean.std, most - mean.mean)]]
            axes.errorbar([mean.mean], [y + 0.3], xerr=ends, fmt="|", color="black", capsize=3, label=told)
            told = "_"

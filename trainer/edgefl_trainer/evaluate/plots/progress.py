"""Balanced accuracy over rounds and over bytes as a PNG, drawn from the lines of ``metrics.jsonl``.

One run: a line per site and a black one for their mean. Several: a line per name for the mean over sites, then over its
runs (seeds), each of which is a thin line of the same colour. Sites of one class are in no mean. Lines differ in
colour, dash and marker, and carry their names at the end, so that no colour need be told apart; of lines that are the
same the first is the widest and frames the others, and their names say so. Number of rows that a figure is of: said
where the lines tell it. Chance is a dotted line, one for each value where sites have several. Values in, bytes out: no
file, no display, no global state of the plotting library.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from edgefl_trainer.evaluate.chance import Chance, labels_of
from edgefl_trainer.evaluate.metrics import JUDGED_ROWS, metric_words
from edgefl_trainer.evaluate.one_class import MARK
from edgefl_trainer.evaluate.plots.style import CHANCE, DASHES, MARKERS, PALETTE, png
from edgefl_trainer.evaluate.plots.tracks import (
    FEW_BYTES,
    MAX_NAMES,
    MEAN,
    Drawn,
    Lines,
    curves,
    mean_track,
    rows_of,
    site_tracks,
    sites_of_rounds,
)

LONGEST_NAME = 42  # characters of a name beside the axes
ROOM = 0.055  # share of the height that a name takes
EQUAL = " (equal)"  # ends the name of a line that another one lies upon
WIDER = 3.8  # points by which a line, and its marker, frames one that is the same
LEADS_TO, SAMPLE, NAMES = (
    1.03,
    (1.05, 1.08, 1.11),
    1.125,
)  # beside the axes: the ends of threads, samples of lines, names
THREAD: dict[str, Any] = {
    "arrowstyle": "-",
    "color": "0.65",
    "linewidth": 0.6,
    "linestyle": ":",
    "shrinkA": 0,
    "shrinkB": 0,
}


def plot_progress(
    runs: Mapping[str, Sequence[Lines]],
    *,
    metric: str = "balanced_accuracy",
    title: str = "",
    one_class: Mapping[str, Collection[str]] | None = None,
    chance: Mapping[str, Chance] | None = None,
) -> bytes:
    """Return the picture as PNG bytes: over rounds on the left, over bytes on the right.

    Args:
        runs: Name to the lines of its runs, one for each seed.
        metric: Key of the figure to draw; it must lie in [0, 1].
        one_class: Name to the sites whose figures say nothing (`evaluate.one_class`).
        chance: Name to what an answer that never changes gets.

    Raises:
        ValueError: No line of any run holds the figure, a run has no mean, or there are too many names.
    """
    found = {name: some for name, seeds in runs.items() if (some := [s for s in seeds if curves(s, metric)])}
    if not found:
        raise ValueError(f"there is nothing to draw: the runs recorded no {metric!r}")
    marked = {name: frozenset((one_class or {}).get(name, ())) for name in found}
    alone = sum(map(len, found.values())) == 1
    if alone:
        ((name, (lines,)),) = found.items()
        tracks = site_tracks(lines, metric, marked[name])
        guessed = _site_chances(curves(lines, metric), (chance or {}).get(name))
    else:
        tracks = {_of_seeds(name, seeds): mean_track(seeds, metric, marked[name]) for name, seeds in found.items()}
        guessed = labels_of((name, one.mean) for name, one in (chance or {}).items() if name in found)
    if len(tracks) > MAX_NAMES:
        raise ValueError(f"there are {len(tracks)} lines, and at most {MAX_NAMES} fit into one picture")
    figure = Figure(
        figsize=(13, max(4.8, 0.27 * (len(tracks) + len(guessed)))), dpi=110, layout="constrained"
    )  # inches
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, tracks, side=0)
    _draw(right, tracks, side=1)
    told = _told_of_sites(found) if alone else _told_of_means(found, metric, marked)
    without = f"\nwithout sites of one class ({MARK})" if any(marked.values()) else ""
    left.set_ylabel(f"{metric_words(metric)}{told}{without}")
    left.set_xlabel("round")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("bytes of all sites, up and down")
    _bytes_axis(right, [x for one in tracks.values() for sides in (one.sides, *one.seeds) for x in sides[1][0]])
    for axes in (left, right):
        for value, label in guessed.items():
            axes.axhline(value, label=label, **CHANCE)
        _name_lines(axes)
    figure.suptitle(title)
    return png(figure, metadata={"Software": None})


def _of_seeds(name: str, seeds: Sequence[Lines]) -> str:
    return f"{name} ({len(seeds)} seeds)" if len(seeds) > 1 else name


def _told_of_sites(found: Mapping[str, Sequence[Lines]]) -> str:
    kept = any(JUDGED_ROWS in line for seeds in found.values() for lines in seeds for line in lines)
    return "\nn: how many a site has" if kept else ""


def _told_of_means(found: Mapping[str, Sequence[Lines]], metric: str, one_class: Mapping[str, Collection[str]]) -> str:
    """What the mean of a run is over, sites and rows, and what is thin: said below the name of the figure."""
    runs = [(lines, sites_of_rounds(lines, metric, one_class[name])) for name, some in found.items() for lines in some]
    sites = _range([len(names) for _, rounds in runs for names in rounds])
    whole = all(names == set().union(*rounds) for _, rounds in runs for names in rounds)
    rows = [(rows_of(lines, metric), rounds) for lines, rounds in runs]
    numbers = [
        sum(known[site] for site in names) for known, rounds in rows for names in rounds if known.keys() >= names
    ]
    told = len(numbers) == sum(len(rounds) for _, rounds in rows)
    judged = f", n = {_range(numbers)} tune rows together" if told else ""
    thin = "\nthin: one seed; thick: mean over seeds" if any(len(seeds) > 1 for seeds in found.values()) else ""
    return f"\nmean over {sites} site{'' if sites == '1' else 's'}{'' if whole else ' of each round'}{judged}{thin}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _site_chances(sites: Collection[str], chance: Chance | None) -> dict[float, str]:
    """Chance of each site of one run, and of their mean where it is drawn, with its label."""
    if chance is None:
        return {}
    mean = [("the mean", chance.mean)] if len(sites) > 1 else []
    drawn = sites if len(sites) < MAX_NAMES else ()
    return labels_of([*((name, value) for name, value in chance.sites.items() if name in drawn), *mean])


def _draw(axes: Axes, tracks: Mapping[str, Drawn], *, side: int) -> None:
    """The lines; markers stand at eight places at most. The seeds of a mean are thin, without marker and name."""
    everyone = [one.sides[side] for one in tracks.values()]
    for place, (name, one) in enumerate(tracks.items()):
        across, up = one.sides[side]
        mean = name.startswith(MEAN)
        colour = "black" if mean else PALETTE[place % len(PALETTE)]
        frame = WIDER * sum(_begins_as((across, up), later) for later in everyone[place + 1 :])
        same = EQUAL if everyone.count((across, up)) > 1 else ""
        for seed in one.seeds:
            axes.plot(*seed[side], color=colour, linewidth=0.7, alpha=0.7, label="_", zorder=1.5)
        axes.plot(
            across,
            up,
            linestyle="-" if mean else DASHES[place // len(PALETTE) % len(DASHES)],
            marker=MARKERS[(place + place // len(PALETTE)) % len(MARKERS)],
            markevery=max(1, len(across) // 8),
            markersize=4.5 + frame,
            color=colour,
            linewidth=(2.4 if mean or one.seeds else 1.6) + frame,
            label=name + same,
        )
    axes.grid(alpha=0.25)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_color("0.8")  # beyond it nothing is data


def _begins_as(line: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> bool:
    """Whether a line lies under another: equal to it, or to its beginning, as a run of fewer rounds is."""
    return all([*own] == [*longer][: len(own)] for own, longer in zip(line, other, strict=True))


def _bytes_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis in B, KiB, MiB and GiB."""
    axes.set_xscale("log", base=2)
    span = np.log2(max(values) / min(values)) if values else 0
    axes.xaxis.set_major_locator(LogLocator(base=2.0 ** max(1, int(np.ceil(span / 6))), numticks=12))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    if count > FEW_BYTES:
        return f"{count:.0f} B"
    return "0 B" if count == FEW_BYTES else ""


def _short(name: str) -> str:
    """A name that leaves room for the axes: of a long one, such as with a folder's path, the beginning and the end."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 3]}…{name[1 - LONGEST_NAME * 2 // 3 :]}"


def _name_lines(axes: Axes) -> None:
    """Each line's sample and name beside the axes, near the height of its end, and a grey thread that leads there."""
    low, high = axes.get_ylim()
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [np.asarray(line.get_xydata(), dtype=np.float64)[-1] for line in lines]  # x, y
    wanted = [float(end[1] - low) / (high - low) for end in ends]
    for height, end, line in zip(spread_out(wanted, ROOM), ends, lines, strict=True):
        sample = Line2D(SAMPLE, [height] * len(SAMPLE))
        sample.update_from(line)
        sample.set(transform=axes.transAxes, clip_on=False, linewidth=1.8, markersize=5, markevery=[1])
        axes.add_artist(sample)
        axes.text(NAMES, height, _short(str(line.get_label())), transform=axes.transAxes, va="center", fontsize=9)
        axes.annotate(
            "",
            xy=(float(end[0]), float(end[1])),
            xycoords=line.get_transform(),
            xytext=(LEADS_TO, height),
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops=THREAD,
        )


def spread_out(wanted: Sequence[float], room: float) -> list[float]:
    """Move heights (shares of the axes) at least `room` apart within [0, 1], in order, as little as possible."""
    order = np.argsort(wanted, kind="stable")
    room = min(room, 1 / max(1, len(order) - 1))
    groups: list[tuple[float, int]] = []  # middle and number of names that touch one another
    for height in np.array(wanted, dtype=np.float64)[order]:
        groups.append((float(height), 1))
        while len(groups) > 1 and _top(groups[-2], room) > _bottom(groups[-1], room) - room + 1e-12:
            (second, m), (first, n) = groups.pop(), groups.pop()
            groups.append(((first * n + second * m) / (n + m), n + m))
    flat = [_bottom(group, room) + room * i for group in groups for i in range(group[1])]
    for i in range(len(flat)):  # pushed up from the floor, then down from the ceiling
        flat[i] = max(flat[i], room * i)
    for i in range(len(flat)):
        flat[-1 - i] = min(flat[-1 - i], 1 - room * i)
    placed = np.empty(len(flat))
    placed[order] = flat
    return [float(height) for height in placed]


def _top(group: tuple[float, int], room: float) -> float:
    return group[0] + room * (group[1] - 1) / 2


def _bottom(group: tuple[float, int], room: float) -> float:
    return group[0] - room * (group[1] - 1) / 2

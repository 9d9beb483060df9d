"""Balanced accuracy over rounds and over bytes as a PNG, drawn from the lines of ``metrics.jsonl``.

One run: a line per site and a black one for their mean. Several: a line per name for the mean over sites, then over its
runs (seeds). Lines differ in colour, dash and marker, and carry their names at the end, so that no colour need be
told apart. Values in, bytes out: no file, no display, no global state of the plotting library.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

Curves = dict[str, dict[int, float]]
"""Site name to round to figure."""

Lines = Sequence[Mapping[str, Any]]
"""The lines of one run's ``metrics.jsonl``."""

Track = tuple[list[float], list[float]]
"""Where a line goes: x, y."""

# Okabe and Ito's colours, told apart with colour-blind eyes too; black is kept for the mean.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C564B", "#7F7F7F")
DASHES = ("-", "--", "-.", (0, (1, 1.2)))
MARKERS = "osD^vPX*"
MAX_NAMES = 20  # beyond, the names at the ends would not fit below one another
ROOM = 0.055  # share of the height that a name takes
FEW_BYTES = 1.0  # where a method that sends nothing stands on a logarithmic axis


def curves(lines: Lines, metric: str = "balanced_accuracy") -> Curves:
    """Pick one figure from the lines of a run; a later line of the same round and site replaces an earlier one.

    Lines without round, site or the figure, or with ``None``, are passed over.
    """
    found: Curves = {}
    for line in lines:
        value = line.get(metric)
        if value is not None and "site" in line and "round" in line:
            found.setdefault(str(line["site"]), {})[int(line["round"])] = float(value)
    return {name: found[name] for name in sorted(found)}


def bytes_by_round(lines: Lines) -> dict[int, float]:
    """Sum the bytes of all sites, up and down, from the start to the end of each round."""
    spent: dict[int, float] = {}
    for line in lines:
        both = float(line.get("bytes_up", 0)) + float(line.get("bytes_down", 0))
        spent[int(line.get("round", 0))] = spent.get(int(line.get("round", 0)), 0.0) + both
    total, found = 0.0, {}
    for number in sorted(spent):
        total += spent[number]
        found[number] = total
    return found


def plot_progress(runs: Mapping[str, Sequence[Lines]], *, metric: str = "balanced_accuracy", title: str = "") -> bytes:
    """Return the picture as PNG bytes: over rounds on the left, over bytes on the right.

    Args:
        runs: Name to the lines of its runs, one for each seed.
        metric: Key of the figure to draw; it must lie in [0, 1].

    Raises:
        ValueError: No line of any run holds the figure, or there are too many names.
    """
    found = {name: some for name, seeds in runs.items() if (some := [s for s in seeds if curves(s, metric)])}
    if not found:
        raise ValueError(f"there is nothing to draw: the runs recorded no {metric!r}")
    if len(found) == 1:
        tracks = _site_tracks(next(iter(found.values())), metric)
    else:
        tracks = {name: (_over_rounds(seeds, metric), _over_bytes(seeds, metric)) for name, seeds in found.items()}
    if len(tracks) > MAX_NAMES:
        raise ValueError(f"there are {len(tracks)} lines, and at most {MAX_NAMES} fit into one picture")
    figure = Figure(figsize=(13, max(4.8, 0.27 * len(tracks))), dpi=110, layout="constrained")  # inches
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, {name: both[0] for name, both in tracks.items()})
    _draw(right, {name: both[1] for name, both in tracks.items()})
    left.set_ylabel(metric.replace("_", " ") + ", mean over sites" * (len(found) > 1))
    left.set_xlabel("round")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("bytes of all sites, up and down")
    _bytes_axis(right, [x for _, both in tracks.items() for x in both[1][0]])
    for axes in (left, right):
        _name_lines(axes)
    figure.suptitle(title)
    return png(figure, metadata={"Software": None})


def png(figure: Figure, **options: Any) -> bytes:
    """Write a figure as the bytes of a PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", **options)
    return out.getvalue()


def _site_tracks(seeds: Sequence[Lines], metric: str) -> dict[str, tuple[Track, Track]]:
    """A track for each site (of the first seed), and their mean."""
    lines = seeds[0]
    spent = bytes_by_round(lines)
    sites = curves(lines, metric)
    tracks: dict[str, tuple[Track, Track]] = {}
    if len(sites) < MAX_NAMES:
        for name, curve in sites.items():
            figures = [curve[number] for number in sorted(curve)]
            sent = [max(FEW_BYTES, spent[number]) for number in sorted(curve)]
            tracks[name] = (([float(number) for number in sorted(curve)], figures), (sent, figures))
    if len(sites) != 1:
        tracks[f"mean of {len(sites)} sites"] = (_over_rounds(seeds[:1], metric), _over_bytes(seeds[:1], metric))
    return tracks


def _means(lines: Lines, metric: str) -> dict[int, float]:
    """Round to the mean over the sites that have a figure."""
    sites = curves(lines, metric)
    rounds = sorted({number for curve in sites.values() for number in curve})
    return {n: float(np.mean([curve[n] for curve in sites.values() if n in curve])) for n in rounds}


def _over_rounds(seeds: Sequence[Lines], metric: str) -> Track:
    means = [_means(lines, metric) for lines in seeds]
    rounds = sorted(set.intersection(*(set(found) for found in means)))
    return [float(n) for n in rounds], [float(np.mean([found[n] for found in means])) for n in rounds]


def _over_bytes(seeds: Sequence[Lines], metric: str) -> Track:
    rounds, figures = _over_rounds(seeds, metric)
    spent = [bytes_by_round(lines) for lines in seeds]
    return [max(FEW_BYTES, float(np.mean([found[int(n)] for found in spent]))) for n in rounds], figures


def _draw(axes: Axes, tracks: Mapping[str, Track]) -> None:
    """The lines; markers stand at eight places at most."""
    for place, (name, (across, up)) in enumerate(tracks.items()):
        mean = name.startswith("mean of ")
        axes.plot(
            across,
            up,
            linestyle="-" if mean else DASHES[place // len(PALETTE) % len(DASHES)],
            marker=MARKERS[(place + place // len(PALETTE)) % len(MARKERS)],
            markevery=max(1, len(across) // 8),
            markersize=4.5,
            color="black" if mean else PALETTE[place % len(PALETTE)],
            linewidth=2.4 if mean else 1.6,
            label=name,
        )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


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
    return f"{count:.0f} B"


def _name_lines(axes: Axes) -> None:
    """Each line's name and marker right of the axes, near the height of its end, and a thread from one to the other."""
    low, high = axes.get_ylim()
    lines = axes.get_lines()
    ends = [np.asarray(line.get_xydata(), dtype=np.float64)[-1] for line in lines]  # x, y
    wanted = [float(end[1] - low) / (high - low) for end in ends]
    for height, end, line in zip(spread_out(wanted, ROOM), ends, lines, strict=True):
        colour = line.get_color()
        axes.text(1.05, height, str(line.get_label()), transform=axes.transAxes, va="center", fontsize=9)
        axes.annotate(
            "",
            xy=(float(end[0]), float(end[1])),
            xytext=(1.03, height),
            textcoords="axes fraction",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "alpha": 0.7, "shrinkA": 0, "shrinkB": 0},
        )
        axes.plot(
            [1.03],
            [height],
            transform=axes.transAxes,
            marker=line.get_marker(),
            color=colour,
            markersize=5,
            clip_on=False,
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

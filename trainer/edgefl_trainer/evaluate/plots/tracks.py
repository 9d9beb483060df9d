"""The lines of a picture of rounds, as numbers: figures over rounds and over bytes, from lines of ``metrics.jsonl``.

Of one run a line for each site and one for their mean; of several runs of a name the mean over sites, then over runs
(seeds). Sites of one class are in no mean. A later line of the same round and site replaces an earlier one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgefl_trainer.evaluate.metrics import JUDGED_ROWS
from edgefl_trainer.evaluate.one_class import MARK

Curves = dict[str, dict[int, float]]
"""Site name to round to figure."""

Lines = Sequence[Mapping[str, Any]]
"""The lines of one run's ``metrics.jsonl``."""

Track = tuple[list[float], list[float]]
"""Where a line goes: x, y."""

Sides = tuple[Track, Track]
"""Over rounds on the left, over bytes on the right."""


@dataclass(frozen=True)
class Drawn:
    """A line of the picture, and the lines that it is the mean of."""

    sides: Sides
    seeds: Sequence[Sides] = ()  # none where it is the line of one run


MAX_NAMES = 20  # beyond, the names at the ends would not fit below one another
FEW_BYTES = 1.0  # where a method that sends nothing stands on a logarithmic axis
MEAN = "mean of "  # begins the name of a run's mean over its sites


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


def sites_of_rounds(lines: Lines, metric: str, without: Collection[str]) -> list[set[str]]:
    """Name the sites that each round's mean is over: with a part of the sites in each round, those that took part."""
    found: dict[int, set[str]] = {}
    for site, curve in curves(lines, metric).items():
        for number in curve.keys() if site not in without else ():
            found.setdefault(number, set()).add(site)
    return list(found.values())


def rows_of(lines: Lines, metric: str) -> dict[str, int]:
    """Return on how many rows each site was judged last; without the sites of a run that did not keep it."""
    return {
        str(line["site"]): int(line[JUDGED_ROWS])
        for line in lines
        if line.get(metric) is not None and "site" in line and JUDGED_ROWS in line
    }


def site_tracks(lines: Lines, metric: str, one_class: Collection[str]) -> dict[str, Drawn]:
    """Give a line for each site, and the mean of those with more than one class."""
    spent, rows = bytes_by_round(lines), rows_of(lines, metric)
    sites = curves(lines, metric)
    tracks: dict[str, Drawn] = {}
    if len(sites) < MAX_NAMES:
        for name, curve in sites.items():
            figures = [curve[number] for number in sorted(curve)]
            sent = [max(FEW_BYTES, spent[number]) for number in sorted(curve)]
            told = f"{name}{MARK}" if name in one_class else name
            told += f" (n = {rows[name]:,})" if name in rows else ""
            tracks[told] = Drawn((([float(number) for number in sorted(curve)], figures), (sent, figures)))
    others = sites.keys() - set(one_class)
    if len(sites) != 1 and others:
        whole = all(names == others for names in sites_of_rounds(lines, metric, one_class))
        which = f"{len(others)} sites" if whole else "the sites of each round"
        told = f"{MEAN}{which}{f' without {MARK}' if len(others) < len(sites) else ''}"
        tracks[told] = Drawn(_mean_tracks([lines], metric, one_class))
    return tracks


def mean_track(seeds: Sequence[Lines], metric: str, one_class: Collection[str]) -> Drawn:
    """Give the mean of some runs, and each of them where there are several."""
    each = [_mean_tracks([lines], metric, one_class) for lines in seeds] if len(seeds) > 1 else []
    return Drawn(_mean_tracks(seeds, metric, one_class), each)


def _mean_tracks(seeds: Sequence[Lines], metric: str, one_class: Collection[str]) -> Sides:
    """Over rounds and over bytes the mean over sites, then over seeds."""
    means = [_means(lines, metric, one_class) for lines in seeds]
    if not all(means):
        raise ValueError("a run's sites all have one class only, so it has no mean to draw")
    rounds = sorted(set.intersection(*(set(found) for found in means)))
    figures = [float(np.mean([found[n] for found in means])) for n in rounds]
    spent = [bytes_by_round(lines) for lines in seeds]
    sent = [max(FEW_BYTES, float(np.mean([found[n] for found in spent]))) for n in rounds]
    return ([float(n) for n in rounds], figures), (sent, figures)


def _means(lines: Lines, metric: str, one_class: Collection[str]) -> dict[int, float]:
    """Round to the mean over the sites that have a figure."""
    sites = [curve for name, curve in curves(lines, metric).items() if name not in one_class]
    rounds = sorted({number for curve in sites for number in curve})
    return {n: float(np.mean([curve[n] for curve in sites if n in curve])) for n in rounds}

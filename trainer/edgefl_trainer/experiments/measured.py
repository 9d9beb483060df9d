"""What finished runs measured, in the columns of an experiment: a figure of each run, then mean and spread over seeds.

Figures over sites count each site once; sites without the figure are left out (docs/methods.md, "evaluation"). Where
a site has one class only, or took part in no round, the figure without such sites stands beside, and a figure with
sites that are judged on fewer classes than the run has is marked, all as in `evaluate.tables`. Guarantee: a cell says
which seeds have its figure; a mean over some of them is told from one over all.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from edgefl_trainer.engine.selection import JUDGED, OPEN, RIGHT
from edgefl_trainer.evaluate.answer_figures import USUAL
from edgefl_trainer.evaluate.no_round import in_no_round
from edgefl_trainer.evaluate.one_class import one_class_of
from edgefl_trainer.evaluate.tables.rows import LOWER_IS_BETTER, of_fewer
from edgefl_trainer.experiments.files import Column

PERCENTILES = {"p5": 5, "p10": 10, "p15": 15}
OVER_SITES = ("mean", "worst", *PERCENTILES)
TARGETS = ("rounds", "seconds", "bytes")  # figures of what it took to reach a target


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run, as far as a table needs it."""

    seed: int
    summary: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Ours in one cell; None where there is nothing."""

    value: float | None = None
    std: float | None = None  # standard deviation, of a sample unless asked for otherwise
    seeds: tuple[int, ...] = ()  # of the runs that have the figure, in order
    several: "Cell | None" = None  # the same without sites of one class, where one counts (`evaluate.one_class`)
    trained: "Cell | None" = None  # the same without sites of no round, where one counts (`evaluate.no_round`)
    fewer: tuple[str, ...] = ()  # sites that count and are judged on fewer classes than the run has
    no_round: tuple[str, ...] = ()  # sites that count and took part in no round of some run


def cell_of(column: Column, metric: str, spread: str, runs: Sequence[Measurement], ddof: int = 1) -> Cell:
    """Return our figure under a heading, of the runs of one row, one for each seed.

    The spread `seeds` is ± over runs; `sites`, for a mean over sites, is ± over the sites, each its mean over runs.
    """
    runs = [answered for run in runs if (answered := answers_of(column, run)) is not None]
    found = _cell(column, metric, spread, runs, ddof)
    if column.figure not in OVER_SITES:
        return found
    fewer = _names(fewer_sites(column, metric, run) for run in runs)
    absent = _names(absent_sites(column, metric, run.summary) for run in runs)
    marked = any(marked_sites(column, metric, run.summary) for run in runs)
    found = replace(found, fewer=fewer, no_round=absent)

    def without(left: Callable[[Mapping[str, Any]], Collection[str]]) -> Cell:
        return _cell(column, metric, spread, [_without(run, left(run.summary)) for run in runs], ddof)

    several = replace(without(one_class_of), fewer=fewer, no_round=absent) if marked else None
    trained = replace(without(in_no_round), fewer=fewer) if absent else None
    return replace(found, several=several, trained=trained)


def _names(found: Iterable[Collection[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for names in found for name in names}))


def answers_of(column: Column, run: Measurement) -> Measurement | None:
    """Return a run with the answers that a column is of as its own; None where it has no such answers."""
    if not column.further:
        return run
    found = run.summary.get("further", {}).get(column.further)
    return None if found is None else replace(run, summary={**run.summary, **found})


def fewer_sites(column: Column, metric: str, run: Measurement) -> set[str]:
    """Name the sites that count in a column and are judged on fewer classes than the run has."""
    if column.figure not in OVER_SITES:
        return set()
    counted = site_figures(column, metric, run.summary).keys()
    return counted & set(of_fewer([run.summary], column.metric or metric))


def marked_sites(column: Column, metric: str, summary: Mapping[str, Any]) -> set[str]:
    """Name the sites that count in a column and have one class only."""
    return site_figures(column, metric, summary).keys() & one_class_of(summary)


def absent_sites(column: Column, metric: str, summary: Mapping[str, Any]) -> set[str]:
    """Name the sites that count in a column and took part in no round."""
    return site_figures(column, metric, summary).keys() & set(in_no_round(summary))


def _without(run: Measurement, left: Collection[str]) -> Measurement:
    """The run as if it had none of these sites."""
    sites = {name: site for name, site in run.summary["sites"].items() if name not in left}
    return replace(run, summary={**run.summary, "sites": sites})


def _cell(column: Column, metric: str, spread: str, runs: Sequence[Measurement], ddof: int) -> Cell:
    pairs = [(run.seed, value) for run in runs if (value := figure_of(column, metric, run)) is not None]
    if not pairs:
        return Cell()
    seeds, values = tuple(sorted(seed for seed, _ in pairs)), [value for _, value in pairs]
    spread_of = values
    if spread == "sites":
        spread_of = list(_site_means(column, metric, runs).values()) if column.figure == "mean" else []
    std = float(np.std(spread_of, ddof=ddof)) if len(spread_of) > 1 else None
    return Cell(value=float(np.mean(values)), std=std, seeds=seeds)


def figure_of(column: Column, metric: str, run: Measurement) -> float | None:
    """Return a column's figure of one run; None where it is undefined or was never reached."""
    if column.figure == "none":
        return None
    if column.figure in TARGETS:
        reached = _reached(run.lines, tracked(metric, run.summary), column.target)
        return None if reached is None else reached[column.figure]
    if column.figure == "pooled":
        pooled = run.summary["pooled"].get(column.metric or metric)
        return None if pooled is None else float(pooled)
    found = list(site_figures(column, metric, run.summary).values())
    if not found:
        return None
    if column.figure == "mean":
        return float(np.mean(found))
    lower_is_better = (column.metric or metric) in LOWER_IS_BETTER
    if column.figure == "worst":
        return max(found) if lower_is_better else min(found)
    share = PERCENTILES[column.figure]  # of the sites, those that do worst
    return float(np.percentile(found, 100 - share if lower_is_better else share))


def site_figures(column: Column, metric: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the metric of every site that counts in a column."""
    return {
        name: float(figures[column.metric or metric])
        for name, figures in summary["sites"].items()
        if fnmatchcase(name, column.sites)
        and bool(figures.get("held_out")) == column.held_out
        and figures.get(column.metric or metric) is not None
    }


def tracked(metric: str, summary: Mapping[str, Any]) -> str:
    """Return the key of the lines of ``metrics.jsonl`` that a run is followed by where a table has this metric."""
    if USUAL in summary:
        return RIGHT
    return OPEN if metric.startswith("open_") else JUDGED


def _site_means(column: Column, metric: str, runs: Sequence[Measurement]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in site_figures(column, metric, run.summary).items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


def _reached(lines: Sequence[Mapping[str, Any]], name: str, target: float) -> dict[str, float] | None:
    """Rounds, seconds of all sites' work, and bytes up of one site, until the mean on tune rows is at the target."""
    seconds = sent = 0.0
    for index in sorted({int(line["phase_index"]) for line in lines}):
        phase = [line for line in lines if int(line["phase_index"]) == index]
        seconds += sum(float(line["seconds"]) for line in phase)
        sent += float(np.mean([int(line["bytes_up"]) for line in phase]))
        judged = [float(line[name]) for line in phase if line.get(name) is not None]
        if judged and float(np.mean(judged)) >= target:
            return {"rounds": float(phase[0]["round"]), "seconds": seconds, "bytes": sent}
    return None

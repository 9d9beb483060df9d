"""The rows of the comparison table: methods down, sites across, then mean ± spread, worst site, bytes and time.

Guarantees: runs that differ in nothing but their seed share a row. Spread is the sample standard deviation (ddof=1):
over seeds where a row has several, else over sites (docs/methods.md, "evaluation"). Mean, spread and worst run over all
sites but the held-out ones, which have a column too. `all rows` is the figure over the rows of those sites together, a
mean over classes and not over sites. `evaluate.tables.text` writes the rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from edgefl_protocol.sentences import counted
from edgefl_trainer.evaluate.answer_figures import USUAL, usual_runs
from edgefl_trainer.evaluate.no_round import in_no_round
from edgefl_trainer.evaluate.one_class import FEWER, is_one_class, mark_of, one_class_of

Summary = Mapping[str, Any]
"""The content of a run's ``summary.json``; may carry ``label`` (name of the row) and ``reported_rows`` (val, test)."""

LOWER_IS_BETTER = ("ece", "brier", "aurc")  # the worst site has the largest


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A mean and its sample standard deviation; ``None`` where undefined."""

    mean: float | None
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One method under one setting."""

    method: str
    preset: str | None
    rounds: int | None
    seeds: tuple[int, ...]
    sites: dict[str, Figure]  # the spread of a site is over seeds
    mean: Figure  # over sites
    spread_over: str  # "seeds" or "sites": what the spread of ``mean`` runs over
    worst: float | None
    one_class: tuple[str, ...]  # sites whose figure says nothing, see `evaluate.one_class`
    held_out: tuple[str, ...]  # sites that were never to train and are in no mean
    no_round: tuple[str, ...]  # sites that took part in no round of some of its runs
    several: Figure  # `mean` without the sites of one class; spread over the same
    trained: Figure  # `mean` without the sites of no round; spread over the same
    pooled: Figure  # over all rows of these sites together; spread over seeds
    bytes_up_per_round: float | None
    bytes_down_per_round: float | None
    share_of_models: float | None  # see `evaluate.tables.shares`
    share_of_full_models: float | None
    seconds: float | None  # of all sites' work, one after the other, judging included


def table_rows(summaries: Sequence[Summary], metric: str = "balanced_accuracy", ddof: int = 1) -> list[TableRow]:
    """Gather summaries into rows, in the order in which a setting first appears.

    Two runs of one setting with the same seed are not averaged: the second opens a row ``NAME #2``. A run whose method
    answers in more than one way has a row for each, the further ones as ``NAME, WAY``. A ``ValueError`` where there is
    no run, or the runs are of different tasks.
    """
    if not summaries:
        raise ValueError("no run was given; name at least one run directory")
    tasks = sorted({str(summary.get("task")) for summary in summaries})
    if len(tasks) > 1:
        raise ValueError(
            f"the runs belong to {len(tasks)} tasks ({', '.join(tasks)}), and a table compares runs of one task"
        )
    return _numbered([_row(runs, metric, ddof) for runs in runs_of_rows(summaries)])


def usual_metric(summaries: Sequence[Summary]) -> str:
    """Return the figure that these runs are compared by where none is named."""
    return "accuracy" if any(USUAL in summary for summary in summaries) else "balanced_accuracy"


def row_names(summaries: Sequence[Summary]) -> list[str]:
    """Return the name of the row in which each summary stands, as `render_table` writes it."""
    groups = zip(runs_of_rows(summaries), named(table_rows(summaries)), strict=True)
    names = {id(run): name for runs, name in groups for run in runs}
    return [names[id(run)] for run in summaries]


def named(rows: Sequence[TableRow]) -> list[str]:
    """Return the names of rows: with preset and rounds where those of the table are not all alike."""
    if len({(row.preset, row.rounds) for row in rows}) == 1:
        return [row.method for row in rows]
    return [f"{row.method} ({row.preset or 'no preset'}, {counted(row.rounds or 0, 'round')})" for row in rows]


def runs_of_rows(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """Return the runs of each row of `table_rows`."""
    groups: list[tuple[tuple[object, ...], list[Summary]]] = []
    for summary in chain(chain.from_iterable(map(_answers, summaries)), usual_runs(summaries)):
        key = tuple(
            summary.get(name) for name in ("label", "method", "preset", "rounds", "reported_rows", "settings_sha256")
        )
        for known, runs in groups:
            if known == key and all(run.get("seed") != summary.get("seed") for run in runs):
                runs.append(summary)
                break
        else:
            groups.append((key, [summary]))
    return [runs for _, runs in groups]


def _answers(summary: Summary) -> list[Summary]:
    """A run as one summary for each way in which its method answers: the first, then `NAME, WAY`."""
    name, further = run_name(summary), summary.get("further", {})
    return [summary, *({**summary, **found, "label": f"{name}, {way}"} for way, found in further.items())]


def _numbered(rows: list[TableRow]) -> list[TableRow]:
    seen: dict[tuple[object, ...], int] = {}
    numbered = []
    for row in rows:
        key = (row.method, row.preset, row.rounds)
        seen[key] = seen.get(key, 0) + 1
        numbered.append(row if seen[key] == 1 else replace(row, method=f"{row.method} #{seen[key]}"))
    return numbered


def _row(runs: Sequence[Summary], metric: str, ddof: int) -> TableRow:
    first = runs[0]
    several = len(runs) > 1
    names = sorted({name for run in runs for name in run["sites"]})
    per_site = {name: _figure([run["sites"].get(name, {}).get(metric) for run in runs], ddof) for name in names}
    over_sites = [_over_sites(run, metric, ddof) for run in runs]
    several_of = [_over_sites(run, metric, ddof, one_class_of(run))[0] for run in runs]
    trained_of = [_over_sites(run, metric, ddof, in_no_round(run))[0] for run in runs]
    return TableRow(
        method=run_name(first),
        preset=first.get("preset"),
        rounds=first.get("rounds"),
        seeds=tuple(sorted(int(run["seed"]) for run in runs if run.get("seed") is not None)),
        sites=per_site,
        mean=_figure([found.mean for found, _ in over_sites], ddof) if several else over_sites[0][0],
        spread_over="seeds" if several else "sites",
        worst=_figure([worst for _, worst in over_sites]).mean,
        one_class=tuple(name for name in names if any(_says_nothing(run, name, metric) for run in runs)),
        held_out=tuple(name for name in names if any(run["sites"].get(name, {}).get("held_out") for run in runs)),
        no_round=tuple(name for name in names if any(name in in_no_round(run) for run in runs)),
        several=_figure([found.mean for found in several_of], ddof) if several else several_of[0],
        trained=_figure([found.mean for found in trained_of], ddof) if several else trained_of[0],
        pooled=_figure([run.get("pooled", {}).get(metric) for run in runs], ddof),
        bytes_up_per_round=_figure([run.get("bytes_up_per_round") for run in runs]).mean,
        bytes_down_per_round=_figure([run.get("bytes_down_per_round") for run in runs]).mean,
        share_of_models=_figure([run.get("share_of_models") for run in runs]).mean,
        share_of_full_models=_figure([run.get("share_of_full_models") for run in runs]).mean,
        seconds=_figure([run.get("seconds") for run in runs]).mean,
    )


def run_name(run: Summary) -> str:
    """Name the method, what learned the network that it starts from, its mode, and its share of the labels."""
    if run.get("label"):
        return str(run["label"])
    share = float(run.get("labels") or 1.0)
    mode = [str(run["mode"])] if run.get("mode") else []
    start = f" of {run['pretraining']}" if mode and run.get("pretraining") else ""
    return ", ".join([f"{run['method']}{start}", *mode, *([f"{share:.3g} of labels"] if share < 1 else [])])


def _says_nothing(run: Summary, name: str, metric: str) -> bool:
    site = run["sites"].get(name, {})
    return site.get(metric) is not None and is_one_class(site)


def of_fewer(runs: Sequence[Summary], metric: str) -> list[str]:
    """Name the sites judged on fewer classes than the run has, and on several; none of answers to questions."""
    return sorted(
        {
            name
            for run in runs
            for name, site in run["sites"].items()
            if USUAL not in run and site.get(metric) is not None
            if mark_of(site, len(run.get("classes") or ())) == FEWER
        }
    )


def _over_sites(run: Summary, metric: str, ddof: int, without: Collection[str] = ()) -> tuple[Figure, float | None]:
    """Mean and spread over all sites but held-out ones and those of `without`, and the worst of them."""
    sites = [site for name, site in run["sites"].items() if name not in without and not site.get("held_out")]
    found = [site.get(metric) for site in sites]
    worst = max if metric in LOWER_IS_BETTER else min
    return _figure(found, ddof), worst((float(value) for value in found if value is not None), default=None)


def _figure(values: Sequence[int | float | None], ddof: int = 1) -> Figure:
    known = [float(value) for value in values if value is not None]
    if not known:
        return Figure(mean=None)
    return Figure(mean=float(np.mean(known)), std=float(np.std(known, ddof=ddof)) if len(known) > 1 else None)

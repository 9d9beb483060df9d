"""Our runs beside the paper's numbers, row by row: what was found, and its figures in the columns of each part.

`comparison_text` writes the rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl_trainer.engine.settings import RunSettings
from edgefl_trainer.evaluate.answer_figures import usual_runs
from edgefl_trainer.evaluate.plots.bars import Bar
from edgefl_trainer.experiments.files import Experiment, MethodRow, Part
from edgefl_trainer.experiments.measured import Cell, Measurement, cell_of

TRIAL = "nothing here can be compared with the paper"
NUMBER = r"\d+(?:\.\d+)?"
PER_CENT = ("mean", "worst", "p5", "p10", "p15", "pooled")  # figures that are shares


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finished run and where it stands in an experiment."""

    part: str
    row: str  # folder name of the row
    measured: Measurement
    settings: RunSettings
    environment: Mapping[str, Any]
    hyper: Mapping[str, Any] = field(default_factory=dict)  # as it began; today's defaults where it is not named
    first: RunSettings | None = None  # of the run it starts from
    first_seconds: float | None = None  # that run took

    @property
    def summary(self) -> Mapping[str, Any]:
        """Of `summary.json`."""
        return self.measured.summary


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A row of one part: ours and the paper's, column by column."""

    label: str
    seeds: tuple[int, ...]
    ours: tuple[Cell, ...]
    paper: tuple[str, ...]  # empty texts where the paper has no number
    bytes_up_per_round: float | None
    bytes_down_per_round: float | None
    share_of_models: float | None  # see `evaluate.tables.shares`
    share_of_full_models: float | None
    seconds: float | None  # of all sites' work, one after the other, judging included
    seconds_before: float | None = None  # the same, of the first stage


def lines_of(experiment: Experiment, part: Part, found: Sequence[Found], ddof: int = 1) -> list[ComparedRow]:
    """Compare every row of a part with the paper's, run or not; of answers also the usual one (methods.md 11.4)."""
    lines = [_line(experiment, part, row, runs, ddof) for row, runs in rows_of(experiment, part, found)]
    usual = list(usual_runs([one.summary for one in found if one.part == part.name]))
    return [*lines, _usual_line(experiment, part, usual, ddof)] if usual else lines


def rows_of(experiment: Experiment, part: Part, found: Sequence[Found]) -> list[tuple[MethodRow, list[Found]]]:
    """Return every row of a part with its runs."""
    rows = [row for where, row in experiment.pairs() if where is part]
    return [(row, [one for one in found if (one.part, one.row) == (part.name, row.folder)]) for row in rows]


def _line(experiment: Experiment, part: Part, row: MethodRow, found: Sequence[Found], ddof: int) -> ComparedRow:
    runs = [one.measured for one in found]
    before = [] if row.pretrain is None else [one.first_seconds for one in found if one.first_seconds is not None]
    return ComparedRow(
        label=row.label,
        seeds=tuple(sorted(run.seed for run in runs)),
        ours=tuple(cell_of(column, experiment.metric, experiment.spread, runs, ddof) for column in part.columns),
        paper=row.paper.get(part.name, _not_printed(part)),
        bytes_up_per_round=_mean([run.summary["bytes_up_per_round"] for run in runs]),
        bytes_down_per_round=_mean([run.summary["bytes_down_per_round"] for run in runs]),
        share_of_models=_mean(_known(runs, "share_of_models")),
        share_of_full_models=_mean(_known(runs, "share_of_full_models")),
        seconds=_mean([run.summary["seconds"] for run in runs]),
        seconds_before=_mean(before),
    )


def _usual_line(experiment: Experiment, part: Part, runs: Sequence[Mapping[str, Any]], ddof: int) -> ComparedRow:
    """The row of the answer that needs no learning."""
    measured = [Measurement(seed=int(run["seed"]), summary=run, lines=()) for run in runs]
    return ComparedRow(
        label=str(runs[0]["label"]),
        seeds=tuple(sorted(run.seed for run in measured)),
        ours=tuple(cell_of(column, experiment.metric, experiment.spread, measured, ddof) for column in part.columns),
        paper=_not_printed(part),
        bytes_up_per_round=0,
        bytes_down_per_round=0,
        share_of_models=_mean(_known(measured, "share_of_models")),
        share_of_full_models=_mean(_known(measured, "share_of_full_models")),
        seconds=None,
    )


def _known(runs: Sequence[Measurement], key: str) -> list[float]:
    return [run.summary[key] for run in runs if key in run.summary]


def _not_printed(part: Part) -> tuple[str, ...]:
    return ("",) * len(part.columns)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def bars_of(experiment: Experiment, found: Sequence[Found]) -> tuple[dict[str, list[Bar]], list[str]]:
    """Return the rows that were run as bars, and the names of the groups: the columns of all parts that have a run."""
    parts = [part for part in experiment.parts if any(one.part == part.name for one in found)]
    rows: dict[str, list[Bar]] = {}
    groups: list[str] = []
    for part in parts:
        shown = [i for i, column in enumerate(part.columns) if column.figure in PER_CENT]
        lines = lines_of(experiment, part, found)
        groups += [part.columns[i].name + (f", {part.name}" if len(parts) > 1 else "") for i in shown]
        for line in lines:
            if len(line.seeds):
                earlier = len(groups) - len(shown)
                bars = rows.setdefault(line.label, [Bar()] * earlier)
                bars += [Bar()] * (earlier - len(bars)) + [_bar(line.ours[i], line.paper[i]) for i in shown]
    return {name: bars + [Bar()] * (len(groups) - len(bars)) for name, bars in rows.items()}, groups


def _bar(ours: Cell, printed: str) -> Bar:
    number = re.match(NUMBER, printed)
    drawn = ours.several or ours
    return Bar(
        ours=None if drawn.value is None else 100 * drawn.value,
        std=None if drawn.std is None else 100 * drawn.std,
        paper=float(number[0]) if number else None,
    )

"""Our runs beside the paper's numbers: one table for each part of an experiment.

Guarantees: a number of the paper is shown as it was printed; ours are in per cent with two decimals, and unrounded in
`csv` and `json`; a cell without a run is empty; the caption says what was measured, on what, and what cannot be
compared.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgefl_trainer.engine.settings import RunSettings, without_folders
from edgefl_trainer.evaluate.answer_figures import usual_runs
from edgefl_trainer.evaluate.metrics import metric_words
from edgefl_trainer.evaluate.one_class import FEWER, MARK, SAYS
from edgefl_trainer.evaluate.plots.bars import Bar
from edgefl_trainer.evaluate.tables.seeds import seeds_column, seeds_words, unlike_seeds
from edgefl_trainer.evaluate.tables.shares import COLUMNS, share_columns, share_words
from edgefl_trainer.evaluate.tables.text import (
    SPREADS,
    UNDEFINED,
    bytes_text,
    latex,
    markdown,
    origin,
    time_text,
    told_of_fewer,
    unlike,
)
from edgefl_trainer.experiments.files import Column, Experiment, MethodRow, Part
from edgefl_trainer.experiments.measured import (
    OVER_SITES,
    Cell,
    Measurement,
    cell_of,
    fewer_sites,
    marked_sites,
    tracked,
)
from edgefl_trainer.experiments.run_words import schedule

TRIAL = "nothing here can be compared with the paper"
WITHOUT = f"ours without {MARK}"  # column
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
    first: RunSettings | None = None  # of the run it starts from
    first_seconds: float | None = None  # that run took


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
    lines = [
        _line(experiment, part, row, _runs_of(part, row, found), ddof)
        for where, row in experiment.pairs()
        if where is part
    ]
    usual = list(usual_runs([one.measured.summary for one in found if one.part == part.name]))
    return [*lines, _usual_line(experiment, part, usual, ddof)] if usual else lines


def _runs_of(part: Part, row: MethodRow, found: Sequence[Found]) -> list[Found]:
    return [one for one in found if (one.part, one.row) == (part.name, row.folder)]


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


def _printed(text: str) -> tuple[float | None, float | None]:
    """Read a printed share and its spread, in per cent such as `73.31 ± 1.2`, as shares; None where there is none."""
    found = re.match(rf"({NUMBER})(?:\s*±\s*({NUMBER}))?", text)
    value, std = found.groups() if found else (None, None)
    return tuple(None if one is None else float(one) / 100 for one in (value, std))  # type: ignore[return-value]


def _bar(ours: Cell, printed: str) -> Bar:
    number = re.match(NUMBER, printed)
    drawn = ours.several or ours
    return Bar(
        ours=None if drawn.value is None else 100 * drawn.value,
        std=None if drawn.std is None else 100 * drawn.std,
        paper=float(number[0]) if number else None,
    )


def render_comparison(experiment: Experiment, found: Sequence[Found], style: str = "md", ddof: int = 1) -> str:
    """Return the tables of all parts of which there is a run, or of every part where there is none.

    ``style`` is md, csv, json or latex; ``ddof`` that of the spread, 1 of a sample, 0 of a population.
    """
    parts = [part for part in experiment.parts if any(one.part == part.name for one in found)] or experiment.parts
    tables = [(part, lines_of(experiment, part, found, ddof)) for part in parts]
    if style == "csv":
        return _csv(tables, TRIAL if is_trial(found) else "")
    texts = {p.name: caption(experiment, p, [one for one in found if one.part == p.name], ddof) for p in parts}
    if style == "json":
        content = [
            {
                "part": part.name,
                "caption": texts[part.name],
                "columns": [column.name for column in part.columns],
                "rows": [asdict(line) for line in lines],
            }
            for part, lines in tables
        ]
        return json.dumps({"title": experiment.title, "tables": content}, indent=2, allow_nan=False) + "\n"
    return "\n".join(_written(style, part, lines, texts[part.name]) for part, lines in tables)


def caption(experiment: Experiment, part: Part, found: Sequence[Found], ddof: int = 1) -> str:
    """Return what a reader must know: source, figure, rows, data, network, schedule, seeds, spread, machine, commit."""
    source = experiment.source
    head = f"{experiment.title}, {part.name}. Paper: {source.paper}, {source.place}, numbers as printed"
    if not found:
        return f"{head}; nothing was run yet.{_notes(experiment)}"
    lines = lines_of(experiment, part, found)
    parts = [
        *unlike([one.measured.summary for one in found]),
        *unlike_seeds(lines, [line.label for line in lines]),
        *([f"A trial on small data with an untrained network: {TRIAL}"] if is_trial(found) else []),
        head,
        f"Ours: {_measured(experiment, part, found)}",
        f"Data {_all(without_folders(text) for one in found for text in one.settings.data)}",
        f"Network {_all(_network(one) for one in found)}",
        f"Preset {_all(schedule(one.settings) for one in found)}",
        *seeds_words(lines),
    ]
    if experiment.spread == "sites" or any(len(line.seeds) > 1 for line in lines):
        parts.append(f"± is the {SPREADS[ddof]} over {experiment.spread}")
    if any(row.pretrain is not None for row in experiment.rows):
        parts.append("Bytes and time are of the run itself, time before is of the one that it starts from")
    if marked := one_class_sites(experiment, part, found):
        parts.append(f"{', '.join(marked)}: {SAYS}; left out of `{WITHOUT}`")
    parts += share_words(lines)
    parts.append(f"Made on {origin([one.environment for one in found])}")
    pairs = [(column, one.measured) for column in part.columns for one in found]
    few = {name for column, run in pairs for name in fewer_sites(column, experiment.metric, run)}
    told = ". ".join(parts) + "." + told_of_fewer(few)
    return told if is_trial(found) else told + _notes(experiment)


def is_trial(found: Sequence[Found]) -> bool:
    """Tell whether a run is of `--tiny`."""
    return any(one.settings.preset == "tiny" for one in found)


def one_class_sites(experiment: Experiment, part: Part, found: Sequence[Found]) -> list[str]:
    """Name, with the mark, the sites of one class that count in a figure of a part."""
    over_sites = [column for column in part.columns if column.figure in OVER_SITES]
    pairs = [(column, one.measured.summary) for column in over_sites for one in found if one.part == part.name]
    return sorted({f"{name}{MARK}" for column, run in pairs for name in marked_sites(column, experiment.metric, run)})


def _notes(experiment: Experiment) -> str:
    return "".join(f" {note}" for note in experiment.notes)


def _all(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _measured(experiment: Experiment, part: Part, found: Sequence[Found]) -> str:
    """Say what our figures are: of reported rows, and rounds and bytes needed to reach a figure on tune rows."""
    reported = sorted({str(one.measured.summary.get("reported_rows")) for one in found})
    metrics = _all(_metrics(experiment, part))
    words = [f"{metrics} in per cent on `{'`, `'.join(reported)}` rows"] if metrics else []
    followed = metric_words(tracked(experiment.metric, found[0].measured.summary).removeprefix("tune_"))
    targets = dict.fromkeys(column.target for column in part.columns if column.target > 0)
    words += [f"what it took until {followed} on tune rows, mean over sites, was {target:.1%}" for target in targets]
    return ", and ".join(words)


def _metrics(experiment: Experiment, part: Part) -> Iterator[str]:
    """What the figures of a part measure, in words."""
    apart = any(column.figure == "pooled" for column in part.columns)
    for column in part.columns:
        if column.figure in PER_CENT:
            over = " of all rows together" if column.figure == "pooled" else " of a site" if apart else ""
            yield metric_words(column.metric or experiment.metric) + over


def _network(found: Found) -> str:
    """The network, and how it was pre-trained where that is the first stage of a row."""
    if found.first is None:
        return without_folders(found.settings.backbone)
    first = found.first
    learned = first.build_method().phases(first.rounds)  # a random start has no rounds, whatever its settings say
    return f"{without_folders(first.backbone)} after {first.method}" + (f" ({schedule(first)})" if learned else "")


def _page(part: Part, lines: Sequence[ComparedRow]) -> tuple[list[str], list[list[str]], list[str]]:
    """Heads and cells: ours, then the paper's, under each heading that has them; and the heads that no row fills."""
    seeds = seeds_column(lines)
    head, columns = ["method", *seeds], [*seeds.values()]
    for i, column in enumerate(part.columns):
        printed = any(line.paper[i] for line in lines)
        if column.figure != "none":
            head.append(f"{column.name}, ours" if printed else column.name)
            columns.append([_shown(line.ours[i], column) for line in lines])
        if any(line.ours[i].several for line in lines):
            head.append(f"{column.name}, {WITHOUT}")
            columns.append([_shown(line.ours[i].several or line.ours[i], column) for line in lines])
        if printed:
            head.append(f"{column.name}, paper")
            columns.append([line.paper[i] or UNDEFINED for line in lines])
    if any(line.seeds for line in lines):
        shares = share_columns(lines)
        head += ["up / round", *shares, "down / round", "time"]
        columns += [[bytes_text(line.bytes_up_per_round) for line in lines], *shares.values()]
        columns.append([bytes_text(line.bytes_down_per_round) for line in lines])
        columns.append([time_text(line.seconds) for line in lines])
    if any(line.seconds_before is not None for line in lines):
        head.append("time before")
        columns.append([time_text(line.seconds_before) for line in lines])
    filled = [any(cell != UNDEFINED for cell in cells) for cells in columns]
    kept = [cells for cells, full in zip(columns, filled, strict=True) if full]
    told = [one for one, full in zip(head[1:], filled, strict=True) if full]
    left = [one for one, full in zip(head[1:], filled, strict=True) if not full]
    return ["method", *told], [[line.label, *(cells[i] for cells in kept)] for i, line in enumerate(lines)], left


def _written(style: str, part: Part, lines: Sequence[ComparedRow], text: str) -> str:
    """The table of a part as Markdown or LaTeX; its caption names the columns in which no row has a figure."""
    head, body, left = _page(part, lines)
    some = any(line.seeds for line in lines)
    told = f"{text} Without a figure in any row, and left out: {', '.join(left)}." if left and some else text
    return (markdown if style == "md" else latex)(head, body, told)


def _shown(cell: Cell, column: Column) -> str:
    if cell.value is None:
        return UNDEFINED
    if column.figure == "bytes":
        return bytes_text(cell.value)
    scale, digits = (1, 0) if column.figure in ("rounds", "seconds") else (100, 2)
    shown = f"{scale * cell.value:.{digits}f}" + ("" if cell.std is None else f" ± {scale * cell.std:.{digits}f}")
    return shown + FEWER * bool(cell.fewer)


def _csv(tables: Sequence[tuple[Part, Sequence[ComparedRow]]], note: str) -> str:
    """Write ours as shares, and beside them the paper's as the same; `note` is of every line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["part", "row", "column", "ours", "ours_std", "seeds", "paper", "bytes_up", "bytes_down", "seconds"]
    writer.writerow([*head, "seconds_before", "several", "several_std", "paper_value", "paper_std", "note", *COLUMNS])
    for part, lines in tables:
        for line in lines:
            for column, ours, printed in zip(part.columns, line.ours, line.paper, strict=True):
                start = [part.name, line.label, column.name, ours.value, ours.std, " ".join(map(str, line.seeds))]
                end = [line.bytes_up_per_round, line.bytes_down_per_round, line.seconds, line.seconds_before]
                several = ours.several or Cell()
                paper = _printed(printed) if column.figure in PER_CENT else (None, None)
                writer.writerow(
                    [
                        *start,
                        printed,
                        *end,
                        several.value,
                        several.std,
                        *paper,
                        note,
                        *(getattr(line, key) for key in COLUMNS),
                    ]
                )
    return out.getvalue()

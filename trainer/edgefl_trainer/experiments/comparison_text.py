"""Our runs beside the paper's numbers as text: one table for each part of an experiment.

Guarantees: a number of the paper is shown as it was printed; ours are in per cent with two decimals, and unrounded in
`csv` and `json`; a cell without a run is empty; the caption says what was measured, on what, and what cannot be
compared: first of all rows whose runs had different settings, and figures that some seeds lack.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from edgefl_protocol.sentences import listed
from edgefl_trainer.engine.settings import without_folders
from edgefl_trainer.evaluate import no_round
from edgefl_trainer.evaluate.metrics import metric_words
from edgefl_trainer.evaluate.one_class import FEWER, MARK, SAYS
from edgefl_trainer.evaluate.tables.seeds import named_seeds, seeds_column, seeds_words, unlike_seeds
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
from edgefl_trainer.experiments.comparison import NUMBER, PER_CENT, TRIAL, ComparedRow, Found, lines_of, rows_of
from edgefl_trainer.experiments.files import Column, Experiment, Part
from edgefl_trainer.experiments.measured import OVER_SITES, TARGETS, Cell, fewer_sites, marked_sites, tracked
from edgefl_trainer.experiments.run_words import schedule
from edgefl_trainer.experiments.variants import unlike_settings

WITHOUT, TRAINED = f"ours without {MARK}", f"ours without {no_round.MARK}"  # columns


def render_comparison(experiment: Experiment, found: Sequence[Found], style: str = "md", ddof: int = 1) -> str:
    """Return the tables of all parts of which there is a run, or of every part where there is none.

    ``style`` is md, csv, json or latex; ``ddof`` that of the spread, 1 of a sample, 0 of a population.
    """
    parts = [part for part in experiment.parts if any(one.part == part.name for one in found)] or experiment.parts
    tables = [(part, lines_of(experiment, part, found, ddof)) for part in parts]
    if style == "csv":
        return _csv(experiment, tables, found)
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
        *unlike([one.summary for one in found]),
        *unlike_settings({row.label: runs for row, runs in rows_of(experiment, part, found)}),
        *_without_figure(part, lines),
        *unlike_seeds(lines, [line.label for line in lines]),
        *([f"A trial on small data with an untrained network: {TRIAL}"] if is_trial(found) else []),
        head,
        f"Ours: {_measured(experiment, part, found)}",
        *_of_no_round(experiment, part, found),
        f"Data {_all(without_folders(text) for one in found for text in one.settings.data)}",
        f"Network {_all(_network(one) for one in found)}",
        f"Preset {_all(schedule(one.settings, one.summary) for one in found)}",
        *seeds_words(lines),
    ]
    if experiment.spread == "sites" or any(len(line.seeds) > 1 for line in lines):
        parts.append(f"± is the {SPREADS[ddof]} over {experiment.spread}")
    if any(row.pretrain is not None for row in experiment.rows):
        parts.append("Bytes and time are of the run itself, time before is of the one that it starts from")
    if marked := one_class_sites(experiment, part, found):
        parts.append(f"{', '.join(marked)}: {SAYS}; left out of `{WITHOUT}`")
    if any(cell.no_round for line in lines for cell in line.ours):
        parts.append(f"{no_round.MARK} {no_round.SAYS}; left out of `{TRAINED}`")
    parts += share_words(lines)
    parts.append(f"Made on {origin([one.environment for one in found])}")
    pairs = [(column, one.measured) for column in part.columns for one in found]
    few = {name for column, run in pairs for name in fewer_sites(column, experiment.metric, run)}
    told = ". ".join(parts) + "." + told_of_fewer(few)
    return told if is_trial(found) else told + _notes(experiment)


def _without_figure(part: Part, lines: Sequence[ComparedRow]) -> list[str]:
    """A clause where only some seeds of a row have a figure: which do not, in which columns."""
    found: dict[tuple[str, tuple[int, ...], bool], list[str]] = {}
    for line in lines:
        for column, ours in zip(part.columns, line.ours, strict=True):
            if seeds := _lacking(line, ours):
                found.setdefault((line.label, seeds, column.figure in TARGETS), []).append(column.name)
    told = [
        f"{named_seeds(seeds)} of {label} {'never reached the target' if target else 'without one'} under "
        f"{listed(columns)}"
        for (label, seeds, target), columns in found.items()
    ]
    return [f"NOT EVERY SEED HAS A FIGURE: {'; '.join(told)}; means there are over the other seeds"] if told else []


def _lacking(line: ComparedRow, cell: Cell) -> tuple[int, ...]:
    """The seeds of a row that lack a figure which others have."""
    return tuple(seed for seed in line.seeds if seed not in cell.seeds) if cell.seeds else ()


def _of_no_round(experiment: Experiment, part: Part, found: Sequence[Found]) -> list[str]:
    """Clauses on sites of a part that took part in no round."""
    pairs = [(one.summary, row.label) for row, runs in rows_of(experiment, part, found) for one in runs]
    return no_round.caption_of([summary for summary, _ in pairs], [label for _, label in pairs])


def is_trial(found: Sequence[Found]) -> bool:
    """Tell whether a run is of `--tiny`."""
    return any(one.settings.preset == "tiny" for one in found)


def one_class_sites(experiment: Experiment, part: Part, found: Sequence[Found]) -> list[str]:
    """Name, with the mark, the sites of one class that count in a figure of a part."""
    over_sites = [column for column in part.columns if column.figure in OVER_SITES]
    pairs = [(column, one.summary) for column in over_sites for one in found if one.part == part.name]
    return sorted({f"{name}{MARK}" for column, run in pairs for name in marked_sites(column, experiment.metric, run)})


def _notes(experiment: Experiment) -> str:
    return "".join(f" {note}" for note in experiment.notes)


def _all(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _measured(experiment: Experiment, part: Part, found: Sequence[Found]) -> str:
    """Say what our figures are: of reported rows, and rounds and bytes needed to reach a figure on tune rows."""
    reported = sorted({str(one.summary.get("reported_rows")) for one in found})
    metrics = _all(_metrics(experiment, part))
    words = [f"{metrics} in per cent on `{'`, `'.join(reported)}` rows"] if metrics else []
    followed = metric_words(tracked(experiment.metric, found[0].summary).removeprefix("tune_"))
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
            columns.append([_shown(line, line.ours[i], column) for line in lines])
        for name, key in ((WITHOUT, "several"), (TRAINED, "trained")):
            if any(getattr(line.ours[i], key) for line in lines):
                head.append(f"{column.name}, {name}")
                columns.append([_shown(line, getattr(line.ours[i], key) or line.ours[i], column) for line in lines])
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


def _shown(line: ComparedRow, cell: Cell, column: Column) -> str:
    """One of the figures of a row, with its marks, and of how many seeds where some lack it."""
    if cell.value is None:
        return UNDEFINED
    scale, digits = (1, 0) if column.figure in ("rounds", "seconds") else (100, 2)
    shown = f"{scale * cell.value:.{digits}f}" + ("" if cell.std is None else f" ± {scale * cell.std:.{digits}f}")
    shown = bytes_text(cell.value) if column.figure == "bytes" else shown
    some = f"{len(cell.seeds)} of {len(line.seeds)} seeds: " if _lacking(line, cell) else ""
    return some + shown + FEWER * bool(cell.fewer) + no_round.MARK * bool(cell.no_round)


def _printed(text: str) -> tuple[float | None, float | None]:
    """Read a printed share and its spread, in per cent such as `73.31 ± 1.2`, as shares; None where there is none."""
    found = re.match(rf"({NUMBER})(?:\s*±\s*({NUMBER}))?", text)
    value, std = found.groups() if found else (None, None)
    return tuple(None if one is None else float(one) / 100 for one in (value, std))  # type: ignore[return-value]


def _csv(experiment: Experiment, tables: Sequence[tuple[Part, Sequence[ComparedRow]]], found: Sequence[Found]) -> str:
    """Write ours as shares, and beside them the paper's as the same; what a page marks stands in columns of its own."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = ["part", "row", "column", "ours", "ours_std", "seeds", "paper", "bytes_up", "bytes_down", "seconds"]
    head += ["seconds_before", "several", "several_std", "paper_value", "paper_std", "note", *COLUMNS]
    writer.writerow([*head, "seeds_without", "fewer_classes", "no_round", "trained", "trained_std"])
    for part, lines in tables:
        runs = {row.label: some for row, some in rows_of(experiment, part, found)}
        for line in lines:
            trial = [TRIAL] if is_trial(found) else []
            note = ". ".join([*unlike_settings({line.label: runs.get(line.label, [])}), *trial])
            for column, ours, printed in zip(part.columns, line.ours, line.paper, strict=True):
                writer.writerow([part.name, line.label, column.name, *_csv_cells(line, column, ours, printed, note)])
    return out.getvalue()


def _csv_cells(line: ComparedRow, column: Column, ours: Cell, printed: str, note: str) -> list[object]:
    several, trained = ours.several or Cell(), ours.trained or Cell()
    paper = _printed(printed) if column.figure in PER_CENT else (None, None)
    start = [ours.value, ours.std, _spaced(line.seeds), printed, line.bytes_up_per_round, line.bytes_down_per_round]
    start += [line.seconds, line.seconds_before, several.value, several.std, *paper, note]
    end = [_spaced(_lacking(line, ours)), _spaced(ours.fewer), _spaced(ours.no_round), trained.value, trained.std]
    return [*start, *(getattr(line, key) for key in COLUMNS), *end]


def _spaced(names: Sequence[object]) -> str:
    return " ".join(map(str, names))

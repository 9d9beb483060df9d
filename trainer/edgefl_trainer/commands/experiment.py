"""What `edgefl-train experiment` and `edgefl-train table` do: run, compare, print on stdout, draw."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.engine.federation import JUDGED, read_metrics
from edgefl_trainer.engine.models import open_run
from edgefl_trainer.errors import SettingError
from edgefl_trainer.evaluate.bars import plot_bars
from edgefl_trainer.evaluate.dots import plot_dots
from edgefl_trainer.evaluate.plot import Lines, plot_progress
from edgefl_trainer.evaluate.table import origin, render_table
from edgefl_trainer.experiments.comparison import bars_of, render_comparison
from edgefl_trainer.experiments.files import Experiment, read_experiment
from edgefl_trainer.experiments.finished import environment_of, find_runs, run_folders
from edgefl_trainer.experiments.measured import tracked
from edgefl_trainer.experiments.planning import Choice, commands, plan_runs, pretraining_of
from edgefl_trainer.experiments.running import run_planned


def print_table(runs: Sequence[Path], style: str, metric: str, plot: Path | None, ddof: int) -> None:
    """Print finished runs as a table and draw them.

    Raises:
        EdgeflError: they cannot stand in one table, or have no figure to draw.
    """
    folders = [path for folder in runs for path in run_folders(folder)]
    summaries = [open_run(folder).summary for folder in folders]
    names = [folder.name for folder in folders]
    with _comparable():
        machine = origin([environment_of(folder) for folder in folders])
        click.echo(render_table(summaries, style, machine=machine, metric=metric, ddof=ddof))
        if plot is not None:
            tracks = {str(f) if names.count(f.name) > 1 else f.name: [read_metrics(f)] for f in folders}
            _draw(plot, tracks, JUDGED, "")


def print_comparison(file: Path, runs: Sequence[Path], style: str, plot: Path | None, ddof: int) -> None:
    """Print finished runs beside the paper's numbers and draw them.

    Raises:
        EdgeflError: the file or a run cannot be used.
    """
    experiment = read_experiment(file)
    found = find_runs(experiment, runs)
    click.echo(render_comparison(experiment, found, style, ddof))
    if plot is None:
        return
    if experiment.plot == "bars":
        with _comparable():
            _write(plot, plot_bars(*bars_of(experiment, found), title=experiment.title))
        return
    if experiment.plot == "dots":
        parts = {part.name: [one for one in found if one.part == part.name] for part in experiment.parts}
        with _comparable():
            panels = {name: bars_of(experiment, some) for name, some in parts.items()}
            _write(plot, plot_dots(panels, title=experiment.title))
        return
    several = len({one.part for one in found}) > 1
    tracks: dict[str, list[Lines]] = {}
    for part, row in experiment.pairs():
        name = row.label + (f", {part.name}" if several else "")
        for one in found:
            if (one.part, one.row) == (part.name, row.folder):
                tracks.setdefault(name, []).append(one.measured.lines)
    with _comparable():
        _draw(plot, tracks, tracked(experiment.metric), experiment.title)


def print_commands(file: Path, out: Path, options: Mapping[str, Any]) -> None:
    """Print the commands that do what the experiment does."""
    experiment = read_experiment(file)
    for line in commands(plan_runs(experiment, choice_of(out, options), os.environ)):
        click.echo(line)


def run_and_print(file: Path, out: Path, options: Mapping[str, Any], style: str) -> int:
    """Run what is not there yet, print the table of what is; returns how many runs failed."""
    experiment = read_experiment(file)
    planned = plan_runs(experiment, choice_of(out, options), os.environ)
    click.echo(_expected(experiment, len(planned), len(pretraining_of(planned))), err=True)
    failed = run_planned(planned, lambda line: click.echo(line, err=True))
    folders = [one.folder for one in planned if one.name not in failed]
    if folders:
        click.echo(render_comparison(experiment, find_runs(experiment, folders), style))
    return len(failed)


def _expected(experiment: Experiment, runs: int, first: int) -> str:
    known = "; ".join(f"{one.minutes:g} min a run on {one.machine} ({one.basis})" for one in experiment.commands)
    from_what = f" that start from {first} pre-training runs" if first else ""
    return f"{experiment.title}: {runs} runs{from_what}; the file's figures: {known}"


def choice_of(out: Path, options: Mapping[str, Any]) -> Choice:
    """The command line's options as a choice.

    Raises:
        SettingError: the seeds are not whole numbers.
    """
    rest = dict(options)
    try:
        seeds = tuple(dict.fromkeys(int(text) for text in rest.pop("seeds").split(",")))
    except ValueError as error:
        raise SettingError(
            f"--seeds {options['seeds']}: use whole numbers with commas between, such as 0,1,2."
        ) from error
    rows, parts = (_names(rest.pop(name)) for name in ("rows", "parts"))
    tiny, assignments = rest.pop("tiny"), tuple(rest.pop("assignments"))
    rest["data"] = rest["data"] or None
    return Choice(out=out, seeds=seeds, rows=rows, parts=parts, tiny=tiny, flags=rest, assignments=assignments)


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


@contextmanager
def _comparable() -> Iterator[None]:
    """Runs that cannot stand in one table or picture are a sentence."""
    try:
        yield
    except ValueError as error:
        raise EdgeflError(f"{error}: name other runs.", "run") from error


def _draw(path: Path, tracks: Mapping[str, Sequence[Lines]], metric: str, title: str) -> None:
    _write(path, plot_progress(tracks, metric=metric, title=title))


def _write(path: Path, picture: bytes) -> None:
    write_atomic(path, picture)
    click.echo(f"drew {path}", err=True)

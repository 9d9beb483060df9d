"""`edgefl-train experiment`: run the rows of a paper's table and print it beside the paper's numbers."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_protocol.sentences import counted
from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import check_engine, needs_trainer
from edgefl_trainer.commands.options import names
from edgefl_trainer.commands.stopping import tells_how_to_go_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgefl_trainer.experiments.crews import Crew
    from edgefl_trainer.experiments.files import Experiment
    from edgefl_trainer.experiments.planning import Choice, PlannedRun


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=shared.there)
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where the runs go.")
@click.option("--tiny", is_flag=True, help="The file's tiny variant: drawn lesions, an untrained network, seconds.")
@click.option("--rows", metavar="A,B,…", help="Only these rows, by label or folder name.  [default: all]")
@click.option("--parts", metavar="A,B,…", help="Only these parts of the table.  [default: all]")
@click.option("--seeds", metavar="N,N,…", default="0", show_default=True, help="Seeds of the runs.")
@click.option("--data", multiple=True, metavar="SPEC", help="Other data than the file's, for every part; repeatable.")
@shared.task("the file's")
@click.option("--backbone", metavar="NAME", help="Network, instead of the file's; see `edgefl-train run --help`.")
@click.option("--image-px", type=click.IntRange(min=1), metavar="PX", help="Side of the images, instead of the file's.")
@click.option(
    "--balance",
    type=click.Choice(["none", "class"]),
    help="Draw all classes of a site equally often, or not, instead of what the file says.",
)
@click.option(
    "--select",
    type=click.Choice(["last", "tune", "pooled"]),
    help=(
        "Which round is kept, instead of the file's: the last, the best on each site's tune rows, or the best for all "
        "sites together."
    ),
)
@click.option(
    "--preset", type=click.Choice(["tiny", "bench84", "paper"]), help="Set of default settings, instead of the file's."
)
@click.option("--rounds", type=int, metavar="N", help="Rounds of training, instead of the file's.")
@click.option("--epochs", type=int, metavar="N", help="Local epochs in a round, instead of the file's.")
@click.option("--pretrain-rounds", type=int, metavar="N", help="Rounds of the runs that rows start from.")
@click.option("--pretrain-epochs", type=int, metavar="N", help="Epochs of a round of the runs that rows start from.")
@click.option(
    "--images-per-site",
    type=int,
    metavar="N",
    help="Most training images of a site, instead of the file's; 0 uses all.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="For every row whose method has KEY; pretrain.KEY for the runs that rows start from.",
)
@shared.device
@shared.autocast
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Make N runs at once, each in a process of its own; of several GPUs each takes one in turn. With --engine "
    "flower: one run at a time, and N of its sites at once.  [default: one after the other]",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "flower"]),
    default="local",
    show_default=True,
    help="What the sites of a run work on: local is EdgeFL alone; flower is Flower's simulation "
    "(docs/guides/flower.md). The results are the same.",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Show what runs where, how far, and how long yet. Without --workers nothing is run: look from a second "
    "terminal.",
)
@click.option("--json", "as_json", is_flag=True, help="With --watch: one JSON object for each change, one a line.")
@shared.track
@click.option("--dry-run", is_flag=True, help="Print the commands that do the same, and run nothing.")
@click.option(
    "--format",
    "style",
    type=click.Choice(["md", "csv", "json", "latex"]),
    default="md",
    show_default=True,
    help="Form of the table.",
)
@needs_trainer
def experiment(
    file: Path,
    out: Path,
    dry_run: bool,
    style: str,
    workers: int | None,
    engine: str,
    watch: bool,
    as_json: bool,
    track: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a paper's table, and print it beside the paper's numbers. The tables are files: experiments/*.toml.

    Finished runs in DIR are kept, stopped ones go on. Runs lie in DIR/PART/ROW/seed-N.
    """
    from edgefl_trainer.engine.folder import check_free
    from edgefl_trainer.experiments.files import read_experiment
    from edgefl_trainer.experiments.planning import OWN, commands

    if as_json and not watch:
        raise click.UsageError("--json is the form of --watch; that of the table is --format json.")
    at_once = workers if engine == "flower" else None  # sites of a run
    table = read_experiment(file)
    planned = _planned(file, table, _choice(out, workers=at_once, **options))
    if dry_run:
        for line in commands(planned, engine):
            click.echo(line)
        return
    check_free(out, OWN, "no runs of an experiment")
    if watch and workers is None:
        from edgefl_trainer.experiments.running import jobs_of
        from edgefl_trainer.experiments.watching import watch_study

        watch_study(jobs_of(planned), out, as_json=as_json)
        return
    check_engine(engine)
    from edgefl_trainer.experiments.comparison_text import render_comparison  # with matplotlib, which takes a second
    from edgefl_trainer.experiments.finished import find_runs
    from edgefl_trainer.experiments.running import jobs_of, run_planned
    from edgefl_trainer.experiments.study_book import StudyBook
    from edgefl_trainer.experiments.watching import following
    from edgefl_trainer.tracking.tracks import read_tracks

    for job in jobs_of(planned):
        read_tracks(track, job.folder, job.name)  # what cannot be followed shows before anything begins
    click.echo(_what_begins(table, planned, tiny=options["tiny"]), err=True)
    with (
        tells_how_to_go_on(lambda: ("edgefl-train", *sys.argv[1:])),
        following(jobs_of(planned), out, shown=watch, as_json=as_json) as look,
    ):
        crew = _crew(engine, workers, out, look, track)
        failed = run_planned(planned, lambda line: click.echo(line, err=True), crew, StudyBook(out))
    if folders := [one.folder for one in planned if one.name not in failed]:
        click.echo(render_comparison(table, find_runs(table, folders), style))
    if failed:
        click.echo(f"{counted(len(failed), 'run')} failed; the same command tries again", err=True)
        sys.exit(1)


def _what_begins(table: "Experiment", planned: "Sequence[PlannedRun]", *, tiny: bool) -> str:
    """Say how many runs there are, and how long one takes."""
    from edgefl_trainer.experiments.comparison import TRIAL
    from edgefl_trainer.experiments.planning import pretraining_of

    told = "; ".join(f"{one.minutes:g} min a run on {one.machine} ({one.basis})" for one in table.commands)
    known = f"tiny: seconds to minutes a run, {TRIAL}" if tiny else f"the file's figures: {told}"
    first = counted(len(pretraining_of(planned)), "pre-training run")
    from_what = f" that start from {first}" if pretraining_of(planned) else ""
    return f"{table.title}: {counted(len(planned), 'run')}{from_what}; {known}"


def _crew(engine: str, workers: int | None, out: Path, look: "Callable[[], None]", track: tuple[str, ...]) -> "Crew":
    """Who makes the runs: this process, several, or one after the other those that start Flower's simulation."""
    from edgefl_trainer.experiments.crews import Processes, ThisProcess
    from edgefl_trainer.experiments.study_book import BOOK

    if engine == "flower":
        from edgefl_trainer.flower import study_run

        return Processes(1, out / BOOK, look, track, study_run.__name__)
    return ThisProcess(track) if workers is None else Processes(workers, out / BOOK, look, track)


def _planned(file: Path, table: "Experiment", choice: "Choice") -> "list[PlannedRun]":
    """Plan the runs of a table; a `SettingError` that names its file where they cannot be planned."""
    from edgefl_trainer.errors import SettingError
    from edgefl_trainer.experiments.planning import plan_runs

    try:
        return plan_runs(table, choice, os.environ)
    except SettingError as error:
        raise SettingError(f"{file}: {error}") from error


def _choice(out: Path, seeds: str, rows: str | None, parts: str | None, **options: Any) -> "Choice":
    """The command line's options as a choice; a `SettingError` where the seeds are not whole numbers."""
    from edgefl_trainer.errors import SettingError
    from edgefl_trainer.experiments.planning import Choice

    try:
        numbers = tuple(dict.fromkeys(int(text) for text in seeds.split(",")))
    except ValueError as error:
        raise SettingError(f"--seeds {seeds}: use whole numbers with commas between, such as 0,1,2.") from error
    tiny, assignments = options.pop("tiny"), tuple(options.pop("assignments"))
    flags = {**options, "data": options["data"] or None}
    return Choice(
        out=out,
        seeds=numbers,
        rows=names(rows) if rows else (),
        parts=names(parts) if parts else (),
        tiny=tiny,
        flags=flags,
        assignments=assignments,
    )

"""`edgefl-train table`: finished runs in one table, or beside a paper's numbers, and a picture of them."""

from pathlib import Path

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer

ANSWERS = ("accuracy_open_questions", "accuracy_closed_questions")  # of runs over questions alone
SITE_FIGURES = (  # `evaluate.metrics.METRIC_NAMES`, without what that module imports
    "balanced_accuracy", "macro_precision", "macro_recall", "macro_f1", "specificity", "auroc", "accuracy", "ece",
    "brier", "aurc", "open_accuracy", "open_balanced_accuracy", "open_macro_precision", "open_macro_f1",
    "open_specificity",
)  # fmt: skip


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--experiment",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=shared.there,
    metavar="FILE",
    help="Show the runs beside the paper's numbers from this experiments/*.toml.",
)
@click.option(
    "--metric",
    type=click.Choice((*SITE_FIGURES, *ANSWERS)),
    metavar="NAME",
    help=f"Figure to compare: {', '.join((*SITE_FIGURES, *ANSWERS))}.  "
    "[default: balanced_accuracy, of answers accuracy; with --experiment the paper's]",
)
@click.option(
    "--spread",
    type=click.Choice(["sample", "population"]),
    default="sample",
    show_default=True,
    help="Which standard deviation stands after ±: divided by n - 1, or by n.",
)
@click.option(
    "--format",
    "style",
    type=click.Choice(["md", "csv", "json", "latex"]),
    default="md",
    show_default=True,
    help="Form of the table.",
)
@shared.picture(
    "--plot",
    "Also draw accuracy on tune rows over rounds and bytes. With --metric, draw that figure of each site; with "
    "--experiment, what its file asks for.",
)
@needs_trainer
def table(
    runs: tuple[Path, ...], file: Path | None, metric: str | None, spread: str, style: str, plot: Path | None
) -> None:
    """Compare finished runs in a table, site by site. It shows mean, spread, worst site and bytes of a round.

    A RUN is a run directory, or a folder with finished runs below it.
    """
    from edgefl_protocol.durable import write_atomic
    from edgefl_protocol.errors import EdgeflError
    from edgefl_trainer.engine.folder import check_finished, run_folders

    for one in (path for folder in runs for path in run_folders(folder)):
        check_finished(one)  # needs no PyTorch, whose import takes seconds
    shared.tell_left_out(runs)
    from edgefl_trainer.engine.models import open_run
    from edgefl_trainer.environment import environment_of
    from edgefl_trainer.evaluate.chance import chance_of
    from edgefl_trainer.evaluate.plots.metric_plot import plot_metric
    from edgefl_trainer.evaluate.tables.recalls import render_recall
    from edgefl_trainer.evaluate.tables.rows import runs_of_rows, table_rows, usual_metric
    from edgefl_trainer.evaluate.tables.text import against, origin, render_table
    from edgefl_trainer.experiments import pictures
    from edgefl_trainer.experiments.comparison_text import render_comparison
    from edgefl_trainer.experiments.files import read_experiment
    from edgefl_trainer.experiments.finished import find_runs
    from edgefl_trainer.experiments.variants import told_apart

    ddof = 1 if spread == "sample" else 0
    if file is not None and metric is not None:
        raise click.UsageError(
            "--metric and --experiment cannot be used together: the experiment names its own figures."
        )
    try:
        if file is None:
            folders = [path for folder in runs for path in run_folders(folder)]
            summaries = told_apart([open_run(folder) for folder in folders])
            machine = origin([environment_of(folder) for folder in folders])
            named, metric = metric, metric or usual_metric(summaries)
            click.echo(render_table(summaries, style, machine=machine, metric=metric, ddof=ddof))
            if style == "md" and (recall := render_recall(summaries)):
                click.echo(recall)
            picture = b""
            if plot and named:
                chance = [chance_of(some, named) for some in runs_of_rows(summaries)]
                rows = table_rows(summaries, named, ddof)
                picture = plot_metric(rows, named, chance, title=against(summaries))
            elif plot:
                picture = pictures.of_runs(folders, summaries)
        else:
            experiment = read_experiment(file)
            found = find_runs(experiment, runs)
            click.echo(render_comparison(experiment, found, style, ddof))
            picture = pictures.of_experiment(experiment, found) if plot else b""
    except ValueError as error:
        raise EdgeflError(f"{error}: name other runs.", "run") from error
    if plot is not None:
        write_atomic(plot, picture)
        click.echo(f"drew {plot}", err=True)

"""`edgefl-train evaluate`: the models of a finished run on other data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer


@click.command()
@shared.run_dir
@click.option("--data", multiple=True, required=True, metavar="SPEC", help="Data to judge on; repeatable.")
@click.option("--site", metavar="NAME", help="Judge all of the data with this site's model.  [default: each its own]")
@click.option(
    "--ood",
    multiple=True,
    metavar="textures|skin|PATH",
    help="Pictures not of the task: does the uncertainty tell them apart? Drawn textures, drawn "
    "skin without a lesion, or a folder or zip. Repeatable.",
)
@click.option(
    "--maps", is_flag=True, help="Also measure how true each map is that a device could show: minutes a site."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto is CUDA where there is a device.",
)
@shared.picture("--plot", "Also draw which class is taken for which, all sites together.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@needs_trainer
def evaluate(
    run_dir: Path,
    data: tuple[str, ...],
    site: str | None,
    ood: tuple[str, ...],
    maps: bool,
    device: str,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Judge the models of a finished RUN on other data. Takes all `test` rows, else all `val` rows.

    Data that names no split is judged whole, unless RUN learned from it: then a quarter of each site is, as in a run.
    """
    from edgefl_trainer.data.specs import check_there
    from edgefl_trainer.engine.folder import check_finished, check_model

    check_finished(run_dir)  # this and what follows needs no PyTorch, whose import takes seconds
    if site is not None:
        check_model(run_dir, site)
    check_there(data)
    from edgefl_trainer.commands.results_text import judged_words, map_lines, not_judged, site_lines
    from edgefl_trainer.engine.first_run import untrained_line
    from edgefl_trainer.engine.judging.evaluation import evaluate as judge_run
    from edgefl_trainer.engine.models import open_run
    from edgefl_trainer.errors import SettingError
    from edgefl_trainer.evaluate.no_round import part_lines

    run = open_run(run_dir)
    if plot is not None and run.questions is not None:
        raise SettingError(
            "nothing to draw: this run answers questions, and the picture is of classes: leave --plot out."
        )
    report = (lambda line: click.echo(line, err=True)) if maps else None
    summary = judge_run(run, data, device, ood, report, site)
    untrained = untrained_line(run.settings, run.folder)
    if untrained:
        click.echo(f"warning: {untrained}", err=True)
    click.echo(f"reported on {judged_words(summary)}", err=True)
    own = [f"all sites of the data are judged with the model of {site}"] if site is not None else []
    lines = [*own, *part_lines(summary), *site_lines(summary), *not_judged(summary, data), *map_lines(summary)]
    click.echo(json.dumps(summary) if as_json else "\n".join(lines))
    if plot is not None:
        _draw(summary, plot, untrained)


def _draw(summary: Mapping[str, Any], plot: Path, untrained: str) -> None:
    from edgefl_protocol.durable import write_atomic
    from edgefl_protocol.sentences import UNTRAINED, counted
    from edgefl_trainer.commands.results_text import is_judged_whole
    from edgefl_trainer.errors import SettingError
    from edgefl_trainer.evaluate.confusion import MAX_CLASSES, pooled_matrix
    from edgefl_trainer.evaluate.plots.confusion_plot import plot_confusion

    found = summary["confusion"]
    if not found:
        raise SettingError(
            f"nothing to draw: a confusion matrix needs a site not held out, and at most {MAX_CLASSES} classes."
        )
    pictures = counted(sum(summary["sites"][name]["n_test"] for name in found), "picture")
    lent = f", model of {summary['model_of']}" if "model_of" in summary else ""
    judged = f"all {pictures}" if is_judged_whole(summary) else f"{pictures} ({summary['reported_rows']} rows)"
    title = f"{summary['method']}{lent}, {judged} of {counted(len(found), 'site')}"
    if learned := summary["rows_learned_from"]:
        title += f"\nTOO HIGH: the run learned from {learned:,} of these pictures"
    if untrained:
        title += f"\nUNTRAINED NETWORK: {UNTRAINED}"
    write_atomic(plot, plot_confusion(pooled_matrix(found), summary["classes"], title))
    click.echo(f"drew {plot}", err=True)

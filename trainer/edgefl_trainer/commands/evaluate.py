"""`edgefl-train evaluate`: the models of a finished run on other data."""

import json
from pathlib import Path

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer


@click.command()
@shared.run_dir
@click.option("--data", multiple=True, required=True, metavar="SPEC", help="Data to judge on; repeatable.")
@click.option(
    "--ood",
    multiple=True,
    metavar="textures|skin|PATH",
    help="Pictures not of the task (drawn, or a folder or zip): does the uncertainty tell them apart? Repeatable.",
)
@click.option(
    "--maps", is_flag=True, help="Also measure how true each map is that a device could show: minutes a site."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@needs_trainer
def evaluate(
    run_dir: Path, data: tuple[str, ...], ood: tuple[str, ...], maps: bool, device: str, as_json: bool
) -> None:
    """Judge the models of a finished RUN on other data. Takes all `test` rows, else all `val` rows."""
    from edgefl_trainer.commands.results_text import map_lines, site_lines
    from edgefl_trainer.engine.evaluation import evaluate as judge_run
    from edgefl_trainer.engine.models import open_run

    report = (lambda line: click.echo(line, err=True)) if maps else None
    summary = judge_run(open_run(run_dir), data, device, ood, report)
    click.echo(f"reported on {summary['reported_rows']} rows", err=True)
    click.echo(json.dumps(summary) if as_json else "\n".join([*site_lines(summary), *map_lines(summary)]))

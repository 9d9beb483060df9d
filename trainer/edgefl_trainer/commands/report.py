"""`edgefl-train report`: finished runs as one HTML file to keep, to print or to send."""

from pathlib import Path

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer

SUFFIXES = (".html", ".htm")


def _html(_: click.Context, option: click.Parameter, value: Path) -> Path:
    if value.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"{value} does not end in .html, and nothing else is written.", param=option)
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.parent}: make it, or name another.", param=option)
    return value


@click.command()
@click.argument("runs", metavar="RUN…", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_html,
    metavar="FILE.html",
    help="The page to write.",
)
@shared.force
@needs_trainer
def report(runs: tuple[Path, ...], out: Path, force: bool) -> None:
    """Write finished runs as one HTML page, to keep or print.

    It tells what was learned and from whom, method and settings with their sources, what leaves a site, figures with
    intervals, certainty and referral, the rounds, machine and digests. Where RUN holds audit.json it shows the audit.
    Several runs are compared first.

    A RUN is a run directory, or a folder with finished runs below it. The page needs no network and no other file.
    """
    from edgefl_protocol.durable import write_atomic
    from edgefl_trainer.engine.folder import check_finished, run_folders
    from edgefl_trainer.errors import RunError

    if out.exists() and not force:
        raise RunError(f"{out} exists: add --force to write it anew, or name another --out.")
    folders = [path for folder in runs for path in run_folders(folder)]
    for one in folders:
        check_finished(one)  # needs no PyTorch, whose import takes seconds
    shared.tell_left_out(runs)
    from datetime import UTC, datetime

    from edgefl_trainer.reports.page import report_page
    from edgefl_trainer.reports.run_facts import read_run

    page = report_page([read_run(folder) for folder in folders], datetime.now(UTC))
    write_atomic(out, page.encode())
    click.echo(f"wrote {out}", err=True)

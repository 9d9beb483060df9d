"""`edgefl-train predict`: score pictures with a finished run."""

import json
import sys
from pathlib import Path

import click

from edgefl_protocol.sentences import counted
from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer


@click.command()
@shared.run_dir
@click.argument("images", metavar="IMAGES…", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--site",
    required=True,
    metavar="NAME",
    help="Site whose model scores the images: a name of the column center, or a site that `run` printed.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object for each image, with the keys of `edgefl score`."
)
@shared.class_info
@needs_trainer
def predict(run_dir: Path, images: tuple[Path, ...], site: str, as_json: bool, class_info: Path | None) -> None:
    """Score IMAGES with the model that a site learned in RUN. This is the reference for what a device says."""
    from edgefl_trainer.engine.folder import check_finished, check_model

    check_finished(run_dir)  # this and what follows needs no PyTorch, whose import takes seconds
    check_model(run_dir, site)
    from edgefl_protocol.pictures.score import Score
    from edgefl_protocol.pictures.wording import learned_where
    from edgefl_trainer.commands.results_text import score_line
    from edgefl_trainer.engine.judging.prediction import predict_files
    from edgefl_trainer.engine.models import open_run

    failed, told_of_model = 0, False
    for found in predict_files(open_run(run_dir), site, images, class_info):
        failed += not isinstance(found, Score)
        if isinstance(found, Score) and not told_of_model:
            click.echo("\n".join([*found.model.warnings, learned_where(found.model)]), err=True)
            told_of_model = True
        told = found.to_json() if isinstance(found, Score) else found
        click.echo(json.dumps(told) if as_json else score_line(found))
    if failed:
        click.echo(f"{failed} of {counted(len(images), 'image')} could not be scored", err=True)
        sys.exit(1)

"""`edgefl-train finetune`: go on with what a self-supervised run learned, on a share of the labels.

The command takes data, sites, task, classes, seed and preset from the run it goes on with, names that run as backbone,
and runs the method `finetune`; `edgefl-train run finetune --backbone run:RUN` with the same options does the same.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import needs_trainer
from edgefl_trainer.commands.options import names
from edgefl_trainer.commands.stopping import named_from_here, resuming, tells_how_to_go_on

if TYPE_CHECKING:
    from edgefl_trainer.engine.models import FinishedRun

TAKEN_OVER = ("data", "partition", "task", "classes", "image_px", "colour", "seed", "preset")


@click.command()
@shared.run_dir
@click.option(
    "--mode",
    required=True,
    type=click.Choice(["local", "federated"]),
    help="local: each site learns a model of its own; federated: the sites average one model.",
)
@click.option(
    "--labels",
    required=True,
    type=float,
    metavar="SHARE",
    help="Share of each site's training images whose label is used, such as 0.1, 0.2, 0.4 or 0.8. A smaller share "
    "is a part of every larger one.",
)
@shared.out
@click.option("--data", multiple=True, metavar="SPEC", help="Use this data instead of RUN's: docs/reference/data.md.")
@click.option(
    "--partition",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Sites and rows, as `edgefl-train partition` dealt them.  [default: RUN's]",
)
@shared.task("RUN's")
@click.option("--classes", metavar="A,B,…", help="Keep only these classes.  [default: RUN's]")
@shared.participation
@shared.balance
@click.option(
    "--select",
    type=click.Choice(["last", "tune", "pooled"]),
    help=(
        "Which round a site keeps: the last, its best on tune rows, or one for all sites, the best on their tune rows "
        "together.  [default: pooled; with mode=local: tune]"
    ),
)
@click.option(
    "--rounds",
    type=int,
    metavar="N",
    help="Rounds of training. In local mode each model is judged after every round.  [default: the preset's]",
)
@click.option("--epochs", type=int, metavar="N", help="Epochs in a round.  [default: the preset's]")
@shared.images_per_site
@click.option("--seed", type=int, metavar="N", help="Seed of all random draws.  [default: RUN's]")
@click.option(
    "--preset",
    type=click.Choice(["tiny", "bench84", "paper"]),
    help="Set of default settings: schedule and sizes.  [default: RUN's]",
)
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Set a hyper-parameter; repeatable.")
@shared.device
@shared.autocast
@shared.track
@shared.resume
@shared.summary_json
@needs_trainer
def finetune(run_dir: Path, out: Path, resume: bool, as_json: bool, track: tuple[str, ...], **options: Any) -> None:
    """Fine-tune with few labels what RUN learned without any. The whole network of RUN and a head learn from a share of
    the labels.

    The schedule is the paper's for the kind of network and the mode; the preset shortens it.
    """
    from edgefl_trainer.data.specs import check_there
    from edgefl_trainer.engine.folder import check_finished
    from edgefl_trainer.engine.settings import given_settings, resolve
    from edgefl_trainer.tracking.tracks import read_tracks

    tracks = read_tracks(track, out)
    assignments = [f"mode={options.pop('mode')}", *_checked(options.pop("assignments"))]
    if options["classes"] is not None:
        options["classes"] = names(options["classes"])
    options["data"] = options["data"] or None
    check_finished(run_dir)  # this and what follows needs no PyTorch, whose import is slow
    given_settings("finetune", options, None, assignments)
    check_there(options["data"] or ())
    from edgefl_trainer.commands.results_text import summary_text
    from edgefl_trainer.engine.models import open_run
    from edgefl_trainer.engine.run import run
    from edgefl_trainer.tracking.following import followed

    settings = resolve("finetune", flags_of(open_run(run_dir), options), None, assignments)
    with tells_how_to_go_on(resuming(out), named_from_here(out)):
        summary = run(settings, out, resume=resume, during=followed(tracks, out, settings))
    click.echo(json.dumps(summary) if as_json else summary_text(summary))


def flags_of(before: "FinishedRun", options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fine-tuning run's settings: those given that are not None, the rest from the run that it goes on with.

    A `RunError` where that run learned no network.
    """
    from edgefl_trainer.engine.hyper_parameters import method_class
    from edgefl_trainer.errors import RunError

    if method_class(before.settings.method).needs_labels:
        raise RunError(
            f"{before.folder} is a run of {before.settings.method}, which does not train a whole network: name a "
            "finished run of a method without labels, such as fedmae."
        )
    taken = {name: getattr(before.settings, name) for name in TAKEN_OVER}
    if options.get("data") and not options.get("partition"):
        del taken["partition"]  # it was dealt from other data
    given = {name: value for name, value in options.items() if value is not None}
    return {**taken, **given, "backbone": f"run:{before.folder}"}


def _checked(assignments: tuple[str, ...]) -> tuple[str, ...]:
    """The assignments, none of which says the mode again."""
    if any(text.partition("=")[0] == "mode" for text in assignments):
        raise click.UsageError("--set mode=… and --mode cannot be used together: give --mode alone.")
    return assignments

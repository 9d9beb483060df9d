"""`edgefl-train run`: one method over the sites of the data."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_trainer.commands import options as shared
from edgefl_trainer.commands.extra import check_engine, needs_trainer
from edgefl_trainer.commands.options import names
from edgefl_trainer.commands.stopping import named_from_here, resuming, tells_how_to_go_on

if TYPE_CHECKING:
    from edgefl_trainer.engine.run import Drive
    from edgefl_trainer.engine.settings import RunSettings


def _without_site(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    """Say what `evaluate`, `predict` and a bundle take and a run does not; click would suggest --seed."""
    if value is not None:
        raise click.UsageError(
            "run learns at all sites of the data, so it takes no --site; for one site alone end the data's SPEC in "
            f"@site={value}."
        )


def _batch(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and value != "auto" and not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a number nor auto.")
    return value


@click.command()
@click.argument("method", required=False)
@click.option(
    "--data", multiple=True, metavar="SPEC", help="Data to learn from; repeatable; see docs/reference/data.md."
)
@shared.out
@click.option(
    "--partition",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Sites and rows, as `edgefl-train partition` dealt them.  [default: those of the data]",
)
@shared.task("all")
@click.option("--classes", metavar="A,B,…", help="Keep only these classes.")
@click.option(
    "--backbone",
    metavar="NAME",
    help="Network: derm-vit-tiny-84, derm-vit-taught-84, drawn-lesions-84, run:DIR, file:PATH, package:NAME, "
    "timm:NAME, cnn:NAME, vit:WIDTHxDEPTH/PATCH or tiny.  "
    "[default: derm-vit-tiny-84; for methods without labels the preset's own; with --preset tiny the "
    "untrained tiny]",
)
@click.option(
    "--image-px", type=click.IntRange(min=1), metavar="PX", help="Side of the images.  [default: the backbone's own]"
)
@click.option(
    "--colour",
    type=click.Choice(["none", "shades_of_grey_6"]),
    help="What becomes of the colour of the light: none keeps it; shades_of_grey_6 removes it from every picture, "
    "here and on devices.  [default: none]",
)
@click.option(
    "--site",
    metavar="NAME",
    hidden=True,  # there is none; who knows it of the other commands is told
    expose_value=False,
    callback=_without_site,
    help="Refused: a run learns at all sites of the data.",
)
@shared.participation
@shared.privacy_budget
@click.option(
    "--unlabelled",
    type=click.Choice(["none", "site", "spread"]),
    help=f"{shared.UNLABELLED_HELP}  [default: none; for methods without labels spread]",
)
@click.option(
    "--labels",
    type=float,
    metavar="SHARE",
    help="Share of each site's training images whose label is used.  [default: 1]",
)
@shared.balance
@click.option(
    "--select",
    type=click.Choice(["last", "tune", "pooled"]),
    help=(
        "Which round is kept: the last, the best on each site's tune rows (for a method without labels, by its "
        "probe), or one for all sites, the best on their tune rows together.  [default: last; finetune: pooled, or "
        "tune with mode=local]"
    ),
)
@click.option(
    "--probe-every",
    type=click.IntRange(min=0),
    metavar="ROUNDS",
    help="Methods without labels: judge the encoder by a linear probe every N rounds; 0 for never.  [default: 5]",
)
@click.option("--rounds", type=int, metavar="N", help="Rounds of training.  [default: the preset's]")
@click.option("--epochs", type=int, metavar="N", help="Local epochs in a round.  [default: the preset's]")
@shared.images_per_site
@click.option("--seed", type=int, metavar="N", help="Seed of all random draws.  [default: 0]")
@click.option(
    "--preset",
    type=click.Choice(["tiny", "bench84", "paper"]),
    help="Set of default settings: schedule and sizes.  [default: bench84]",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="TOML file of settings.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a hyper-parameter of the method; repeatable.",
)
@click.option(
    "--batch",
    callback=_batch,
    metavar="N|auto",
    help="Images of a step, as --set batch=N; auto: as many as fit the card's free memory.  [default: the preset's]",
)
@shared.device
@shared.autocast
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes that work on sites side by side, each on the next graphics card. On a CPU the results "
    "are the same.  [default: 1]",
)
@click.option(
    "--engine",
    type=click.Choice(["local", "flower"]),
    default="local",
    show_default=True,
    help="What the sites work on: local is EdgeFL alone; flower is Flower's simulation (docs/guides/flower.md). The "
    "result is the same.",
)
@shared.track
@shared.resume
@shared.summary_json
@needs_trainer
def run(method: str | None, out: Path, as_json: bool, resume: bool, track: tuple[str, ...], **options: Any) -> None:
    """Learn with METHOD over all sites of the data. Model, metrics and summary are left in DIR.

    `edgefl-train run --resume --out DIR` continues the run in DIR and needs nothing else.
    """
    from edgefl_protocol.errors import EdgeflError
    from edgefl_trainer.data.errors import DataError
    from edgefl_trainer.data.specs import check_there
    from edgefl_trainer.engine.folder import begun_settings, check_begun, check_free
    from edgefl_trainer.engine.settings import given_settings, resolve, resolve_again
    from edgefl_trainer.models.backbone_names import check_name
    from edgefl_trainer.tracking.tracks import read_tracks

    tracks = read_tracks(track, out)
    assignments, config, batch = options.pop("assignments"), options.pop("config"), options.pop("batch")
    if batch is not None:
        if any(text.partition("=")[0].strip() == "batch" for text in assignments):
            raise click.UsageError("--set batch=… and --batch cannot be used together: give --batch alone.")
        assignments = (*assignments, *([] if batch == "auto" else [f"batch={batch}"]))
    engine = options.pop("engine")
    check_engine(engine)
    if options["classes"] is not None:
        options["classes"] = names(options["classes"])
    options["data"] = options["data"] or None
    before = begun_settings(out) if resume else None
    if before is not None:
        settings = resolve_again(before, method, options, config, assignments)
    elif method is None:
        none = f"there is no run in {out} to continue: " if resume else ""
        raise click.UsageError(f"{none}name a METHOD; `edgefl-train methods` lists them.")
    elif options["data"] is None and config is None:
        raise EdgeflError("no data is named: give --data SPEC, such as --data folder:PATH.", "setting")
    else:
        given, _, data = given_settings(method, options, config, assignments)  # without PyTorch, whose import is slow
        check_there(data)
        check_name(given.get("backbone", "tiny"))
        check_free(out)
        check_begun(out, resume=resume)
        settings = resolve(method, options, config, assignments)
    from edgefl_trainer.commands.results_text import summary_text
    from edgefl_trainer.engine.run import run as run_federation
    from edgefl_trainer.tracking.following import followed

    try:
        with tells_how_to_go_on(resuming(out), named_from_here(out)):
            following = followed(tracks, out, settings)
            drive = _driver(engine, settings)
            summary = run_federation(
                settings, out, resume=resume, during=following, fit_batch=batch == "auto", drive=drive
            )
    except DataError as error:
        if type(error) is not DataError or settings.partition:  # a partition deals what the data does not
            raise
        from edgefl_trainer.data.survey import with_others

        labels = settings.build_method().needs_labels
        raise with_others(settings.data, error, settings.seed, settings.task, labels=labels) from error
    click.echo(json.dumps(summary) if as_json else summary_text(summary))


def _driver(engine: str, settings: "RunSettings") -> "Drive":
    """What runs the sites of a run: this machine, or Flower."""
    if engine == "flower":
        from edgefl_trainer.flower.simulation import on_simulation

        return on_simulation(settings)
    from edgefl_trainer.engine.local_engine import LocalEngine

    return LocalEngine.run

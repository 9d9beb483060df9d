"""`edgefl train`: learn on this device from the owner's labelled pictures.

The work is done by `learning.round_alone`; its progress and results become lines in `learning_text`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_client.commands.learning_text import (
    clear_line,
    learned_text,
    limits_of,
    limits_options,
    one_of,
    pictures_option,
    progress,
    verdict_lines,
)
from edgefl_client.commands.options import (
    bundle_of,
    home_of,
    home_option,
    json_option,
    model_option,
    report,
    threads_option,
    trust_option,
)
from edgefl_client.commands.score import formats_option
from edgefl_client.commands.stopping import pausing, stop_on_signal

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_protocol.bundle import Bundle
    from edgefl_protocol.payload import Payload


@click.command()
@click.option(
    "--labels",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="CSV",
    help="Table with the columns image (a file, relative to the table), label (a class of the model) and, where known, "
    "lesion_id.",
)
@pictures_option
@click.option(
    "--epochs", type=click.IntRange(1, 10_000), metavar="N", help="Epochs of this round.  [default: the bundle's]"
)
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Pictures in a step.  [default: the bundle's]")
@click.option(
    "--balance",
    type=click.Choice(["none", "class"]),
    help="Draw the classes as often as they occur, or equally often.  [default: the bundle's]",
)
@limits_options
@click.option("--restart", is_flag=True, help="Forget where learning stands and begin with the bundle's values.")
@threads_option
@formats_option
@model_option
@trust_option
@json_option
@home_option
@click.pass_context
def train(context: click.Context, /, as_json: bool, home_dir: str | None, **given: Any) -> None:
    """Learn from labelled pictures on this device. What it learns is used only if it passes the learning
    gate (docs/reference/device-learning.md). From now on `edgefl sync` learns from the same pictures.

    Of each class at least 20 pictures are held back to judge with, and at least 5 more must be there to learn from.
    Stopped (SIGTERM, Ctrl-C) or killed, it goes on where it was when started again.
    """
    from edgefl_client.learning.errors import Paused
    from edgefl_client.learning.options import TrainOptions
    from edgefl_client.learning.round_alone import run_train
    from edgefl_client.learning.round_learner import ALONE
    from edgefl_client.learning.round_report import not_begun

    pictures = one_of(given["labels"], given["pictures"])
    if pictures is None:
        raise click.UsageError("name a table with --labels, or a folder with --pictures.")
    home = home_of(context, home_dir)
    vouched = bundle_of(home, given["model"], given["trusted"])
    name, others = _membership(home, vouched.bundle)
    with stop_on_signal("step") as stop:
        options = TrainOptions(
            epochs=given["epochs"],
            batch=given["batch"],
            balance=given["balance"],
            threads=given["threads"],
            restart=given["restart"],
            formats=given["formats"],
            checkpoint_seconds=given["checkpoint_every"],
            limits=limits_of(given, stop),
            report=vouched.before_told(pausing(progress(), stop)),
        )
        try:
            found = run_train(home, vouched.bundle, pictures, options, site=name or ALONE, others=others)
        except Paused as paused:  # before the first step: nothing was begun
            clear_line()
            report(not_begun(paused.reason), as_json, f"stopped before learning: {paused.reason}")
            return
    clear_line()
    text = learned_text(found, "the same command goes on from there", own=True) + verdict_lines(found)
    report(found, as_json, text)


def _membership(home: "Home", bundle: "Bundle") -> "tuple[str | None, Payload | None]":
    """This member's name and the newest broadcast of the others' maps, where the bundle is its federation's.

    Maps of another form would teach what they do not mean: they are left out, and it is said.
    """
    from edgefl_client.learning.errors import LearningError
    from edgefl_client.learning.round_plan import agreed
    from edgefl_client.sharing.broadcasts import newest_file
    from edgefl_exchange.errors import NotEnrolled
    from edgefl_exchange.membership import load_membership, load_task
    from edgefl_protocol.durable import read_bounded
    from edgefl_protocol.payload import MAX_PAYLOAD_BYTES, Payload
    from edgefl_protocol.rules.maps import numbered_as_model

    try:
        membership = load_membership(home.member)
    except NotEnrolled:
        return None, None
    newest = newest_file(home, membership.federation)
    task = load_task(home.member)
    if task is None or newest is None or bundle.manifest.line_key != (membership.federation, task.line, task.task):
        return membership.name, None
    if not task.takes_maps:
        return membership.name, None  # its broadcasts are networks, which only a round needs
    if bundle.training is not None and bundle.training.kind == task.method:
        try:
            agreed(bundle, task.settings, task.backbone, complete=task.train_rounds > 0)
        except LearningError as error:
            click.echo(f"The others' maps are left out: {error}.", err=True)
            return membership.name, None
    broadcast = Payload.from_bytes(read_bounded(newest, MAX_PAYLOAD_BYTES))
    maps = numbered_as_model(broadcast.arrays, task.classes, bundle.labels.classes)
    return membership.name, Payload(maps, broadcast.scalars)

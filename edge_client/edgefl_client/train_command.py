"""`edgefl train`: learn on this device from the owner's labelled pictures.

The work is done by `learning.running`; here its progress and results become lines.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_client.command_options import finite, home_of, home_option, json_option, model_option, report, trust_option
from edgefl_client.score_command import formats_option

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_protocol.bundle import Bundle
    from edgefl_protocol.payload import Payload


_CLEAR = "\r\x1b[K"  # of a terminal's line


@click.command()
@click.option(
    "--labels",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="CSV",
    help="Table with the columns image (a file, relative to the table), label (a class of the model) and, where known, "
    "lesion_id.",
)
@click.option(
    "--epochs", type=click.IntRange(1, 10_000), metavar="N", help="Epochs of this round.  [default: the bundle's]"
)
@click.option("--batch", type=click.IntRange(1, 1024), metavar="N", help="Pictures in a step.  [default: the bundle's]")
@click.option(
    "--balance",
    type=click.Choice(["none", "class"]),
    help="Draw the classes as often as they occur, or equally often.  [default: the bundle's]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.0, min_open=True),
    callback=finite,
    metavar="M",
    help="Stop after M minutes.  [default: never]",
)
@click.option("--memory", type=click.IntRange(1), metavar="MIB", help="Stop above MIB of memory.  [default: never]")
@click.option(
    "--battery",
    type=click.IntRange(0, 100),
    default=50,
    show_default=True,
    metavar="PERCENT",
    help="On battery, stop below this charge.",
)
@click.option(
    "--checkpoint-every",
    type=click.FloatRange(0.0),
    callback=finite,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="At most this much work is lost when the power fails; 0 saves after every step.",
)
@click.option("--restart", is_flag=True, help="Forget where learning stands and begin with the bundle's values.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Processor threads.  [default: all that are allowed]"
)
@formats_option
@model_option
@trust_option
@json_option
@home_option
@click.pass_context
def train(context: click.Context, /, as_json: bool, home_dir: str | None, **given: Any) -> None:
    """Learn from labelled pictures on this device; what it learns is used only if it is no worse than the bundle.

    Of each class at least 20 pictures are held back to judge with, and at least 5 more must be there to learn from.
    Stopped or killed, it goes on where it was when started again.
    """
    from edgefl_client.learning.limits import Limits
    from edgefl_client.learning.options import TrainOptions
    from edgefl_client.learning.rounds import ALONE
    from edgefl_client.learning.running import run_train

    home = home_of(context, home_dir)
    bundle = _bundle(home, given["model"], given["trusted"])
    name, others = _membership(home, bundle)
    options = TrainOptions(
        epochs=given["epochs"],
        batch=given["batch"],
        balance=given["balance"],
        threads=given["threads"],
        restart=given["restart"],
        formats=given["formats"],
        checkpoint_seconds=given["checkpoint_every"],
        limits=Limits(minutes=given["minutes"], memory_mib=given["memory"], battery_percent=given["battery"]),
        report=_progress(),
    )
    found = run_train(home, bundle, given["labels"], options, site=name or ALONE, others=others)
    if sys.stderr.isatty():
        click.echo(_CLEAR, err=True, nl=False)
    report(found, as_json, _sentence(found))


def _bundle(home: "Home", model: Path | None, trusted: tuple[str, ...]) -> "Bundle":
    import time

    from edgefl_client import models
    from edgefl_client import trust as signers

    extra = [signers.read_public_key(pub).public for pub in trusted]
    return models.open_model(home, models.read_file(home, model), extra, time.time_ns() // 1_000_000)


def _membership(home: "Home", bundle: "Bundle") -> "tuple[str | None, Payload | None]":
    """This member's name and the newest broadcast of the others' maps, where the bundle is its federation's."""
    from edgefl_client.exchange.errors import NotEnrolled
    from edgefl_client.exchange.membership import load_membership, load_task
    from edgefl_client.learning.peers import renumbered
    from edgefl_protocol.durable import read_bounded
    from edgefl_protocol.payload import MAX_PAYLOAD_BYTES, Payload

    try:
        membership = load_membership(home.member)
    except NotEnrolled:
        return None, None
    newest = sorted(home.broadcasts.glob(f"{membership.federation}-*.payload"))[-1:]
    task = load_task(home.member)
    if task is None or not newest or bundle.manifest.line_key != (membership.federation, task.line, task.task):
        return membership.name, None
    maps = Payload.from_bytes(read_bounded(newest[0], MAX_PAYLOAD_BYTES))
    return membership.name, renumbered(maps, task.classes, bundle.labels.classes)


def _progress() -> Callable[[Mapping[str, float | int | str]], None]:
    """Prints what happens on standard error: one line that grows in a terminal, a line an epoch elsewhere."""
    live = sys.stderr.isatty()
    clear = _CLEAR if live else ""

    def show(facts: Mapping[str, float | int | str]) -> None:
        if "warning" in facts:
            click.echo(f"{clear}{facts['warning']}.", err=True)
        elif "summary" in facts:
            shared = f"{facts['kd']:.4f} from the others' maps"
            click.echo(f"{clear}epoch {facts['summary']}: loss {facts['loss']:.4f}, of it {shared}", err=True)
        elif live:
            click.echo(f"{_CLEAR}{_now(facts)}", err=True, nl=False)

    return show


def _now(facts: Mapping[str, float | int | str]) -> str:
    if "reading" in facts:
        return f"reading picture {facts['reading']} of {facts['pictures']}"
    if "judging" in facts:
        return f"judging: {facts['judging']} of {facts['pictures']} scores"
    step, steps = int(facts["step"]), int(facts["steps"])
    bar = "#" * (20 * step // steps)
    return f"epoch {facts['epoch']} of {facts['epochs']} [{bar:<20}] step {step} of {steps}, loss {facts['loss']:.4f}"


def _sentence(found: Mapping[str, Any]) -> str:
    if found["state"] == "paused":
        where = f"round {found['round']}, epoch {found['epoch'] + 1} of {found['epochs']}"
        return f"stopped in {where}: {found['reason']}; the same command goes on from there"
    gate = found["gate"]
    figures = (
        f"balanced accuracy on {gate['held_back']} pictures held back: {gate['personal_balanced_accuracy']:.3f}, the "
        f"bundle's {gate['bundle_balanced_accuracy']:.3f}; wrong without a referral: "
        f"{gate['personal_wrong_not_referred']}, the bundle's {gate['bundle_wrong_not_referred']}"
    )
    return f"round {found['round']} learned from {found['learned_from']} pictures; {figures}: {_verdict(found)}"


def _verdict(found: Mapping[str, Any]) -> str:
    """What is scored with from now on, and which classes that never names."""
    used, passed = found["in_use"], found["gate"]["passed"]
    said = "personal values are in use from now on" if passed else "not as good as the bundle, so not used"
    if used["kind"] == "personal" and not passed:
        said += f"; the personal values of round {used['round']} stay in use"
    if used["never_named"]:
        said += f"; no picture taught {', '.join(used['never_named'])}, so they never predict it"
    return said

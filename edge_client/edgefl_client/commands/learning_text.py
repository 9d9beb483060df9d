"""What the commands that learn share: the options that bound them, and how progress and results become lines.

Only `click` is imported before a command runs.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgefl_client.commands.options import finite
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    import threading

    from edgefl_client.learning.limits import LearningLimits

Command = TypeVar("Command", bound=Callable[..., Any])

_CLEAR = "\r\x1b[K"  # of a terminal's line
_OPTIONS = (
    click.option(
        "--minutes",
        type=click.FloatRange(0.0, min_open=True),
        callback=finite,
        metavar="M",
        help="Stop after M minutes.  [default: never]",
    ),
    click.option("--memory", type=click.IntRange(1), metavar="MIB", help="Stop above MIB of memory.  [default: never]"),
    click.option(
        "--battery",
        type=click.IntRange(0, 100),
        default=50,
        show_default=True,
        metavar="PERCENT",
        help="On battery, stop below this charge.",
    ),
    click.option(
        "--checkpoint-every",
        type=click.FloatRange(0.0),
        callback=finite,
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        help="At most this much work is lost when the power fails; 0 saves after every step.",
    ),
)


pictures_option = click.option(
    "--pictures",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Learn from the pictures in this folder and below, for a method that needs no labels; edgefl sync does so "
    "from now on.",
)


def one_of(labels: Path | None, pictures: Path | None) -> Path | None:
    """Return the owner's pictures, as a table or as a folder; None where neither was named.

    Raises:
        click.UsageError: both were.
    """
    if labels is not None and pictures is not None:
        raise click.UsageError("name the pictures once, with --labels or with --pictures.")
    return labels or pictures


def limits_options(command: Command) -> Command:
    """Add `--minutes`, `--memory`, `--battery` and `--checkpoint-every` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def limits_of(given: Mapping[str, Any], stop: "threading.Event") -> "LearningLimits":
    """Return what the options of `limits_options` allow."""
    from edgefl_client.learning.limits import LearningLimits

    return LearningLimits(
        minutes=given["minutes"], memory_mib=given["memory"], battery_percent=given["battery"], stopped=stop.is_set
    )


def clear_line() -> None:
    """Take the line of progress off a terminal."""
    if sys.stderr.isatty():
        click.echo(_CLEAR, err=True, nl=False)


def progress() -> Callable[[Mapping[str, float | int | str]], None]:
    """Print what happens on standard error: one line that grows in a terminal, a line an epoch elsewhere."""
    live = sys.stderr.isatty()
    clear = _CLEAR if live else ""

    def show(facts: Mapping[str, float | int | str]) -> None:
        if "warning" in facts:
            click.echo(f"{clear}{facts['warning']}.", err=True)
        elif "summary" in facts:
            shared = f", of it {facts['kd']:.4f} from the others' maps" if "kd" in facts else ""
            click.echo(f"{clear}epoch {facts['summary']}: loss {facts['loss']:.4f}{shared}", err=True)
        elif live:
            click.echo(f"{_CLEAR}{_now(facts)}", err=True, nl=False)

    return show


def _now(facts: Mapping[str, float | int | str]) -> str:
    if "reading" in facts:
        return f"reading picture {facts['reading']} of {facts['pictures']}"
    if "judging" in facts:
        return f"judging: {facts['judging']} of {facts['pictures']} scores"
    if "choosing" in facts:
        return f"choosing maps: {facts['choosing']} of {facts['pictures']} pictures"
    step, steps = int(facts["step"]), int(facts["steps"])
    bar = "#" * (20 * step // steps)
    return f"epoch {facts['epoch']} of {facts['epochs']} [{bar:<20}] step {step} of {steps}, loss {facts['loss']:.4f}"


def learned_text(found: Mapping[str, Any], goes_on: str, *, own: bool = False) -> str:
    """Describe a round of learning for a person; `goes_on` is a clause that says how a stopped one goes on.

    `own` tells that it is a round of this device alone, whose number is not that of the federation's round.
    """
    whose = "this device's own round" if own else "round"
    which = f"{whose} {found['round']}"
    if found["state"] == "paused":
        where = f"{which}, epoch {found['epoch'] + 1} of {found['epochs']}"
        return f"stopped in {where}: {found['reason']}; {goes_on}"
    learned = f"{which} learned from {counted(found['learned_from'], 'picture')}"
    return learned if found["gate"] is None else f"{learned}: {_verdict(found)}"


def verdict_lines(found: Mapping[str, Any]) -> str:
    """Write the figures of the gate, each on a line that is begun; empty where nothing was judged."""
    from edgefl_client.scoring.learning_verdict_words import verdict_table

    return f"\n{verdict_table(found['gate'])}" if found.get("gate") else ""


def _verdict(found: Mapping[str, Any]) -> str:
    """What is scored with from now on, and which classes that never names."""
    used, passed = found["in_use"], found["gate"]["passed"]
    said = "personal values are in use with this bundle from now on" if passed else "the new values are not used"
    if used["kind"] == "personal" and not passed:
        said += f"; the personal values of round {used['round']} stay in use"
    return said if used["never_predicts"] is None else f"{said}\n{used['never_predicts']}"

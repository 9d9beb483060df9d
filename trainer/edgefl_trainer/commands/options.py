"""Options that several commands take, and how a list of names is written."""

import difflib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

out = click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory: where everything that the run leaves is written.",
)
PNG = b"\x89PNG\r\n\x1a\n"  # how such a file begins
TASK_FORM = "all|nevus|NAME=A,B:REST"
TASK_HELP = "Classes of the data; nevus against other; or classes A and B as one, NAME, against REST, all the others."


UNLABELLED_HELP = (
    "Images without a label: none leaves them out; with site each site has its own; with spread also those of no site, "
    "dealt to the sites."
)


def there(_context: click.Context, _parameter: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a file that does not exist, and name the one beside it that was most likely meant."""
    if file is None or file.exists():
        return file
    beside = sorted(one.name for one in file.parent.glob(f"*{file.suffix}")) if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, beside, n=1)
    meant = f"; did you mean {file.parent / near[0]}?" if near else "."
    raise click.BadParameter(f"File {str(file)!r} does not exist{meant}")


def task(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make `--task`; `default` says in words what holds where it is not given."""
    return click.option("--task", metavar=TASK_FORM, help=f"{TASK_HELP}  [default: {default}]")


participation = click.option(
    "--participation",
    type=float,
    metavar="SHARE",
    help="Share of the sites that take part in each round.  [default: 1]",
)


def _budget(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """Refuse 0, which in `config.toml` means no bound: whoever types it means that nothing may be spent."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(
            f"{value:g} is no budget: give a number above 0, or leave it out to have no bound. A site that may spend "
            "nothing can send nothing under noise.",
            param=option,
        )
    return value


privacy_budget = click.option(
    "--privacy-budget",
    type=float,
    metavar="EPSILON",
    callback=_budget,
    help="Most epsilon that a site may spend on what it sends under noise (dp_noise), above 0: the reply that would "
    "cost more is refused.  [default: left out, no bound]",
)
balance = click.option(
    "--balance",
    type=click.Choice(["none", "class"]),
    help="Draw all classes of a site equally often.  [default: none]",
)
images_per_site = click.option(
    "--images-per-site",
    type=int,
    metavar="N",
    help="Use at most this many training images of a site; 0 uses all. Its other rows are judged all the same.  "
    "[default: the preset's]",
)
device = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where to compute; auto is CUDA where there is a device.  [default: auto]",
)
autocast = click.option(
    "--autocast",
    type=click.Choice(["auto", "none", "bf16"]),
    help="Precision of the backbone, or of a network that learns; auto is bf16 on CUDA.  [default: auto]",
)
track = click.option(
    "--track",
    "track",
    multiple=True,
    metavar="TRACKER",
    help="Follow the run in TensorBoard (tensorboard, or tensorboard:DIR) or on an MLflow server (mlflow:URI); "
    "repeatable.",
)
resume = click.option("--resume", is_flag=True, help="Continue the run in DIR.")
summary_json = click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of text.")
force = click.option("--force", is_flag=True, help="Overwrite files that exist.")
run_dir = click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
class_info = click.option(
    "--class-info",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.toml",
    help="What the classes mean: docs/reference/scores.md.  [default: what is known of ISIC's and HAM10000's labels]",
)


def picture(name: str, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an option that names a PNG to draw: a picture may be drawn anew, anything else is not overwritten."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option(name, type=kind, metavar="PNG", callback=_picture, help=help)


def _picture(_: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    if value.suffix.lower() != ".png":
        raise click.BadParameter(f"{value} does not end in .png, and nothing else is drawn.", param=option)
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.parent}: make it, or name another.", param=option)
    if value.exists() and not _is_png(value):
        raise click.BadParameter(f"{value} exists and is no PNG: name another file.", param=option)
    return value


def _is_png(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(PNG)) in (PNG, b"")


def tell_left_out(folders: Sequence[Path]) -> None:
    """Warn of the runs below these folders that are not finished, or damaged: a study would lose seeds unseen."""
    from edgefl_protocol.sentences import listed
    from edgefl_trainer.engine.folder import left_out_of

    for folder in folders:
        if left := left_out_of(folder):
            click.echo(f"warning: left out of {folder}: {listed(left)}", err=True)


def names(text: str) -> tuple[str, ...]:
    """Split `A,B,C` into its names, at least one."""
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise click.UsageError(f"{text!r} holds no name: write names separated by commas.")
    return found

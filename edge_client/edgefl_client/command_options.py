"""What the commands of `edgefl` share: their options, and how they come by home, device and model.

Only `click` is imported before a command runs.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgefl_client.federate import Device
    from edgefl_client.home import Home
    from edgefl_client.learning.personal import PersonalState
    from edgefl_client.scorer import Scorer
    from edgefl_protocol.bundle import Bundle

_HOME_HELP = "Folder of this device's keys, models and outbox.  [env var: EDGEFL_HOME; default: ~/.edgefl]"
home_option = click.option("--home", "home_dir", metavar="DIR", help=_HOME_HELP)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File, readable by you alone, with the passphrase of this device's keys.  "
    "[env var: EDGEFL_KEY_PASSPHRASE; default: not encrypted]",
)
model_option = click.option(
    "--model",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.edgefl",
    help="Bundle to score with.  [default: the one fetched by edgefl pull]",
)
trust_option = click.option(
    "--trust", "trusted", multiple=True, metavar="PUB", help="Public key of a signer, or its file; for this call only."
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Processor threads.  [default: all that are allowed]"
)


def finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Option callback: refuse a number that is not finite."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no finite number.")
    return value


def home_of(context: click.Context, home_dir: str | None) -> "Home":
    """The home folder that the command, or the group before it, was given."""
    from edgefl_client.home import find_home

    return find_home(home_dir or context.find_root().obj)


def device_of(context: click.Context, home_dir: str | None, passphrase_file: Path | None) -> "Device":
    """What the commands of a federation need of this device."""
    from edgefl_client.federate import Device
    from edgefl_protocol.durable import read_passphrase

    return Device(home=home_of(context, home_dir), passphrase=read_passphrase(passphrase_file))


weights_option = click.option(
    "--weights",
    type=click.Choice(["bundle", "personal"]),
    help="Values to score with: those the bundle was signed with, or those learned here that passed their gate.  "
    "[default: personal where there are some]",
)


def open_scorer(
    home: "Home",
    model: Path | None,
    trusted: tuple[str, ...],
    threads: int | None,
    refer_above: float | None,
    weights: str | None = None,
    *,
    keep_graphs: bool = False,
) -> "tuple[Scorer, Bundle]":
    """The scorer and its verified bundle.

    Args:
        home: the device's home.
        model: a bundle's file; None for the one in use.
        trusted: keys of signers trusted for this call.
        threads: processor threads; None for all that are allowed.
        refer_above: threshold of uncertainty; None for the card's.
        weights: `bundle` or `personal`; None for the personal ones where there are some.
        keep_graphs: whether the bundle keeps the bytes of its graphs; the scorer needs them no more.

    Raises:
        click.UsageError: no picture could exceed the threshold.
        BundleError: the bundle is refused.
        StorageError: it cannot be read, or there are no personal values (`no_personal`).
    """
    import time
    from concurrent.futures import ThreadPoolExecutor

    from edgefl_client import models
    from edgefl_client.memory import map_large_blocks_apart

    map_large_blocks_apart()
    # numpy's linear algebra is not used here, yet its threads would start with it and spin on the other processors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Reading and hashing the bundle and loading the libraries take about as long, and the first needs the interpreter
    # little: on two processors the one hides the other.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(models.read_file, home, model)
        from edgefl_client import trust as signers
        from edgefl_client.scorer import Scorer, largest_uncertainty, without_graphs

        extra = [signers.read_public_key(pub).public for pub in trusted]
        archive = reading.result()
    bundle = models.open_model(home, archive, extra, time.time_ns() // 1_000_000)
    most = largest_uncertainty(bundle)
    if refer_above is not None and refer_above > most:
        raise click.UsageError(f"--refer-above is {refer_above}; for this model, allowed are 0 to {most:g}")
    personal = None if weights == "bundle" else _personal(home, bundle, required=weights == "personal")
    scorer = Scorer(bundle, threads, refer_above, personal=personal)
    return scorer, bundle if keep_graphs else without_graphs(bundle)


def _personal(home: "Home", bundle: "Bundle", *, required: bool) -> "PersonalState | None":
    """The values learned here for this bundle; nothing of learning is loaded where nothing was learned."""
    from edgefl_protocol.errors import StorageError

    found = None
    if home.learning.exists():
        from edgefl_client.learning.personal import load_personal

        found = load_personal(home, bundle)
    if required and found is None:
        raise StorageError(
            "no personal values for this bundle have passed their gate here; learn some with edgefl train, or score "
            "with --weights bundle",
            "no_personal",
        )
    return found


def report(value: dict[str, Any], as_json: bool, text: str) -> None:
    """Print one result: JSON, or a sentence for a person."""
    if as_json:
        import json

        click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(text)

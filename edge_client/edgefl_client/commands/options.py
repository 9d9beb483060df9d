"""What the commands of `edgefl` share: their options, and how they come by home, device and model.

Only `click` is imported before a command runs.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_client.sharing.enrolled_device import Device
    from edgefl_client.trust.vouched_bundle import VouchedBundle

_HOME_HELP = "Folder of this device's keys, models and outbox.  [env var: EDGEFL_HOME; default: ~/.edgefl]"
home_option = click.option("--home", "home_dir", metavar="DIR", help=_HOME_HELP)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
passphrase_option = click.option(
    "--passphrase-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File, readable by you alone, with the passphrase of this device's keys; or give the passphrase itself in "
    "EDGEFL_KEY_PASSPHRASE.  [default: not encrypted]",
)
model_option = click.option(
    "--model",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.edgefl",
    help="File of the model (a signed bundle).  [default: the one in use, from edgefl use or edgefl sync]",
)
trust_option = click.option(
    "--trust",
    "trusted",
    multiple=True,
    metavar="PUB",
    help="Trust this signer for this call only: a public key, or its file.",
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Number of processor threads.  [default: all that are allowed]",
)


def finite(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Refuse a number that is not finite."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def home_of(context: click.Context, home_dir: str | None) -> "Home":
    """Return the home folder that the command, or the group before it, was given."""
    from edgefl_client.home import find_home

    return find_home(home_dir or context.find_root().obj)


def device_of(context: click.Context, home_dir: str | None, passphrase_file: Path | None) -> "Device":
    """Return this device as the commands of a federation need it."""
    from edgefl_client.sharing.enrolled_device import Device
    from edgefl_protocol.durable import read_passphrase

    return Device(home=home_of(context, home_dir), passphrase=read_passphrase(passphrase_file))


def bundle_of(home: "Home", model: Path | None, trusted: tuple[str, ...]) -> "VouchedBundle":
    """Open the verified bundle that `--model` names, or the one in use; `trusted` is what `--trust` gave."""
    import time

    from edgefl_client.trust import models
    from edgefl_client.trust.trusted_keys import read_public_key
    from edgefl_client.trust.vouched_bundle import VouchedBundle

    extra = [read_public_key(pub).public for pub in trusted]
    bundle = models.open_model(home, models.read_file(home, model), extra, time.time_ns() // 1_000_000)
    return VouchedBundle(bundle, home, extra)


weights_option = click.option(
    "--weights",
    type=click.Choice(["bundle", "personal"]),
    help="Values to score with: those of the signed bundle, or those learned here that passed their gate.  "
    "[default: personal, if there are any]",
)


def bundle_text(found: Mapping[str, Any]) -> str:
    """Say which bundle is in use, of what `sharing.bundles` tells."""
    verb = "now in use" if found["changed"] else "in use already"
    return f"{found['line']}/{found['task']} version {found['version']} is {verb}"


def report(value: dict[str, Any], as_json: bool, text: str) -> None:
    """Print one result: JSON, or a sentence for a person."""
    if as_json:
        import json

        click.echo(json.dumps(value, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(text)

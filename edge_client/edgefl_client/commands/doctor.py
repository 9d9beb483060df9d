"""`edgefl doctor`: is everything in order on this device? At the command line."""

from pathlib import Path

import click

from edgefl_client.commands.options import (
    device_of,
    home_option,
    json_option,
    model_option,
    passphrase_option,
    report,
    trust_option,
)


@click.command()
@click.option("--offline", is_flag=True, help="Do not ask the coordinator for the time.")
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Measure times and memory; this takes some seconds.",
)
@click.option(
    "--verbose",
    is_flag=True,
    help="Also print versions, the table of times, and the fastest times that this processor allows.",
)
@model_option
@trust_option
@passphrase_option
@json_option
@home_option
@click.pass_context
def doctor(
    context: click.Context,
    offline: bool,
    measure: bool,
    verbose: bool,
    model: Path | None,
    trusted: tuple[str, ...],
    passphrase_file: Path | None,
    as_json: bool,
    home_dir: str | None,
) -> None:
    """Check that this device is in order, and say what to do. Prints one line for each check: ok, warn or
    fail; ends with status 1 if a check fails.

    It needs neither a membership nor a network. It reads no picture and changes nothing.
    """
    from edgefl_client.doctor.checks import diagnosis_text, examine
    from edgefl_client.trust import trusted_keys as signers

    keys = tuple(signers.read_public_key(pub).public.hex() for pub in trusted)
    device = device_of(context, home_dir, passphrase_file)
    floors = verbose or as_json
    found = examine(device, online=not offline, speed=measure, floors=floors, model=model, trusted=keys)
    report(found.to_json(), as_json, diagnosis_text(found, verbose=verbose))
    context.exit(0 if found.healthy else 1)

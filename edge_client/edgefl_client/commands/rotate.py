"""`edgefl advanced rotate`: new keys for this device; `sync` does the same when they are 30 days old."""

from pathlib import Path

import click

from edgefl_client.commands.options import device_of, home_option, json_option, passphrase_option, report


@click.command()
@passphrase_option
@json_option
@home_option
@click.pass_context
def rotate(context: click.Context, passphrase_file: Path | None, as_json: bool, home_dir: str | None) -> None:
    """Change this device's keys now. The command sync does it by itself every 30 days.

    The new keys are signed by the old one and by themselves, so the operator need not approve them. The old signing key
    counts for 7 days more at the coordinator. Killed at any moment, the device keeps working keys: run it again.
    """
    device = device_of(context, home_dir, passphrase_file)
    with device.member() as member:
        member.rotate()
        found = {"name": member.membership.name, "fingerprint": member.membership.fingerprint}
    report(found, as_json, f"{found['name']} has new keys; their fingerprint is {found['fingerprint']}")

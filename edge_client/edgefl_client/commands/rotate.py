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
    """Change this device's keys now. The command sync does so by itself every 30 days.

    The old and the new keys sign the change, so the operator need not approve it. The old signing key
    counts for 7 more days at the coordinator. A device whose command is killed still has working keys: run it again.
    """
    device = device_of(context, home_dir, passphrase_file)
    with device.member() as member:
        member.rotate()
        found = {"name": member.membership.name, "fingerprint": member.membership.fingerprint}
    report(found, as_json, f"{found['name']} has new keys; their fingerprint is {found['fingerprint']}")

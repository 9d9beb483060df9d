"""`edgefl rotate`: new keys for this device; `sync` does the same when they are 30 days old."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgefl_client.command_options import device_of, home_option, json_option, passphrase_option, report

if TYPE_CHECKING:
    from edgefl_client.exchange.member import Member

_LOG = logging.getLogger("edgefl.exchange")


def keep_fresh(member: "Member") -> bool:
    """Fetch the list of revoked keys where the last one is a day old, and change the member's keys where it is time.

    A failure waits for the next time and disturbs nothing else.

    Returns:
        Whether the keys were changed.
    """
    from edgefl_protocol.errors import EdgeflError

    try:
        member.refresh_index_if_due()
    except EdgeflError as error:
        _LOG.warning("the list of revoked keys was not refreshed: %s", error)
    try:
        return member.rotate_if_due()
    except EdgeflError as error:
        _LOG.warning("the keys were not changed: %s", error)
        return False


@click.command()
@passphrase_option
@json_option
@home_option
@click.pass_context
def rotate(context: click.Context, passphrase_file: Path | None, as_json: bool, home_dir: str | None) -> None:
    """Change this device's keys now; sync does it by itself every 30 days.

    The new keys are signed by the old one and by themselves, so the operator need not approve them. The old signing key
    counts for 7 days more at the coordinator. Killed at any moment, the device keeps working keys: run it again.
    """
    device = device_of(context, home_dir, passphrase_file)
    with device.member() as member:
        member.rotate()
        found = {"name": member.membership.name, "fingerprint": member.membership.fingerprint}
    report(found, as_json, f"{found['name']} has new keys; their fingerprint is {found['fingerprint']}")

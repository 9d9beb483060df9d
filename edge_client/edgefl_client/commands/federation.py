"""`edgefl enrol`, `pull`, `status`: a device's part in a federation, at the command line.

The work is done by `sharing` and `doctor.status`; here its results become lines.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_client.commands.options import (
    bundle_text,
    device_of,
    home_option,
    json_option,
    passphrase_option,
    report,
)
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_client.sharing.enrolled_device import Device


@click.command()
@click.argument("invite")
@click.option(
    "--ca",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="PEM certificate of the coordinator or of its certificate authority.  [default: the invite's, else the "
    "public authorities]",
)
@click.option(
    "--proxy", metavar="URL", help='Proxy to use from now on, "" for none; the environment\'s settings are not used.'
)
@click.option(
    "--suite",
    type=click.IntRange(1, 2),
    default=2,
    show_default=True,
    help="How messages are encrypted: 1 is X25519; 2 adds ML-KEM-768, which resists quantum computers.",
)
@click.option("--wait", is_flag=True, help="Wait until the operator has approved this device, then run edgefl sync.")
@passphrase_option
@json_option
@home_option
@click.pass_context
def enrol(
    context: click.Context,
    invite: str,
    ca: Path | None,
    proxy: str | None,
    suite: int,
    wait: bool,
    passphrase_file: Path | None,
    as_json: bool,
    home_dir: str | None,
) -> None:
    """Join a federation with the INVITE its operator gave you. Run it again after any failure.

    INVITE is a file with the invite, or "-" for standard input, so that no list of processes shows it. The text
    itself works, too.
    """
    from edgefl_client.sharing import enrolled_device
    from edgefl_client.sharing.policy import Policy, load_policy, save_policy
    from edgefl_protocol.durable import read_given
    from edgefl_protocol.records.invite import MAX_INVITE_CHARS, PREFIX

    device = device_of(context, home_dir, passphrase_file)
    invite = read_given(invite, 2 * MAX_INVITE_CHARS, PREFIX)
    found, home = enrolled_device.run_enrol(device, invite, ca, proxy, suite), device.home
    to_do = "nothing more is needed to join"
    if found["state"] != "approved":
        to_do = f"tell the operator this fingerprint: {found['fingerprint']}"
    text = f"{found['name']} is {found['state']} in {found['federation']}; {to_do}"
    if found["dropped"]:
        old = counted(found["dropped"], "item")
        click.echo(f"edgefl: the outbox held {old} of a membership that is gone; no key opens them: dropped", err=True)
    if not (wait and as_json):
        report(found, as_json, text)
    if not home.policy_file.exists():
        save_policy(home, Policy())
    if not load_policy(home).allowed:
        click.echo(
            "Nothing leaves this device until its owner allows it, for example with: edgefl policy allow maps", err=True
        )
    if wait:
        _wait(context, device, found, as_json, text)


def _wait(context: click.Context, device: "Device", found: dict[str, Any], as_json: bool, text: str) -> None:
    """Fetch what the federation has, once the operator has approved; the fingerprint is told before."""
    from edgefl_client.commands.sync import end_synced, sync_text
    from edgefl_client.sharing.sync import sync_when_approved

    if as_json:
        click.echo(text, err=True)
    if found["state"] != "approved":
        again = "you can stop with Ctrl-C and continue with edgefl sync"
        click.echo(f"Waiting for the operator's approval; {again}.", err=True)
    sys.stdout.flush()  # whoever reads it through a pipe has to tell the fingerprint now
    done = sync_when_approved(device)
    report({**found, "state": "approved", "sync": done.report}, as_json, f"approved\n{sync_text(done.report)}")
    end_synced(context, done)


@click.command()
@passphrase_option
@json_option
@home_option
@click.pass_context
def pull(context: click.Context, passphrase_file: Path | None, as_json: bool, home_dir: str | None) -> None:
    """Fetch the federation's current model and nothing else. The command sync fetches it too."""
    from edgefl_client.sharing.bundles import run_pull

    found = run_pull(device_of(context, home_dir, passphrase_file))
    report(found, as_json, f"{bundle_text(found)}: {found['file']}")


@click.command()
@click.option("--offline", is_flag=True, help="Do not ask the coordinator.")
@click.option("--card", is_flag=True, help="Print the whole card of the model in use, as JSON, and nothing else.")
@passphrase_option
@json_option
@home_option
@click.pass_context
def status(
    context: click.Context,
    offline: bool,
    card: bool,
    passphrase_file: Path | None,
    as_json: bool,
    home_dir: str | None,
) -> None:
    """Show model, membership, round and outbox of this device. Also tells which values are used for scoring."""
    from edgefl_client.doctor.status import card_text, run_status, status_text

    device = device_of(context, home_dir, passphrase_file)
    if home_dir is not None and not device.home.root.is_dir():
        raise click.UsageError(f"there is no home folder {device.home.root}")
    found = run_status(device, online=not (offline or card))
    if card:
        click.echo(card_text(found))
        return
    report(found, as_json, status_text(found))

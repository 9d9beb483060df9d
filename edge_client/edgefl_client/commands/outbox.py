"""`edgefl advanced outbox`: what waits to be sent, at the command line."""

from pathlib import Path

import click

from edgefl_client.commands.options import device_of, home_option, json_option, passphrase_option, report


@click.group(invoke_without_command=True)
@json_option
@home_option
@click.pass_context
def outbox(context: click.Context, as_json: bool, home_dir: str | None) -> None:
    """List what waits to be sent to the federation. Prints age, bytes, round, state; needs no key."""
    if context.invoked_subcommand is not None:
        context.find_root().obj = home_dir or context.find_root().obj  # a home named here holds for what follows
        return
    import dataclasses

    from edgefl_client.sharing.waiting_items import list_waiting, waiting_text

    device = device_of(context, home_dir, None)
    items = list_waiting(device.home, device.clock_ms())
    report({"items": [dataclasses.asdict(one) for one in items]}, as_json, waiting_text(items))


@outbox.command("show")
@click.argument("which", metavar="ID")
@passphrase_option
@json_option
@home_option
@click.pass_context
def outbox_show(
    context: click.Context, which: str, passphrase_file: Path | None, as_json: bool, home_dir: str | None
) -> None:
    """Show what the item ID would tell its receiver. Prints names, types, shapes, ranges and a digest."""
    from edgefl_client.sharing.release import described_text
    from edgefl_client.sharing.waiting_items import show_waiting

    found = show_waiting(device_of(context, home_dir, passphrase_file), which)
    report(found, as_json, described_text(found))


@outbox.command("drop")
@click.argument("which", metavar="ID")
@passphrase_option
@json_option
@home_option
@click.pass_context
def outbox_drop(
    context: click.Context, which: str, passphrase_file: Path | None, as_json: bool, home_dir: str | None
) -> None:
    """Delete the item ID for good. What was already sent cannot be called back."""
    import dataclasses

    from edgefl_client.sharing.waiting_items import drop_waiting

    found = drop_waiting(device_of(context, home_dir, passphrase_file), which)
    late = "; it was sent before and may have arrived" if found.attempts else ""
    report(dataclasses.asdict(found), as_json, f"dropped: {found.id}, {found.bytes} bytes{late}")

"""`edgefl trust`: whose bundles this device runs, at the command line."""

from typing import TYPE_CHECKING

import click

from edgefl_client.commands.options import home_of, home_option, json_option, report

if TYPE_CHECKING:
    from edgefl_client.trust.trusted_keys import TrustedKey


@click.group()
def trust() -> None:
    """Choose whose models this device runs."""


@trust.command("add")
@click.argument("pub")
@click.option("--name", metavar="N", help="Name for the signer.  [default: first digits of its key id]")
@json_option
@home_option
@click.pass_context
def trust_add(context: click.Context, pub: str, name: str | None, as_json: bool, home_dir: str | None) -> None:
    """Trust models that the signer PUB has signed. PUB is a file (signing.pub) or the key as 64 hex digits."""
    from edgefl_client.sharing import enrolled_device
    from edgefl_client.trust import trusted_keys as signers

    key = signers.read_public_key(pub)
    added = signers.add_trusted(home_of(context, home_dir), key, name, enrolled_device.today())
    report(added.to_json(), as_json, f"trusted: {added.name}, key id {added.key.key_id}")


@trust.command("list")
@json_option
@home_option
@click.pass_context
def trust_list(context: click.Context, as_json: bool, home_dir: str | None) -> None:
    """List the signers this device trusts. You added them by hand, or the federation's root set lists them."""
    from edgefl_client.trust import trusted_keys as signers
    from edgefl_client.trust.signers import signers_in_force

    home = home_of(context, home_dir)
    entries, found = signers.list_trusted(home), signers_in_force(home)
    by_hand = {entry.key.key_id for entry in entries}
    listed = [] if found.root is None else [key for key in found.root.signers if key.key_id not in by_hand]
    lines = [f"{_named(entry)}  added {entry.added}" for entry in entries]
    lines += [f"(root set)  {key.key_id}  of {found.root.federation}" for key in listed if found.root is not None]
    lines = [f"{line}, REVOKED" if any(key_id in line for key_id in found.revoked) else line for line in lines]
    value = {
        "keys": [entry.to_json() for entry in entries],
        "root_set": [{"key_id": key.key_id, "public": key.public.hex()} for key in listed],
        "revoked": sorted(found.revoked & (by_hand | {key.key_id for key in listed})),
    }
    report(value, as_json, "\n".join(lines) or "no signer is trusted; add one with edgefl trust add PUB")


def _named(entry: "TrustedKey") -> str:
    """Name a signer and its key; one that was given no name is called by first digits of its key id, said once."""
    key_id = entry.key.key_id
    return key_id if key_id.startswith(entry.name) else f"{entry.name}  {key_id}"


@trust.command("remove")
@click.argument("which")
@json_option
@home_option
@click.pass_context
def trust_remove(context: click.Context, which: str, as_json: bool, home_dir: str | None) -> None:
    """Stop trusting the models of a signer. Give its name, its key, or 8 or more digits of its key id."""
    from edgefl_client.trust import trusted_keys as signers

    removed = signers.remove_trusted(home_of(context, home_dir), which)
    report(removed.to_json(), as_json, f"no longer trusted: {removed.name}, key id {removed.key.key_id}")

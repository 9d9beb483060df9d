"""`edgefl trust`: whose bundles this device runs, at the command line."""

import click

from edgefl_client.command_options import home_of, home_option, json_option, report


@click.group()
def trust() -> None:
    """Whose bundles this device runs."""


@trust.command("add")
@click.argument("pub")
@click.option("--name", metavar="N", help="What to call the signer.  [default: first digits of its key id]")
@json_option
@home_option
@click.pass_context
def trust_add(context: click.Context, pub: str, name: str | None, as_json: bool, home_dir: str | None) -> None:
    """Trust the signer PUB from now on: a file (signing.pub) or the key itself as 64 hexadecimal digits."""
    from edgefl_client import federate
    from edgefl_client import trust as signers

    key = signers.read_public_key(pub)
    added = signers.add_trusted(home_of(context, home_dir), key, name, federate.today())
    report(added.to_json(), as_json, f"trusted: {added.name}, key id {added.key.key_id}")


@trust.command("list")
@json_option
@home_option
@click.pass_context
def trust_list(context: click.Context, as_json: bool, home_dir: str | None) -> None:
    """List the signers this device trusts."""
    from edgefl_client import trust as signers

    entries = signers.list_trusted(home_of(context, home_dir))
    lines = [f"{entry.name}  {entry.key.key_id}  added {entry.added}" for entry in entries]
    text = "\n".join(lines) or "no signer is trusted; add one with edgefl trust add PUB"
    report({"keys": [entry.to_json() for entry in entries]}, as_json, text)


@trust.command("remove")
@click.argument("which")
@json_option
@home_option
@click.pass_context
def trust_remove(context: click.Context, which: str, as_json: bool, home_dir: str | None) -> None:
    """Stop trusting a signer, named by its name, its key, or 8 or more first digits of its key id."""
    from edgefl_client import trust as signers

    removed = signers.remove_trusted(home_of(context, home_dir), which)
    report(removed.to_json(), as_json, f"no longer trusted: {removed.name}, key id {removed.key.key_id}")

"""`edgefl use`: put a bundle from a file into use, at the command line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from edgefl_client.commands.options import bundle_text, device_of, home_option, json_option, report


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.edgefl")
@click.option(
    "--trust",
    "trusted",
    multiple=True,
    metavar="PUB",
    help="Trust this signer from now on, as edgefl trust add does, if FILE is accepted: a public key, or its file.",
)
@json_option
@home_option
@click.pass_context
def use(context: click.Context, file: Path, trusted: tuple[str, ...], as_json: bool, home_dir: str | None) -> None:
    """Use the model in FILE from now on, to score or to answer with. It needs no network.

    FILE must be signed by somebody this device trusts. Compare the key id with the signer over another channel before
    you name a key: whoever holds it decides what this device says. A member of a federation
    accepts only its federation's models.
    """
    from edgefl_client.sharing.bundles import run_use
    from edgefl_client.trust.trusted_keys import read_public_key

    keys = [read_public_key(pub) for pub in trusted]
    found = run_use(device_of(context, home_dir, None), file, keys)
    text = f"{bundle_text(found)}, signed by {', '.join(found['signers'])}"
    gone = [_replaced(found)] if found.get("replaced") else []
    report(found, as_json, "\n".join([text, *gone, *found["quality"], "the whole card: edgefl status --card"]))


def _replaced(found: Mapping[str, Any]) -> str:
    """Say what gave way, and whether it can come back."""
    before = found["replaced"]
    if found["same_version"]:
        return (
            f"it replaces another model of the same version: SHA-256 {found['replaced_sha256'][:16]}… before, "
            f"{found['sha256'][:16]}… now; to go back, edgefl use with its file"
        )
    if found["same_line"]:
        return f"it replaces {before}, to which this device never goes back"
    return f"it replaces {before}, which is no longer kept here: to go back, edgefl use with its file"

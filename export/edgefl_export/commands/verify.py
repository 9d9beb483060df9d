"""`edgefl-export verify`: a bundle, checked as a device does."""

import json
import time
from pathlib import Path

import click

from edgefl_export.commands.options import JSON


@click.command()
@click.argument("file", metavar="FILE.edgefl", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--trust",
    "trusted",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PUB",
    help="Public key of a signer, such as signing.pub; repeatable.",
)
@JSON
def verify(file: Path, trusted: tuple[Path, ...], as_json: bool) -> None:
    """Check the bundle FILE as a device does. It checks signature, validity, members and graph; status 3: refused."""
    from edgefl_protocol.bundle import load_bundle
    from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
    from edgefl_protocol.durable import read_bounded
    from edgefl_protocol.envelopes.key_files import read_public_key

    keys = [read_public_key(place).public for place in trusted]
    found = load_bundle(read_bounded(file, MAX_ARCHIVE_BYTES), keys, int(time.time() * 1000))
    facts = {
        "verified": True,
        "id": found.id,
        "version": found.manifest.version,
        "sha256": found.sha256,
        "signers": list(found.signers),
    }
    text = f"verified {found.manifest.name} version {found.manifest.version}, signed by {', '.join(found.signers)}"
    click.echo(json.dumps(facts) if as_json else text)

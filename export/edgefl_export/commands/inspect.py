"""`edgefl-export inspect`: what a bundle says of itself, unverified."""

import hashlib
import json
from pathlib import Path
from typing import Any

import click

from edgefl_export.commands.options import JSON


@click.command()
@click.argument("file", metavar="FILE.edgefl", type=click.Path(path_type=Path, dir_okay=False))
@JSON
def inspect(file: Path, as_json: bool) -> None:
    """Show what the bundle FILE claims to be. Nothing shown is checked; see `verify`."""
    from edgefl_export.bundles.bundle_text import inspect_text
    from edgefl_protocol.bundle import unverified_manifest
    from edgefl_protocol.bundle.archive import MAX_ARCHIVE_BYTES
    from edgefl_protocol.durable import read_bounded

    data = read_bounded(file, MAX_ARCHIVE_BYTES)
    manifest, signers = unverified_manifest(data)
    facts = {
        "verified": False,
        "federation": manifest.federation,
        "line": manifest.line,
        "task": manifest.task,
        "version": manifest.version,
        "created": manifest.created_ms,
        "expires": manifest.expires_ms,
        "min_client": manifest.min_client,
        "min_runtime": manifest.min_runtime,
        "sha256": hashlib.sha256(data).hexdigest(),
        "signers": list(signers),
        "members": [{"name": m.name, "size": m.size, "sha256": m.sha256} for m in manifest.members],
        **_unverified_card(data),
    }
    click.echo(json.dumps(facts) if as_json else inspect_text(facts))


def _unverified_card(data: bytes) -> dict[str, Any]:
    """Return labels, card and words of questions as the file states them, None where they are not in their form."""
    from edgefl_protocol.bundle.archive import read_archive
    from edgefl_protocol.bundle.model_card import MAX_NAMES_BYTES
    from edgefl_protocol.strict_json import parse_json

    members = read_archive(data)
    found: dict[str, Any] = {}
    for name in ("labels", "card", "questions"):
        try:
            found[name] = parse_json(members[f"{name}.json"], max_bytes=MAX_NAMES_BYTES)
        except (KeyError, ValueError):
            found[name] = None
    return found

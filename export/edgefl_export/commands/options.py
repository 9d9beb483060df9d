"""Options that several commands of `edgefl-export` take."""

from pathlib import Path

import click

PASSPHRASE = click.option(
    "--passphrase-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the passphrase of the key, readable by you alone; or give the passphrase itself in "
    "EDGEFL_KEY_PASSPHRASE.  [default: the key is not encrypted]",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")

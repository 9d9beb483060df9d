"""`edgefl-export keygen`: the key pair of a signer."""

from pathlib import Path

import click

from edgefl_export.commands.options import PASSPHRASE


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@PASSPHRASE
def keygen(folder: Path, passphrase_file: Path | None) -> None:
    """Make the key pair that signs models for devices.

    It writes DIR/signing.key (PKCS#8, mode 0600), which stays with you, and DIR/signing.pub. Devices trust bundles by
    the public key: `edgefl trust add DIR/signing.pub`.
    """
    from edgefl_export import key_store
    from edgefl_protocol.durable import read_passphrase

    passphrase = read_passphrase(passphrase_file)
    key = key_store.create_key(folder, passphrase)
    if passphrase is None:
        click.echo(
            f"edgefl-export: {folder / key_store.PRIVATE_NAME} is not encrypted; protect it like a password, or "
            "make an encrypted key with --passphrase-file",
            err=True,
        )
    click.echo(key.key_id)

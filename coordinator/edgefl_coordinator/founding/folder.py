"""A new coordinator's folder: keys, a development certificate and settings.

Guarantees: nothing existing is overwritten; `config.toml` is written last, so a folder with it is complete, and where
something fails, what was made is removed. Private files have mode 0600 in folders of mode 0700. The federation's root
key is made here for convenience and belongs on another, offline medium. Source: docs/security.md, enrolment and keys
at rest.
"""

import datetime
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomli_w

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.rounds.quorum import unfinishable
from edgefl_coordinator.settings import CoordinatorHome, CoordinatorSettings, settings_from_table, settings_to_table
from edgefl_coordinator.store.coordinator import wall_clock_ms
from edgefl_coordinator.store.key_ring import new_ring, ring_to_bytes
from edgefl_coordinator.store.statements import FACT
from edgefl_coordinator.store.store import OWNER, SECRET_FILE_BYTES, open_store, s3_payloads
from edgefl_coordinator.web.tls import make_development_certificate
from edgefl_protocol.durable import foreign_content, write_atomic
from edgefl_protocol.envelopes.key_files import public_key_line, signing_key_to_pem
from edgefl_protocol.envelopes.keys import SigningKey, generate_signing_key

EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - to listen on; nobody can call them


def make_home(
    home: CoordinatorHome, table: Mapping[str, Any], passphrase: bytes | None = None, now_ms: int | None = None
) -> CoordinatorSettings:
    """Make a coordinator's folder.

    Args:
        passphrase: encrypts the private keys; None leaves them to the file mode.
        now_ms: Unix milliseconds, from which the sealing key ages; None asks this machine's clock.

    Raises:
        OperatorError: the folder holds a coordinator already, or a setting is out of bounds.
        StorageError: a file cannot be written; what was made here is removed.
    """
    check_free(home)
    root = generate_signing_key()
    settings = check_table({**table, "root_key_id": root.key_id})
    there = home.root.exists()
    folders = (home.keys, home.tls, home.blobs, home.jobs)
    try:
        for folder in (home.root, *folders):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(home, settings, root, passphrase, wall_clock_ms() if now_ms is None else now_ms)
    except BaseException:  # so that the same command can be given again
        home.config.unlink(missing_ok=True)
        for folder in folders if there else (home.root,):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return settings


def _write(
    home: CoordinatorHome, settings: CoordinatorSettings, root: SigningKey, passphrase: bytes | None, now_ms: int
) -> None:
    signing, ring = generate_signing_key(), new_ring(settings.suite, now_ms)
    host = urlsplit(settings.public_url).hostname or "localhost"
    names = [name for name in (host, settings.host) if name not in EVERY_ADDRESS]
    certificate = make_development_certificate(names, datetime.datetime.now(datetime.UTC))
    private = {
        home.signing: signing_key_to_pem(signing, passphrase),
        home.sealing_ring: ring_to_bytes(ring, passphrase),
        home.keys / "root.key": signing_key_to_pem(root, passphrase),
        home.keys / "secret.bin": secrets.token_bytes(SECRET_FILE_BYTES),
        home.tls / "server.key": certificate.key,
    }
    public = {
        home.tls / "server.pem": certificate.chain,
        home.tls / "ca.pem": certificate.ca,
        home.signing_public: public_key_line(signing.public_key),
        home.keys / "root.pub": public_key_line(root.public_key),
    }
    for path, data in private.items():
        write_atomic(path, data, mode=0o600)
    for path, data in public.items():
        write_atomic(path, data)
    write_atomic(home.config, tomli_w.dumps(settings_to_table(settings)).encode(), mode=0o600)


def check_free(home: CoordinatorHome) -> None:
    """Refuse, by an `OperatorError`, a folder that holds a coordinator or something else."""
    if home.config.exists():
        raise OperatorError(f"{home.root} holds a coordinator already; choose another folder")
    if found := foreign_content(home.root, ()):
        raise OperatorError(f"{home.root} holds {found}; choose a new or empty folder")


def check_table(table: Mapping[str, Any]) -> CoordinatorSettings:
    """Return the settings of a parsed TOML table; an `OperatorError` where one is unknown, missing or out of bounds."""
    try:
        return settings_from_table(table)
    except (ValueError, TypeError) as error:
        raise OperatorError(str(error), USAGE) from error


def check_finishable(settings: CoordinatorSettings, members: int) -> None:
    """Refuse, by an `OperatorError`, settings with which so many members would stop before the last round."""
    if why := unfinishable(settings.rounds, settings.task, members):
        spelled = re.sub(r"rounds\.(\w+)( true)?", lambda found: f"--{found[1].replace('_', '-')}", why)
        raise OperatorError(spelled, USAGE)


def check_database(url: str) -> None:
    """Connect to the PostgreSQL database of a new coordinator, if it has one.

    Raises:
        OperatorError: it holds something, or is set up in a way that the store cannot use.
        StorageError: it does not answer.
    """
    if not url:
        return
    with tempfile.TemporaryDirectory() as folder:
        home = CoordinatorHome(Path(folder))
        store = open_store(home, url=url)
        try:
            with store.transaction() as connection:
                if FACT.value(connection, key=OWNER) is not None:
                    raise OperatorError("the database belongs to another coordinator: give each its own", USAGE)
        finally:
            store.close()


def check_payloads(url: str) -> None:
    """Look below the prefix where a new coordinator's payloads will lie, if it is given one.

    Raises:
        OperatorError: it is no such URL, something lies there, or the extra is missing.
        StorageError: the store does not answer, or refuses the credentials.
    """
    if url:
        s3_payloads(url, b"").try_out()

"""A coordinator's folder from its backup, so that members go on and nothing of the time since counts twice.

Guarantees:
    Nothing that is there is overwritten. Hidden files may be there, for the folder may be the home of the service's
    user (`.pgpass`), and stay. `config.toml` is written last, so a folder with it is restored as a whole; what was
    written is removed where something failed, from a database or prefix, too.
    The store lies where the caller says, in the folder or in a PostgreSQL database and an S3-compatible store, wherever
    it lay before. These are filled from the finished folder.
    The restored coordinator has a new sealing key and none of before. So no message that was sealed before opens,
    whatever the replay windows have forgotten; members fetch the new key, and send what they still have in new
    messages. What was acknowledged before the backup keeps its first answer.
    The number of the key record rises above all that were lost. That of the list of revoked keys does not: devices
    refuse a list that may lack a stolen key, until the operator has revoked it again and says so (`rotate`).
    The audit log goes on from the backup's with the row `restored`, which is signed.
Source: docs/security.md check 67; docs/decisions/0056, 0069.
"""

import shutil
import tomllib
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from edgefl_coordinator.errors import USAGE, OperatorError
from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.settings import CoordinatorHome, CoordinatorSettings, settings_from_table, settings_to_table
from edgefl_coordinator.store import audit, audit_heads
from edgefl_coordinator.store.audit_chain import RESTORED
from edgefl_coordinator.store.backups import copies
from edgefl_coordinator.store.backups.backup_file import About, BackupManifest, content, read_manifest, unpack
from edgefl_coordinator.store.coordinator import Coordinator, load_keys, owner_of
from edgefl_coordinator.store.moments import moment
from edgefl_coordinator.store.statements import KEEP_FACT
from edgefl_coordinator.store.store import OWNER, open_store
from edgefl_coordinator.store.tables import VERSION
from edgefl_protocol.durable import foreign_content, write_atomic
from edgefl_protocol.errors import StorageError

_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class Restored:
    """What was restored."""

    about: About  # what it is a backup of
    into_folder: tuple[
        str, ...
    ]  # settings of places elsewhere, of which nothing was said: what lay there lies in files


def restore(
    backup: Path,
    home: CoordinatorHome,
    passphrase: bytes | None,
    now_ms: int,
    *,
    database: str = "",
    payloads: str = "",
) -> Restored:
    """Make a coordinator's folder from a backup.

    Args:
        passphrase: of the keys, the one that they had.
        now_ms: Unix milliseconds; not before the backup.
        database: URL of an empty PostgreSQL database for the store; "" for the file in the folder.
        payloads: `s3://…`, an empty prefix for larger blobs; "" for the folder.

    Raises:
        OperatorError: the folder, database or prefix holds something; the file is no backup, was cut or changed, or a
            newer version made it; the clock is before the backup; a URL is none.
        KeyMaterialError: the passphrase does not fit.
        StorageError: the disk is full, or what was named does not answer.
    """
    if found := foreign_content(home.root, ()):
        raise OperatorError(f"{home.root} holds {found}; choose a new or empty folder")
    manifest = read_manifest(backup)
    if found := next((one.path for one in manifest.files if (home.root / one.path).exists()), ""):
        raise OperatorError(f"{home.root} holds {found}, and so does the backup; choose a new or empty folder")
    _check(backup, manifest.about, now_ms)
    config = content(backup, manifest, home.config.name, _MAX_CONFIG_BYTES)
    places = {"database": database, "payloads": payloads}
    before, settings, config = _settings(backup, config, places)
    copies.check_vacant(database, payloads)
    there = set(home.root.iterdir()) if home.root.exists() else None
    try:
        for folder in (home.root, home.keys, home.tls, home.blobs, home.jobs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unpack(backup, manifest, home.root, blobs=False, but=home.config.name)
        load_keys(home, passphrase)  # before the large part
        unpack(backup, manifest, home.root, blobs=True, but=home.config.name)
        _begin_anew(home, settings, manifest, passphrase, now_ms)
        with ExitStack() as emptied_else:
            if payloads:
                emptied_else.enter_context(copies.sent(payloads, home))
            if database:
                emptied_else.enter_context(copies.filled(database, home.database))
                home.database.unlink()
                home.lock.unlink()
            write_atomic(home.config, config, mode=0o600)
    except BaseException as error:
        _remove(home.root, but=there)
        if isinstance(error, OSError):
            raise StorageError(f"cannot write {home.root}: {error.strerror}", "storage") from error
        raise
    return Restored(manifest.about, tuple(name for name in places if getattr(before, name) and not places[name]))


def _check(backup: Path, about: About, now_ms: int) -> None:
    if about.store > VERSION:
        raise OperatorError(
            f"{backup} was made by edgefl-derm {about.program}, whose store is of version {about.store}; this one "
            f"knows versions up to {VERSION}: update edgefl-derm here"
        )
    if now_ms < about.made_ms:
        raise OperatorError(
            f"{backup} was made at {moment(about.made_ms)}, and the clock of this machine is before that: set the "
            "clock, for numbers that members compare follow from it"
        )


def _settings(
    backup: Path, config: bytes, places: Mapping[str, str]
) -> tuple[CoordinatorSettings, CoordinatorSettings, bytes]:
    """Return the settings of a backup, those with the places where the store will lie, and the file that says so."""
    try:
        settings = settings_from_table(tomllib.loads(config.decode()))
    except ValueError as error:
        raise OperatorError(f"the settings in {backup} are not ones that this version knows: {error}") from error
    try:
        moved = settings_from_table({**settings_to_table(settings), **places})
    except ValueError as error:
        raise OperatorError(str(error), USAGE) from error
    return settings, moved, config if moved == settings else tomli_w.dumps(settings_to_table(moved)).encode()


def _begin_anew(
    home: CoordinatorHome,
    settings: CoordinatorSettings,
    manifest: BackupManifest,
    passphrase: bytes | None,
    now_ms: int,
) -> None:
    about = manifest.about
    store = open_store(home)
    try:
        coordinator = Coordinator(settings, store, load_keys(home, passphrase), lambda: now_ms)
        with store.transaction() as connection:
            detail = {"backup": moment(about.made_ms), "backup_ms": about.made_ms, "rows": about.rows}
            audit.append(connection, now_ms, RESTORED, settings.federation, detail)
            if settings.database:
                KEEP_FACT.run(connection, key=OWNER, value=owner_of(coordinator.keys.secret))
        coordinator_keys.renew_restored(coordinator, now_ms - about.made_ms)
        audit_heads.sign(coordinator)
    finally:
        store.close()


def _remove(folder: Path, *, but: Set[Path] | None) -> None:
    """Remove what was written; what was in the folder before stays, and without it (None) nothing does."""
    if but is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in set(folder.iterdir()) - but:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

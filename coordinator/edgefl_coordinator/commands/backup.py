"""`edgefl-coordinator backup`, `restore` and `upgrade`: a folder in one file and back, and one of an older version."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgefl_coordinator.commands.options import FILE, HOME, JSON, PASSPHRASE, Operator, for_operator, guarded
from edgefl_coordinator.store.moments import moment
from edgefl_protocol.durable import read_passphrase
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted

if TYPE_CHECKING:
    from edgefl_coordinator.store.backups.backup_file import About

_INTO_FOLDER = {
    "database": "the store lay in PostgreSQL; it is a file now (--database URL puts it into a database)",
    "payloads": "payloads lay in an S3-compatible store; they are files now (--payloads URL puts them below a prefix)",
}


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@for_operator
def backup(operator: Operator, file: Path) -> None:
    """Write a backup to the new FILE, while `serve` runs or not.

    It holds all but the root key, as of one moment. The signing and sealing keys in it are encrypted if they are in
    the folder; keys/secret.bin, the certificate's key and what members sent are not: keep FILE like a key.
    """
    if file.exists():
        raise click.UsageError(f"{file} exists already; name a new file")
    if not file.resolve().parent.is_dir():
        raise click.UsageError(f"the folder {file.parent} does not exist; make it, or name another file")
    facts = _begun(operator)
    try:
        about, count = _write(operator, file, facts)
    finally:
        _end(operator, facts["snapshot"])
    size, outside = file.stat().st_size, facts["outside"]
    told = {"federation": about.federation, "made_ms": about.made_ms, "rows": about.rows, "files": count, "bytes": size}
    operator.show({"file": str(file), **told, "outside": outside}, f"{file}: {counted(count, 'file')}, {size} bytes")
    for path in outside:
        click.echo(f"warning: {path} is not in the backup; keep it, too", err=True)


def _begun(operator: Operator) -> dict[str, Any]:
    """Have a snapshot taken; where Ctrl-C breaks that off, the server stops taking it."""
    from edgefl_coordinator.store.backups import snapshot

    name = snapshot.fresh_name()
    try:
        return operator.run("begin_backup", snapshot=name)
    except KeyboardInterrupt:
        _end(operator, name)
        raise


def _end(operator: Operator, name: str) -> None:
    with contextlib.suppress(EdgeflError):  # it goes when the store opens again
        operator.run("end_backup", snapshot=name)


def _write(operator: Operator, file: Path, facts: dict[str, Any]) -> "tuple[About, int]":
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.backups import snapshot
    from edgefl_coordinator.store.backups.backup_file import About, BackedUp, write_backup
    from edgefl_protocol.distribution import VERSION

    with snapshot.held(CoordinatorHome(operator.home.resolve()), str(facts["snapshot"])) as folder:
        store, rows, begun = snapshot.what_it_holds(folder)
        about = About(federation=facts["federation"], made_ms=facts["made_ms"], program=VERSION, store=store, rows=rows)
        sources = (
            BackedUp(path=path.relative_to(folder).as_posix(), file=path, most=begun.get(path.name))
            for path in snapshot.files_of(folder)
        )
        return about, len(write_backup(file, about, sources).files)


@click.command()
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", required=True,
              help="New or empty folder to restore it in.")  # fmt: skip
@click.option("--database", metavar="URL", default="",
              help="Empty PostgreSQL database for the store, postgresql://USER@HOST/NAME, wherever the store lay "
                   "before.  [default: a file in DIR]")  # fmt: skip
@click.option("--payloads", metavar="URL", default="",
              help="Empty prefix of an S3-compatible store for payloads above 64 KiB, in the form that `init` takes, "
                   "wherever they lay before.  [default: DIR]")  # fmt: skip
@PASSPHRASE
@JSON
@guarded
def restore(file: Path, home: Path, database: str, payloads: str, passphrase_file: Path | None, as_json: bool) -> None:
    """Make the folder DIR from the backup FILE.

    First stop the old coordinator for good: two would tell members different things. Members go on by themselves, from
    where the backup is.
    """
    from edgefl_coordinator.members.restoration import restore as restored
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.coordinator import wall_clock_ms

    operator = Operator(home, passphrase_file, as_json)
    now_ms = wall_clock_ms()
    secret = read_passphrase(passphrase_file)
    made = restored(file, CoordinatorHome(home.resolve()), secret, now_ms, database=database, payloads=payloads)
    about = made.about
    places = {"home": str(home), "database": database, "payloads": payloads}
    where = ", ".join(filter(None, places.values()))
    operator.show(
        {"federation": about.federation, **places, "backup_ms": about.made_ms, "restored_ms": now_ms},
        f"restored {about.federation} in {where}, as it was at {moment(about.made_ms)}",
    )
    for name in made.into_folder:
        click.echo(f"warning: {_INTO_FOLDER[name]}", err=True)
    click.echo(
        "what happened since is not known here: revoke again members, signers and unused invites that were revoked "
        f"since, then run: {operator.typed('edgefl-coordinator rotate')}; publish again what was published",
        err=True,
    )
    click.echo(f"then: {operator.typed('edgefl-coordinator serve')}", err=True)


@click.command()
@HOME
@click.option("--dry-run", is_flag=True, help="Try it, and change nothing.")
@JSON
@guarded
def upgrade(home: Path, dry_run: bool, as_json: bool) -> None:
    """Bring a folder to this version of the program, or say why not.

    `serve` does the same when it starts. Make a backup before.
    """
    from edgefl_coordinator.settings import CoordinatorHome, load_settings
    from edgefl_coordinator.store import upgrading

    folder = CoordinatorHome(home.resolve())
    database = load_settings(folder).database
    found = upgrading.found(folder, database)
    if found != upgrading.KNOWN:
        (upgrading.tried if dry_run else upgrading.done)(folder, database)
    facts = {"found": found, "known": upgrading.KNOWN, "changed": found != upgrading.KNOWN and not dry_run}
    to = f"version {upgrading.KNOWN}"
    said = f"now has {to}" if facts["changed"] else f"can be brought to {to}, as was tried"
    told = f"the store has {to}, which this program uses: nothing is to be done"
    text = told if found == upgrading.KNOWN else f"the store of version {found} {said}"
    Operator(home, None, as_json).show(facts, text)

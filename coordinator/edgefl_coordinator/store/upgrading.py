"""The store of an older version of this program: whether this one can use it, tried or done.

Guarantees: `tried` does what opening the store does, and changes nothing: to a copy of a file, which lies in the folder
of jobs meanwhile, or to a PostgreSQL database in a transaction that is undone. A store of other tables, of a newer
version or of another coordinator is refused and left as it is. Source: docs/decisions/0056, 0069.
"""

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import versions
from edgefl_coordinator.store.coordinator import owner_of
from edgefl_coordinator.store.statements import FACT
from edgefl_coordinator.store.store import OWNER, SECRET_FILE_BYTES, check_owner, open_store, postgresql
from edgefl_coordinator.store.tables import VERSION
from edgefl_protocol.durable import read_private
from edgefl_protocol.errors import StorageError

KNOWN: Final = VERSION


def found(home: CoordinatorHome, url: str = "") -> int:
    """Return the version of a coordinator's store, in a PostgreSQL database or in the folder's file.

    An `OperatorError` where there is none, as before it was ever served, or it is another coordinator's.
    """
    version = _of_database(home, url) if url else _of_file(home)
    if version is None:
        raise OperatorError(f"{home.root} has no store yet: `edgefl-coordinator serve` makes it")
    return version


def _of_file(home: CoordinatorHome) -> int | None:
    if not home.database.exists() or home.database.stat().st_size == 0:
        return None
    with _reading(home) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _of_database(home: CoordinatorHome, url: str) -> int | None:
    database = postgresql(url)
    with database.alone() as connection:
        version = database.version(connection)
        if version:
            secret = read_private(home.keys / "secret.bin", SECRET_FILE_BYTES)
            check_owner(FACT.value(connection, key=OWNER), owner_of(secret))
    return version or None


def tried(home: CoordinatorHome, url: str = "") -> None:
    """Do what `done` would do, and undo it; raises as `open_store`."""
    if url:
        database = postgresql(url)
        with database.alone() as connection:
            database.check_server(connection)
            versions.bring(connection, database.version(connection))
        return
    home.jobs.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.jobs, prefix="upgrade-") as name:
        copy = CoordinatorHome(Path(name))
        with _reading(home) as source, contextlib.closing(sqlite3.connect(copy.database)) as target:
            source.backup(target)
        open_store(copy).close()


def done(home: CoordinatorHome, url: str = "") -> None:
    """Bring the store to this version; raises as `open_store`, also where another process uses it."""
    open_store(home, url=url).close()


@contextlib.contextmanager
def _reading(home: CoordinatorHome) -> Iterator[sqlite3.Connection]:
    uri = f"{home.database.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StorageError(f"{home.database} cannot be read: {error}", "damaged") from error

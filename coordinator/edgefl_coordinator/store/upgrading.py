"""The store of an older version of this program: whether this one can use it, tried on a copy or done.

Guarantees: `tried` changes nothing in the folder but its folder of jobs, where the copy lies meanwhile; it does to the
copy what opening the store does. A store of other tables, or of a newer version, is refused and left as it is
(`Database.prepare`). Source: docs/decisions/0056.
"""

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.store import open_store
from edgefl_coordinator.store.tables import VERSION
from edgefl_protocol.errors import StorageError

KNOWN: Final = VERSION


def found(home: CoordinatorHome) -> int:
    """Return the version of a folder's store; an `OperatorError` where it has none, as before it was ever served."""
    if not home.database.exists() or home.database.stat().st_size == 0:
        raise OperatorError(f"{home.root} has no store yet: `edgefl-coordinator serve` makes it")
    with _reading(home) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def tried(home: CoordinatorHome) -> None:
    """Do on a copy of the store what `done` would do to it; raises as `open_store`."""
    home.jobs.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.jobs, prefix="upgrade-") as name:
        copy = CoordinatorHome(Path(name))
        with _reading(home) as source, contextlib.closing(sqlite3.connect(copy.database)) as target:
            source.backup(target)
        open_store(copy).close()


def done(home: CoordinatorHome) -> None:
    """Bring the store to this version; raises as `open_store`."""
    open_store(home).close()


@contextlib.contextmanager
def _reading(home: CoordinatorHome) -> Iterator[sqlite3.Connection]:
    uri = f"{home.database.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StorageError(f"{home.database} cannot be read: {error}", "damaged") from error

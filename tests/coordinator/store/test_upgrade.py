"""`edgefl-coordinator upgrade`: a store of an older version, of a newer one, and of other tables.

Source: docs/decisions/0056.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from edgefl_coordinator.cli import main
from edgefl_coordinator.store.sqlite_file import SqliteFile
from edgefl_coordinator.store.tables import VERSION


def test_upgrade_tries_on_a_copy(make_coordinator, tmp_path: Path) -> None:
    """A store of version 1 gets what it lacks; one of other tables, or newer, is refused unchanged."""
    coordinator = make_coordinator()
    coordinator.store.close()
    home, runner = coordinator.store.home, CliRunner()

    def typed(*more: str) -> Any:
        return runner.invoke(main, ["upgrade", "--home", str(home.root), *more])

    def prepared(*statements: str) -> bytes:
        with closing(sqlite3.connect(home.database)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()
        return home.database.read_bytes()

    said = typed("--dry-run")
    assert said.exit_code == 0 and f"has version {VERSION}, which this program uses" in said.stdout
    assert json.loads(typed("--json").stdout) == {"found": VERSION, "known": VERSION, "changed": False}
    before = prepared("DROP TABLE small_blobs", "PRAGMA user_version = 1")
    assert json.loads(typed("--dry-run", "--json").stdout) == {"found": 1, "known": VERSION, "changed": False}
    assert home.database.read_bytes() == before and list(home.jobs.iterdir()) == []
    with closing(SqliteFile(home)):  # an older `serve`, as it were
        assert "as was tried" in typed("--dry-run").stdout
        used = typed()
        assert used.exit_code == 1 and "another process uses" in used.stderr
    assert f"of version 1 now has version {VERSION}" in typed().stdout
    before = prepared("PRAGMA user_version = 99")
    for more in ((), ("--dry-run",)):
        newer = typed(*more)
        assert newer.exit_code == 1 and "a newer version of edgefl-derm made the store" in newer.stderr
    assert home.database.read_bytes() == before
    before = prepared("PRAGMA user_version = 1", "CREATE TABLE other (x)")
    other = typed("--dry-run")
    assert other.exit_code == 1 and "with other tables" in other.stderr and home.database.read_bytes() == before
    home.database.unlink()
    assert "has no store yet" in typed("--dry-run").stderr

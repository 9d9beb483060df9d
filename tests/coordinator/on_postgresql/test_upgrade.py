"""`edgefl-coordinator upgrade` where the store lies in PostgreSQL: the same meaning as for a file.

The older store is a real one, of a version before PostgreSQL: its rows in tables as it had them. Source:
docs/decisions/0056, 0069; tests/vectors/old_folders/README.md.
"""

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import insert
from tests.coordinator.on_postgresql.conftest import events

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.postgresql_database import PostgresqlDatabase
from edgefl_coordinator.store.tables import LATER, VERSION, facts, metadata
from edgefl_coordinator.web.operations import OPERATIONS

pytestmark = pytest.mark.slow
OLD = Path(__file__).resolve().parents[2] / "vectors/old_folders/coordinator.tar.gz"


@pytest.fixture
def older(running: Any, folder: Path) -> Any:
    """The folder of an older coordinator whose store lies in a database, as version 1 would have made it there."""
    home, url = CoordinatorHome(folder / "old"), running.database()
    with tarfile.open(OLD) as archive:
        for entry in archive:
            path = home.root / entry.name
            for above in (home.root, path.parent):
                above.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(archive.extractfile(entry).read())  # type: ignore[union-attr]
            path.chmod(entry.mode)
    for name in ("blobs", "jobs"):
        (home.root / name).mkdir(mode=0o700, exist_ok=True)
    home.config.write_text(f'database = "{url}"\n' + home.config.read_text())
    then = [table for table in metadata.sorted_tables if table not in LATER]
    engine = PostgresqlDatabase(url).engine
    with closing(sqlite3.connect(home.database)) as source, engine.begin() as target:
        source.row_factory = sqlite3.Row
        metadata.create_all(target, tables=then)
        for table in then:
            if rows := [dict(row) for row in source.execute("SELECT * FROM " + table.name)]:
                target.execute(insert(table), rows)
        target.execute(insert(facts), {"key": "store_version", "value": "1"})
    engine.dispose()
    home.database.unlink()
    yield home, url
    running.drop(url)


def typed(home: CoordinatorHome, *more: str) -> Any:
    return CliRunner().invoke(main, ["upgrade", "--home", str(home.root), *more])


def tables_of(running: Any, url: str) -> set[str]:
    return {name for (name,) in running.run("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()", url)}


def test_an_older_store_is_tried_and_done(older, running) -> None:
    """Tried, it is as it was; done, it has what it lacked and the rows that it had, and goes on."""
    home, url = older
    noted = "SELECT value FROM facts WHERE key = 'store_version'"
    before = tables_of(running, url), running.run("SELECT * FROM audit ORDER BY number", url)
    assert json.loads(typed(home, "--dry-run", "--json").stdout) == {"found": 1, "known": VERSION, "changed": False}
    assert (tables_of(running, url), running.run(noted, url)) == (before[0], [("1",)])
    assert f"of version 1 now has version {VERSION}" in typed(home).stdout
    assert tables_of(running, url) == before[0] | {"small_blobs"} and running.run(noted, url) == [(str(VERSION),)]
    assert running.run("SELECT * FROM audit ORDER BY number", url) == before[1]
    for more in ((), ("--dry-run",)):
        assert f"has version {VERSION}, which this program uses: nothing is to be done" in typed(home, *more).stdout
    coordinator = open_coordinator(home)
    try:
        assert len(events(coordinator)) == len(before[1]) and OPERATIONS["status"](coordinator, {})["round"] == 1
    finally:
        coordinator.store.close()


def test_serve_brings_an_older_store_along_but_not_under_another(older, running) -> None:
    """As `open_coordinator` does for `serve`; while another process leads, which knows the older tables, it waits."""
    home, url = older
    leading = PostgresqlDatabase(url)
    assert leading.lead()
    with pytest.raises(OperatorError, match="stop every serve of it first"):
        open_coordinator(home, joins=True)
    assert "can be brought to" in typed(home, "--dry-run").stdout
    assert "another process leads" in typed(home).stderr and "small_blobs" not in tables_of(running, url)
    leading.close()
    coordinator = open_coordinator(home, joins=True)
    coordinator.store.close()
    assert "small_blobs" in tables_of(running, url)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("UPDATE facts SET value = '99' WHERE key = 'store_version'", "a newer version of edgefl-derm made the store"),
        ("CREATE TABLE other (x int)", "with other tables"),
        ("ALTER TABLE members ALTER COLUMN name TYPE varchar", "with other tables"),
        ("DELETE FROM facts WHERE key = 'store_version'", "tables of something else"),
        ("INSERT INTO facts VALUES ('coordinator', 'aa')", "belongs to another coordinator"),
    ],
)
def test_what_it_does_not_know_is_refused_unchanged(older, running, change, why) -> None:
    home, url = older
    running.run(change, url)
    before = tables_of(running, url), running.run("SELECT * FROM facts ORDER BY key", url)
    for more in ((), ("--dry-run",)):
        said = typed(home, *more)
        assert said.exit_code == 1 and why in said.stderr and said.stderr.count("\n") == 1, said.stderr
    assert (tables_of(running, url), running.run("SELECT * FROM facts ORDER BY key", url)) == before


def test_a_server_that_may_lose_what_it_acknowledged_is_refused_in_the_trial(older, running) -> None:
    """As the upgrade itself refuses it."""
    running.stop()
    running.start("-c fsync=off")
    try:
        assert "fsync = off" in typed(older[0], "--dry-run").stderr
    finally:
        running.stop()
        running.start()


def test_without_a_store_or_a_database(older, running) -> None:
    home, url = older
    empty = running.database()
    for other, why in ((empty, "has no store yet"), ("postgresql:///fl?host=/nowhere", "does not answer")):
        text = home.config.read_text()
        home.config.write_text(text.replace(url, other))
        assert why in typed(home, "--dry-run").stderr
        home.config.write_text(text)
    assert tables_of(running, empty) == set()
    running.drop(empty)

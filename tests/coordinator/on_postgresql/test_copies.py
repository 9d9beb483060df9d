"""Between a file and a database: every row as it was, one moment, and nothing left over where it fails.

From a database to another one, `store/backups/test_backup.py` holds what it holds of files. Source: docs/security.md
check 67, docs/decisions/0069.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import LargeBinary, Text, create_engine, insert, select, text
from tests.coordinator.backups import backup_of
from tests.coordinator.on_postgresql.conftest import events

from edgefl_coordinator.cli import main
from edgefl_coordinator.members import coordinator_keys, restoration
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome, load_settings
from edgefl_coordinator.store import audit, versions
from edgefl_coordinator.store.backups import copies, snapshot
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.postgresql_database import PostgresqlDatabase
from edgefl_coordinator.store.tables import metadata
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError, StorageError

pytestmark = pytest.mark.slow
LIMITED = {"role": "site", "state": "approved", "kind": "member"}  # columns that take certain words alone


@pytest.fixture
def empty(running: Any) -> Iterator[str]:
    """The URL of a database in which nothing lies."""
    url = running.database()
    yield url
    running.drop(url)


def tables_in(running: Any, url: str) -> int:
    return int(running.run("SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()", url)[0][0])


def value(table: str, column: Any, number: int) -> Any:
    """An extreme one of its type; NULL in each third row where there may be one."""
    if column.nullable and number % 3 == 0:
        return None
    if isinstance(column.type, LargeBinary):
        return (number.to_bytes(2) + b"\xff") * (1 + 20_000 * (table == "small_blobs"))
    if isinstance(column.type, Text):
        word = LIMITED.get(column.name, f"{number:03} ärzte '日本\U0001f52c' \\ %s {{}}\n")
        return "done" if (table, column.name) == ("rounds", "state") else word
    return 2**62 + number


def test_every_row_comes_back_as_it_was(running, empty, tmp_path: Path) -> None:
    """File, database, file: each table with more rows than pass at once, and the file's own form."""
    files = [tmp_path / name for name in ("first", "second")]
    engine = create_engine(f"sqlite:///{files[0]}")
    with engine.connect() as connection:
        assert versions.bring_file(connection)
        for table in metadata.sorted_tables:
            some = [{one.name: value(table.name, one, number) for one in table.columns} for number in range(300)]
            connection.execute(insert(table), some)
        connection.commit()
    with copies.filled(empty, files[0]):
        pass
    database = PostgresqlDatabase(empty)
    with database.still() as view:
        copies.to_file(view, files[1])
    database.close()
    told = []
    for file in files:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            held = {
                table.name: sorted(map(repr, connection.execute(str(select(table)))))
                for table in metadata.sorted_tables
            }
            form = sorted(map(repr, connection.execute("SELECT type, name, sql FROM sqlite_schema")))
            told.append((held, form, connection.execute("PRAGMA user_version").fetchall()))
    assert told[0] == told[1] and {len(held) for held in told[0][0].values()} == {300}
    assert files[1].stat().st_mode & 0o777 == 0o600
    counting = "SELECT count(*) FROM pg_class WHERE relkind = 'S' AND relnamespace = current_schema()::regnamespace"
    assert running.run(counting, empty) == [(0,)]  # no counter of the server's own that would have to go on


def test_members_do_not_wait_for_the_rows(federated, tools, folder: Path, tmp_path: Path, monkeypatch, clock) -> None:
    """While they are copied another reply is acknowledged, of which the backup knows nothing."""
    pair = [tools.quick_member(federated, f"clinic-{letter}") for letter in "ab"]
    tools.start_rounds(federated)
    assert isinstance(pair[0].reply(1), Payload)
    to_file = copies.to_file

    def slowly(source: Any, path: Path) -> None:
        assert isinstance(pair[1].reply(1), Payload)
        with federated.store.transaction() as connection:
            audit.append(connection, clock(), "later", "skin")
        to_file(source, path)

    monkeypatch.setattr(copies, "to_file", slowly)
    restoration.restore(backup_of(federated, tmp_path / "b"), home := CoordinatorHome(folder / "new"), None, clock())
    again = open_coordinator(home, clock=clock)
    try:
        assert events(again).count("reply_accepted") == 1 and "later" not in events(again)
        status = OPERATIONS["status"](again, {})
        assert [one["replied"] for one in status["members"]] == [True, False]
    finally:
        again.store.close()
    assert "later" in events(federated)


def test_from_a_database_to_a_file_and_back(federated, empty, tools, folder: Path, tmp_path: Path, clock) -> None:
    """In mid-round: each store goes on where the one before was, the log's numbers too, which nothing breaks."""
    trio = [tools.quick_member(federated, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(federated)
    coordinator_keys.note_keys(federated)  # as `serve` does
    here, lasts = federated, []
    for turn, url in enumerate(("", empty)):
        assert isinstance(trio[turn].reply(1), Payload)
        path = backup_of(here, tmp_path / f"backup-{turn}")
        here.store.close()
        clock.now_ms += 1000
        home = CoordinatorHome(folder / f"turn-{turn}")
        restoration.restore(path, home, None, clock(), database=url)
        assert load_settings(home).database == url and home.database.exists() is home.lock.exists() is (url == "")
        assert list(home.jobs.iterdir()) == []
        lasts.append(events(here := open_coordinator(home, clock=clock))[-2:])
        for member in trio:
            member.coordinator = here
    try:
        assert lasts == [["restored", "sealing_key"]] * 2 and events(here).count("restored") == 2
        assert here.store.database.shared and OPERATIONS["audit"](here, {})["rows"] == len(events(here))
        assert isinstance(trio[2].reply(1), Payload)
        assert trio[0].reply(1, idem="another-item-0001").code == "already_replied"
        OPERATIONS["set"](here, {"changes": {"rounds.quorum_target": "3"}})
        assert step(here, tools.toy_worker) and OPERATIONS["status"](here, {})["round"] == 2
    finally:
        here.store.close()


@pytest.fixture
def foreign(running: Any) -> Iterator[str]:
    """The URL of an empty database in which its user may make no tables."""
    url = running.database()
    running.run("CREATE ROLE guest LOGIN")
    running.run(f"GRANT USAGE ON SCHEMA {url.rpartition('%3D')[2]} TO guest")
    yield url.replace("user=postgres", "user=guest")
    running.drop(url)
    running.run("DROP ROLE guest")


def test_a_database_that_cannot_be_filled_is_left_alone(federated, empty, foreign, running, tmp_path: Path) -> None:
    """A coordinator's own, another program's or user's, none, a password: one sentence, and no folder was made."""
    backup, runner = backup_of(federated, tmp_path / "b"), CliRunner()
    running.run("CREATE TABLE theirs (x int)", empty)
    before = events(federated)
    for url, why in (
        (federated.settings.database, "holds a coordinator's store already"),
        (empty, "holds tables of something else"),
        (foreign, "the user may not make or change tables there: make the database with createdb --owner USER"),
        (empty.replace("user=postgres", "user=nobody"), 'role "nobody" does not exist'),
        ("postgresql:///fl?host=/nowhere", "does not answer"),
        ("postgresql://fl@db:no-port/fl?no_such=1", "no URL of PostgreSQL"),
        ("mysql://db/fl", "must begin with postgresql://"),
        ("postgresql://fl:hunter2@db/fl", "database holds a password"),
        ("postgresql://fl@db#?password=hunter2", "database holds a password (password)"),
    ):
        said = runner.invoke(main, ["restore", str(backup), "--home", str(tmp_path / "new"), "--database", url])
        assert said.exit_code in (1, 2) and why in said.stderr and said.stderr.count("\n") == 1, said.stderr
        assert not (tmp_path / "new").exists() and "hunter2" not in said.stderr
    assert tables_in(running, empty) == 1 and events(federated) == before


@pytest.mark.parametrize("fails", ["write_atomic", "rows"])
def test_nothing_is_left_over_where_it_fails(
    federated, empty, running, tmp_path: Path, monkeypatch, clock, fails
) -> None:
    """With the rows half copied, and with the last file of the folder; then it works, in the same places."""
    backup, home = backup_of(federated, tmp_path / "b"), CoordinatorHome(tmp_path / "new")
    home.root.mkdir()
    with monkeypatch.context() as broken:
        if fails == "rows":
            broken.setattr(copies, "insert", lambda table: table.insert() if table.name != "audit" else 1 / 0)
            expected: type[Exception] = ZeroDivisionError
        else:
            broken.setattr(
                restoration, "write_atomic", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left"))
            )
            expected = StorageError
        with pytest.raises(expected):
            restoration.restore(backup, home, None, clock(), database=empty)
    assert list(home.root.iterdir()) == [] and tables_in(running, empty) == 0
    restoration.restore(backup, home, None, clock(), database=empty)
    open_coordinator(home, clock=clock).store.close()


def test_a_restored_database_is_its_coordinators(federated, empty, tmp_path: Path, clock) -> None:
    """From the first moment on, before it was ever served: `init` of another coordinator does not get it."""
    backup = backup_of(federated, tmp_path / "b")
    restoration.restore(backup, CoordinatorHome(tmp_path / "new"), None, clock(), database=empty)
    options = ["--federation", "x", "--method", "fedavg", "--classes", "a,b", "--port", "0", "--preset", "tiny"]
    said = CliRunner().invoke(main, ["init", str(tmp_path / "other"), *options, "--database", empty])
    assert "belongs to another coordinator" in said.stderr and not (tmp_path / "other").exists()


def test_a_full_disk_ends_with_a_sentence(federated, tools, monkeypatch) -> None:
    """With the rows half written; SQLite's own limit stands for the disk's. Nothing is left over."""
    bring = versions.bring_file

    def small(connection: Any) -> bool:
        new = bring(connection)
        pages = connection.scalar(text("PRAGMA page_count"))
        connection.execute(text("PRAGMA max_page_count = " + str(pages + 2)))
        return new

    monkeypatch.setattr(versions, "bring_file", small)
    with federated.store.transaction() as connection:
        for number in range(200):
            audit.append(connection, number, "tried", "skin", {"detail": "x" * 500})
    with pytest.raises(StorageError, match="the store was not copied: the disk is full"):
        OPERATIONS["begin_backup"](federated, {})
    assert list(federated.store.home.jobs.iterdir()) == []


def test_a_database_that_goes_away_while_it_is_copied(federated, running, monkeypatch) -> None:
    """One sentence, no snapshot left over, and the next backup is whole."""
    to_file = copies.to_file

    def without(source: Any, path: Path) -> None:
        running.stop("immediate")
        to_file(source, path)

    with monkeypatch.context() as broken:
        broken.setattr(copies, "to_file", without)
        with pytest.raises(EdgeflError, match="does not answer") as found:
            OPERATIONS["begin_backup"](federated, {})
    assert "\n" not in str(found.value) and list(federated.store.home.jobs.iterdir()) == []
    running.start()
    name = OPERATIONS["begin_backup"](federated, {})["snapshot"]
    assert snapshot.what_it_holds(snapshot.folder_of(federated.store.home, name))[1] == len(events(federated))

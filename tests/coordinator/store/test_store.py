"""Journal gate (check 65), a full disk under the database (check 59), stores of before."""

import contextlib
import random
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine, delete, inspect, select, text
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import sqlite_file, tables
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.sqlite_file import has_wal_reset_defect
from edgefl_coordinator.store.statements import KEEP_FACT
from edgefl_coordinator.store.tables import facts, replies
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import Refusal

# fmt: off
WAL_RESET = [  # docs/security.md, decision 7: affected 3.7.0 to 3.51.2, fixed in 3.51.3, 3.50.7 and 3.44.6
    ((3, 6, 23), False), ((3, 7, 0), True),   ((3, 40, 1), True),  ((3, 44, 5), True),  ((3, 44, 6), False),
    ((3, 45, 0), True),  ((3, 50, 6), True),  ((3, 50, 7), False), ((3, 51, 2), True),  ((3, 51, 3), False),
    ((3, 52, 0), False), ((4, 0, 0), False),
]
# fmt: on


BEFORE = """
CREATE TABLE migrations (name TEXT PRIMARY KEY, applied_ms INTEGER) STRICT;
INSERT INTO migrations VALUES ('m007_contributions_beside_the_average', 1);
CREATE TABLE members (
    skid TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL CHECK (role IN ('site', 'device')),
    state TEXT NOT NULL CHECK (state IN ('unproved', 'pending', 'approved', 'revoked')),
    signing_public BLOB NOT NULL, sealing_suite INTEGER NOT NULL, sealing_public BLOB NOT NULL UNIQUE,
    enrolled_ms INTEGER NOT NULL, approved_ms INTEGER, revoked_ms INTEGER
) STRICT;
CREATE UNIQUE INDEX members_name ON members (name) WHERE state <> 'revoked';
CREATE TABLE invites (
    token_sha256 TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, created_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL, used_by TEXT UNIQUE REFERENCES members (skid)
) STRICT;
CREATE TABLE windows (skid TEXT PRIMARY KEY, highest INTEGER NOT NULL, bitmap BLOB NOT NULL) STRICT;
CREATE TABLE mids (
    skid TEXT NOT NULL, mid TEXT NOT NULL, until_ms INTEGER NOT NULL, PRIMARY KEY (skid, mid)
) STRICT, WITHOUT ROWID;
CREATE INDEX mids_until ON mids (until_ms);
CREATE TABLE idempotency (
    skid TEXT NOT NULL REFERENCES members (skid), idem TEXT NOT NULL, payload_sha256 TEXT NOT NULL,
    answer BLOB NOT NULL, created_ms INTEGER NOT NULL, PRIMARY KEY (skid, idem)
) STRICT;
CREATE TABLE rounds (
    number INTEGER PRIMARY KEY, phase TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'aggregating', 'done')),
    opened_ms INTEGER NOT NULL, deadline_ms INTEGER NOT NULL, closed_ms INTEGER, close_reason TEXT
) STRICT;
ALTER TABLE rounds ADD COLUMN tried INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rounds ADD COLUMN problem TEXT;
CREATE TABLE refused_replies (
    number INTEGER NOT NULL REFERENCES rounds (number), skid TEXT NOT NULL REFERENCES members (skid),
    reason TEXT NOT NULL, refused_ms INTEGER NOT NULL, PRIMARY KEY (number, skid)
) STRICT;
CREATE TABLE replies (
    number INTEGER NOT NULL REFERENCES rounds (number), skid TEXT NOT NULL REFERENCES members (skid),
    idem TEXT NOT NULL, blob TEXT UNIQUE, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL, arrays INTEGER NOT NULL,
    site_sha256 TEXT NOT NULL, accepted_ms INTEGER NOT NULL, PRIMARY KEY (number, skid)
) STRICT;
ALTER TABLE replies ADD COLUMN beside INTEGER NOT NULL DEFAULT 0;
CREATE TABLE broadcasts (
    number INTEGER NOT NULL, skid TEXT NOT NULL REFERENCES members (skid), blob TEXT UNIQUE, sha256 TEXT NOT NULL,
    others INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (number, skid)
) STRICT;
CREATE TABLE states (number INTEGER PRIMARY KEY, blob TEXT UNIQUE, sha256 TEXT NOT NULL) STRICT;
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE bundles (
    line TEXT NOT NULL, task TEXT NOT NULL, version INTEGER NOT NULL, bundle_id TEXT NOT NULL, sha256 TEXT NOT NULL,
    bytes INTEGER NOT NULL, blob TEXT NOT NULL UNIQUE, published_ms INTEGER NOT NULL, PRIMARY KEY (line, task, version)
) STRICT;
ALTER TABLE bundles ADD COLUMN signers TEXT NOT NULL DEFAULT '[]';
CREATE TABLE uploads (
    skid TEXT NOT NULL REFERENCES members (skid), id TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL,
    have INTEGER NOT NULL CHECK (have BETWEEN 0 AND size), blob TEXT NOT NULL UNIQUE, touched_ms INTEGER NOT NULL,
    PRIMARY KEY (skid, id)
) STRICT;
CREATE TABLE offers (
    id TEXT PRIMARY KEY, skid TEXT NOT NULL REFERENCES members (skid), blob TEXT NOT NULL, bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL, UNIQUE (skid, blob)
) STRICT;
CREATE TABLE member_keys (
    skid TEXT PRIMARY KEY, member TEXT NOT NULL REFERENCES members (skid), signing_public BLOB NOT NULL,
    added_ms INTEGER NOT NULL, until_ms INTEGER, record BLOB
) STRICT;
CREATE TABLE revocations (
    key_id TEXT PRIMARY KEY, kind TEXT NOT NULL CHECK (kind IN ('member', 'signer')), name TEXT NOT NULL,
    revoked_ms INTEGER NOT NULL
) STRICT;
CREATE TABLE roots (version INTEGER PRIMARY KEY, record BLOB NOT NULL, published_ms INTEGER NOT NULL) STRICT;
CREATE TABLE audit (
    number INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, event TEXT NOT NULL, subject TEXT NOT NULL,
    detail TEXT NOT NULL, sha256 TEXT NOT NULL
) STRICT;
"""  # the tables of the newest store without a version, as its statements left them


@pytest.mark.parametrize(("version", "affected"), WAL_RESET)
def test_journal_gate(version, affected) -> None:
    """Check 65: which versions get DELETE in place of WAL."""
    assert has_wal_reset_defect(version) is affected


@pytest.mark.parametrize(("version", "mode"), [((3, 40, 1), "delete"), ((3, 51, 3), "wal")])
def test_the_file_has_the_mode_and_flushes_its_folder(make_coordinator, monkeypatch, version, mode) -> None:
    """Check 65: the mode that is reported is the file's; synchronous is EXTRA (3)."""
    monkeypatch.setattr(sqlite_file.sqlite3, "sqlite_version_info", version)
    coordinator = make_coordinator()
    assert coordinator.store.database.name == mode
    with coordinator.store.transaction() as connection:
        assert connection.scalar(text("PRAGMA journal_mode")) == mode
        assert connection.scalar(text("PRAGMA synchronous")) == 3
        assert connection.scalar(text("PRAGMA foreign_keys")) == 1
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"


def test_a_folder_that_this_user_cannot_write(coordinator, monkeypatch) -> None:
    """SQLite's own SQLITE_READONLY, which begins the names of its kin, and a lock file that cannot be made: told with
    the folder and what to do.
    """
    home = coordinator.store.home
    told = rf"this user cannot write {home.root}: allow it to write the folder and the files in it"
    with pytest.raises(StorageError, match=told), coordinator.store.transaction() as connection:
        connection.execute(text("PRAGMA query_only=ON"))
        connection.execute(text("DELETE FROM facts"))

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(home.lock))

    monkeypatch.setattr(sqlite_file, "LockFile", denied)
    with pytest.raises(StorageError, match=told):
        open_coordinator(home)


def test_only_one_process_has_it_open(coordinator) -> None:
    with pytest.raises(OperatorError, match="another process"):
        open_coordinator(coordinator.store.home)


def test_serve_waits_for_a_command_that_has_it_open(coordinator) -> None:
    """docs/guides/federation.md, step 1: `serve &` and the next command at once; whichever is first, both come
    through, and what the command did to the keys counts."""
    home = coordinator.store.home
    with pytest.raises(OperatorError, match="another process"):
        open_coordinator(home, wait_s=0.2)

    def end() -> None:
        OPERATIONS["rotate"](coordinator, {"signing": False})
        coordinator.store.close()

    ends = threading.Timer(0.3, end)
    ends.start()
    again = open_coordinator(home, wait_s=60)
    again.store.close()
    ends.join()
    assert again.keys.ring.number == coordinator.keys.ring.number == 2


def version(connection) -> int:
    return connection.scalar(text("PRAGMA user_version"))


def made_before(home: CoordinatorHome, *changes: str) -> None:
    """Make the store of a home as edgefl made it before stores had a version, by the SQL of that time."""
    home.database.unlink()
    with contextlib.closing(sqlite3.connect(home.database)) as connection:
        for statement in (*BEFORE.strip().split(";\n"), *changes):
            connection.execute(statement)
        connection.commit()


def test_tables_are_made_once(make_coordinator) -> None:
    """An empty file gets exactly the tables that queries use; a second start changes nothing."""
    for _ in range(2):
        coordinator = make_coordinator()
        with coordinator.store.transaction() as connection:
            assert set(inspect(connection).get_table_names()) == set(tables.metadata.tables)
            assert version(connection) == tables.VERSION
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
        coordinator.store.close()


def test_the_tables_keep_what_was_promised_of_them(coordinator) -> None:
    """Types, values and members that do not exist are refused by SQLite itself: STRICT, CHECK and REFERENCES."""
    wrong = [
        "INSERT INTO windows VALUES ('a', 'not a number', x'00')",
        "INSERT INTO members VALUES ('a', 'n', 'owner', 'pending', x'00', 1, x'01', 0, NULL, NULL)",
        "INSERT INTO members VALUES ('a', 'n', 'site', 'lost', x'00', 1, x'01', 0, NULL, NULL)",
        "INSERT INTO rounds VALUES (1, 'train', 'no such state', 0, 0, NULL, NULL, 0, NULL)",
        "INSERT INTO revocations VALUES ('a', 'nobody', 'n', 0)",
        "INSERT INTO broadcasts VALUES (1, 'nobody', 'blob', 'sha', 0)",
        "INSERT INTO facts VALUES ('a', NULL)",
    ]
    for statement in wrong:
        with pytest.raises(StorageError, match="refused a row"), coordinator.store.transaction() as connection:
            connection.execute(text(statement))


def test_a_newer_store_is_left_alone(coordinator) -> None:
    home = coordinator.store.home
    with coordinator.store.transaction() as connection:
        connection.execute(text("PRAGMA user_version = 3"))
    coordinator.store.close()
    before = home.database.read_bytes()
    with pytest.raises(OperatorError, match="a newer version of edgefl-derm made the store; update edgefl-derm"):
        open_coordinator(home)
    assert home.database.read_bytes() == before


def test_a_store_of_before_with_the_same_tables_opens(make_coordinator, tools) -> None:
    """It keeps its rows, and a federation goes on in it; the version that made it can still read its history."""
    coordinator = make_coordinator(rounds={"quorum_target": 2})
    coordinator.store.close()
    made_before(coordinator.store.home, "INSERT INTO facts VALUES ('kept', '1')")
    again = make_coordinator()
    with again.store.transaction() as connection:
        assert version(connection) == tables.VERSION
        assert connection.scalar(text("SELECT value FROM facts WHERE key = 'kept'")) == "1"
        assert connection.scalar(text("SELECT name FROM migrations")).startswith("m007")
    pair = [tools.approved_member(again, name) for name in ("clinic-a", "clinic-b")]
    tools.start_rounds(again)
    for member in pair:
        assert isinstance(member.reply(1), Payload)
    assert step(again, tools.toy_worker)
    again.store.close()
    make_coordinator().store.close()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE replies DROP COLUMN beside",
        "ALTER TABLE members ADD COLUMN later INTEGER",
        "ALTER TABLE rounds RENAME COLUMN tried TO failed",
        "DROP TABLE roots",
        "CREATE TABLE more (a INTEGER) STRICT",
    ],
)
def test_a_store_of_before_with_other_tables_is_refused(make_coordinator, change) -> None:
    """One sentence says what to do, and nothing was changed."""
    coordinator = make_coordinator()
    coordinator.store.close()
    home = coordinator.store.home
    made_before(home, change)
    with pytest.raises(OperatorError, match=r"keep this folder.*edgefl-coordinator init"):
        open_coordinator(home)
    with contextlib.closing(sqlite3.connect(home.database)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (0,)
        assert connection.execute("SELECT name FROM migrations").fetchone() == (
            "m007_contributions_beside_the_average",
        )


def test_disk_full_under_the_database(coordinator, tools) -> None:
    """Check 59: SQLite's own SQLITE_FULL, three times in a row: typed, whole, and it recovers."""
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)

    def pages(limit: int | None) -> int:
        with coordinator.store.transaction() as connection:
            count = connection.scalar(text("PRAGMA page_count"))
            connection.execute(text(f"PRAGMA max_page_count = {limit if limit is not None else 2**30}"))
            return int(count)

    blobs = sorted(blob_names(coordinator.store))
    pages(pages(None))
    refusals = 0
    for attempt in range(200):  # requests fill the last pages, then one of them does not fit
        answer = member.call("task", Payload()) if attempt % 2 else member.reply(1, payload=tools.maps_payload(attempt))
        if isinstance(answer, Refusal) and answer.code == "storage_full":
            refusals += 1
            if refusals == 3:
                break
    assert refusals == 3
    with coordinator.store.transaction() as connection:
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
        kept = list(connection.scalars(select(replies.c.blob)))
    assert len(kept) <= 1
    assert len(blob_names(coordinator.store)) == len(blobs) + len(kept)
    pages(None)
    assert isinstance(member.call("task", Payload()), Payload)


@pytest.mark.parametrize("transactions", [2000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_a_file_is_clean_after_many_mixed_transactions(coordinator, transactions) -> None:
    """Check 65: rows and blobs written, changed, deleted, undone by four threads that share commits: SQLite finds the
    file clean, and it holds what four dictionaries hold.
    """
    store = coordinator.store

    def mix(thread: int) -> dict[str, str]:
        draw, kept = random.Random(thread), dict[str, str]()
        for number in range(transactions // 4):
            key, value = f"mixed {thread} {draw.randrange(200)}", str(number) * draw.choice((1, 40))
            with contextlib.suppress(LookupError), store.transaction() as connection:
                if key in kept and draw.random() < 0.4:
                    connection.execute(delete(facts).where(facts.c.key == key))
                    after = {name: text for name, text in kept.items() if name != key}
                else:
                    KEEP_FACT.run(connection, key=key, value=value)
                    after = {**kept, key: value}
                if draw.random() < 0.1:
                    raise LookupError
                if draw.random() < 0.1:
                    store.put_small(connection, value.encode() * 20)
                kept = after
        return kept

    with ThreadPoolExecutor(4) as pool:
        wanted = {key: value for kept in pool.map(mix, range(4)) for key, value in kept.items()}
    with store.transaction() as connection:
        assert connection.scalar(text("PRAGMA integrity_check")) == "ok"
        assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
        found = dict(
            connection.execute(select(facts.c.key, facts.c.value).where(facts.c.key.startswith("mixed"))).all()
        )
    assert found == wanted and len(wanted) > 100


def test_statements_take_parameters_only() -> None:
    """Check 38: no SQL is built from text at run time."""
    folder = Path(tables.__file__).parent
    for path in folder.glob("*.py"):
        source = path.read_text().replace('text(f"PRAGMA user_version = {VERSION:d}")', "")  # a number of the program
        assert "text(f" not in source and 'execute(f"' not in source.replace('execute(f"PRAGMA {pragma}")', ""), path


def test_sqlite_errors_are_typed(coordinator) -> None:
    with pytest.raises(StorageError), coordinator.store.transaction() as connection:
        connection.execute(text("INSERT INTO rounds VALUES (1, 'train', 'no such state', 0, 0, 0, NULL)"))
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(Exception, match="no such table"):
        connection.execute(text("SELECT * FROM rounds"))
    engine.dispose()
    assert sqlite3.threadsafety >= 1

"""The store in PostgreSQL: what its sessions promise, and a database that fails.

What both databases promise alike is held by the modules marked `both_databases`. Source: docs/decisions/0058;
docs/security.md, reliability.
"""

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import select, text
from tests.coordinator.on_postgresql.conftest import events, rows, stored_round

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import settings_from_table, settings_to_table
from edgefl_coordinator.store import audit, store
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.postgresql_database import PostgresqlDatabase, session
from edgefl_coordinator.store.store import open_store
from edgefl_coordinator.store.tables import VERSION, facts
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError, StorageError

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "url",
    ["postgresql://fl:hunter2@db/fl", "postgresql://fl@db/fl?password=hunter2", "mysql://db/fl", "/srv/store.sqlite"],
)
def test_a_database_is_a_url_without_password(tools, url) -> None:
    """docs/security.md, keys at rest: the settings hold no secret, and the sentence does not repeat one."""
    with pytest.raises(ValueError, match="database") as found:
        settings_from_table(tools.settings_table(database=url))
    assert "hunter2" not in str(found.value)


def test_settings_of_a_file_are_those_of_before(tools) -> None:
    """A version from before the setting refuses unknown ones; without a database it reads what this one writes."""
    plain = settings_from_table(tools.settings_table())
    assert "database" not in settings_to_table(plain)
    other = settings_from_table(tools.settings_table(database="postgresql://fl@db/fl"))
    assert settings_from_table(settings_to_table(other)) == other


def test_a_session_is_checked_durable_and_ends() -> None:
    """TLS with a checked name to every other machine; nobody's setting weakens what an answer promises."""
    given = session("postgresql://fl@db.clinic.example/fl?options=-csynchronous_commit%3Doff")
    assert given["sslmode"] == "verify-full" and given["connect_timeout"] == "10"
    last = [one for one in given["options"].split("-c") if "synchronous_commit" in one][-1]
    assert last.split() == ["synchronous_commit=on"]
    for here in ("postgresql:///fl", "postgresql://localhost/fl", "postgresql:///fl?host=/run/postgresql"):
        assert "sslmode" not in session(here)
    assert session("postgresql://fl@db/fl?sslmode=require")["sslmode"] == "require"
    with pytest.raises(OperatorError, match="no URL of PostgreSQL"):
        session("postgresql://fl@db:no-port/fl?no_such=1")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://fl:hunter2@db/fl",
        "postgresql://fl@db/fl?sslpassword=hunter2",
        "postgresql://fl@db#?password=hunter2",
        "postgresql://fl:hunt#er2@db/fl",
    ],
)
def test_a_password_is_refused_wherever_libpq_would_find_it(url) -> None:
    """Before anything is written, for `restore` prints the URL and writes it down."""
    with pytest.raises(
        OperatorError, match=r"holds a password \((ssl)?password\): put it into a password file"
    ) as found:
        session(url)
    assert "er2" not in str(found.value)


def test_without_the_driver_the_extra_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store, "find_spec", lambda _: None)
    with pytest.raises(OperatorError, match=r"edgefl-derm\[postgresql\]"):
        open_store(store.CoordinatorHome(tmp_path), url="postgresql:///fl")


@slow
def test_what_a_session_is_set_to(federated) -> None:
    """An acknowledged commit is on the disk, a look at the store is true, and one that stands still is ended."""
    with federated.store.transaction() as connection:
        shown = {name: connection.scalar(text("SELECT current_setting(:name)"), {"name": name})
                 for name in ("synchronous_commit", "transaction_isolation", "idle_in_transaction_session_timeout",
                              "lock_timeout", "fsync")}  # fmt: skip
    assert shown == {"synchronous_commit": "on", "transaction_isolation": "read committed",
                     "idle_in_transaction_session_timeout": "1min", "lock_timeout": "30s", "fsync": "on"}  # fmt: skip


@slow
def test_whoever_closes_has_given_the_lead_back(federated, running) -> None:
    """Before `close` returns: the server notices the end of a connection later, and refused whoever opened at once."""
    federated.store.close()
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1162233422"
    with psycopg.connect(running.url, autocommit=True) as beside:
        for _ in range(25):
            database = PostgresqlDatabase(federated.settings.database)
            assert database.lead()
            database.close()
            assert beside.execute(held).fetchone() == (0,)


@slow
@pytest.mark.parametrize("how", ["fast", "immediate"])
def test_a_database_that_goes_away_and_comes_back(federated, running, clock, tools, asgi, how) -> None:
    """In mid-round: typed errors of one sentence, nothing lost, and the same process goes on."""
    trio = [tools.quick_member(federated, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(federated)
    assert isinstance(trio[0].reply(1), Payload)
    client, request = asgi(federated), trio[1].envelope("task", Payload())
    running.stop(how)
    for _ in range(3):
        answer = client.request("POST", "/v1/task", request)
        assert answer.status == 503 and b"retry-after" in answer.headers
        assert b"sql" not in answer.body.lower()
    with pytest.raises(StorageError, match="the store's database does not answer") as found:
        step(federated, tools.toy_worker)
    assert "\n" not in str(found.value)
    with pytest.raises(EdgeflError, match="does not answer"):
        OPERATIONS["status"](federated, {})
    with pytest.raises(StorageError):
        federated.store.database.lead()
    running.start()
    answers = [client.request("POST", "/v1/task", request).status for _ in range(2)]
    assert 200 in answers  # the number was not used up while nobody could note it
    assert isinstance(trio[1].reply(1), Payload)
    assert trio[0].reply(1, idem="another-item-0001").code == "already_replied"
    assert federated.store.database.lead()
    clock.now_ms += 61_000
    assert step(federated, tools.toy_worker)
    assert stored_round(federated).number == 2
    assert events(federated).count("reply_accepted") == 2


@slow
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.nightly)])
def test_a_database_that_is_killed_while_members_send(federated, another, running, tools, kills) -> None:
    """docs/security.md, reliability: what either process acknowledged is there after the database recovered, once."""
    crowd = [tools.quick_member(federated, f"clinic-{number:03}") for number in range(8 * kills)]
    tools.start_rounds(federated)

    def sends(number: int) -> None:
        member, processes, answer = crowd[number], (federated, another), None
        until = time.monotonic() + 120
        for attempt in itertools.count():
            at = tools.Member(processes[(number + attempt) % 2], member.name, signing=member.signing,
                              sealing=member.sealing, counter=member.counter)  # fmt: skip
            with contextlib.suppress(StorageError):
                answer = at.reply(1)
                if isinstance(answer, Payload):
                    return
            time.sleep(0.05)
            assert time.monotonic() < until, answer

    with ThreadPoolExecutor(8) as pool:
        for kill in range(kills):
            sent = [pool.submit(sends, number) for number in range(8 * kill, 8 * kill + 8)]
            time.sleep(0.02 * (kill % 4))
            running.stop("immediate")
            running.start()
            for one in sent:
                one.result(180)
    assert sorted(row.skid for row in rows(federated)) == sorted(one.signing.key_id for one in crowd)
    assert events(federated).count("reply_accepted") == len(crowd) == stored_round(another).replies


@slow
def test_a_commit_of_unknown_end_is_asked_for_again(federated, tools) -> None:
    """The connection breaks after the commit: the sender hears `internal`, sends the work again, and it counts once."""
    member = tools.quick_member(federated, "clinic-a")
    tools.start_rounds(federated)
    dialect = federated.store.database.engine.dialect
    commit, made = type(dialect).do_commit, []

    def breaks(connection: Any) -> None:
        commit(dialect, connection)
        made.append(1)
        if len(made) == 2:  # the first one is that of the number
            connection.driver_connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    dialect.do_commit = breaks
    try:
        assert member.reply(1).code == "internal"
    finally:
        del dialect.do_commit
    assert isinstance(member.reply(1), Payload)
    (kept,) = rows(federated)
    assert federated.store.get_blob(kept.blob)
    assert events(federated).count("reply_accepted") == 1


@slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"UPDATE facts SET value = '{VERSION + 1}' WHERE key = 'store_version'", "a newer version of edgefl-derm"),
        ("DELETE FROM facts WHERE key = 'store_version'", "tables of something else"),
        ("UPDATE facts SET value = 'aa' WHERE key = 'coordinator'", "belongs to another coordinator"),
    ],
)
def test_a_database_of_others_is_left_alone(federated, running, change, said) -> None:
    """A newer version, another program, another coordinator: one sentence, and nothing changed."""
    url, home = federated.settings.database, federated.store.home
    federated.store.close()
    running.run(change, url)
    before = running.run("SELECT * FROM facts ORDER BY key", url)
    with pytest.raises(OperatorError, match=said):
        open_coordinator(home)
    assert running.run("SELECT * FROM facts ORDER BY key", url) == before


@slow
def test_an_empty_database_does_not_empty_the_folder(federated, running, clock) -> None:
    """A wrong or new database in the place of the one that names the blobs: refused, and not a file is touched."""
    home, url = federated.store.home, federated.settings.database
    federated.store.put_blob(b"kept")
    federated.store.close()
    empty = running.database()
    home.config.write_text(home.config.read_text().replace(url, empty))
    for _ in range(2):
        with pytest.raises(StorageError, match="empty although there are blobs"):
            open_coordinator(home)
    assert running.run("SELECT count(*) FROM pg_tables WHERE schemaname = current_schema()", empty) == [(0,)]
    assert len(list(home.blobs.iterdir())) == 1
    running.drop(empty)


@slow
def test_init_tries_the_database(running, tmp_path) -> None:
    """One that does not answer, or is taken, is refused before anything is made."""
    url, runner = running.database(), CliRunner()

    def made(name: str, database: str) -> Any:
        options = ["--federation", "skin", "--method", "fedavg", "--classes", "a,b", "--port", "0", "--preset", "tiny"]
        return runner.invoke(main, ["init", str(tmp_path / name), *options, "--database", database])

    said = made("one", url)
    assert said.exit_code == 0, said.stderr
    open_coordinator(store.CoordinatorHome(tmp_path / "one")).store.close()
    for database, why in (
        (url, "belongs to another coordinator"),
        (url.replace("user=postgres", "user=nobody"), 'role "nobody" does not exist'),
        ("postgresql:///fl?host=/nowhere", "does not answer"),
        ("mysql://db/fl", "must begin with postgresql://"),
    ):
        said = made("other", database)
        assert said.exit_code in (1, 2) and why in said.stderr and not (tmp_path / "other").exists()


@slow
def test_a_database_that_could_lose_or_change_things_is_refused(running, make_coordinator, tmp_path) -> None:
    running.run("CREATE DATABASE plain ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    home = store.CoordinatorHome(tmp_path)
    with pytest.raises(OperatorError, match="UTF8"):
        open_store(home, url=running.url.replace("/postgres?", "/plain?"))
    running.stop()
    running.start("-c fsync=off")
    try:
        with pytest.raises(OperatorError, match="fsync = off"):
            open_store(home, url=running.url)
    finally:
        running.stop()


@slow
def test_whole_numbers_and_texts_are_alike_in_both(federated) -> None:
    """Times have 64 bits; texts are ordered by code point, whatever the database's language is."""
    names = ["zebra", "Zebra", "ärzte", "a-b", "ab", "a_b", "a%b", "日本"]
    with federated.store.transaction() as connection:
        for number, name in enumerate(names):
            audit.append(connection, 2**53 + number, "tried", name, {"name": name})
        found = connection.scalars(select(facts.c.key).order_by(facts.c.key)).all()
    assert list(found) == sorted(found)
    with federated.store.transaction() as connection:
        told = audit.newest_rows(connection, most=len(names))
    assert [row.subject for row in told] == names and told[-1].at_ms == 2**53 + len(names) - 1

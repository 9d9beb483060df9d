"""The store in PostgreSQL: what several processes share, and a database that fails.

What both databases promise alike is held by the modules marked `both_databases`. Source: docs/decisions/0058;
docs/security.md check 66 and reliability; PostgreSQL, "Appendix A: Error Codes" and "Advisory Locks".
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import select, text

from edgefl_coordinator.cli import main
from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.rounds.aggregation import commit, lay_out, next_job, step
from edgefl_coordinator.rounds.jobs import read_result
from edgefl_coordinator.settings import settings_from_table, settings_to_table
from edgefl_coordinator.store import audit, store
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.store.postgresql_database import session
from edgefl_coordinator.store.store import open_store
from edgefl_coordinator.store.tables import VERSION, broadcasts, facts, replies
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError, StorageError
from edgefl_protocol.messages.requests import Refusal, ReplyRequest

slow = pytest.mark.slow


# What needs no server.


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


def test_without_the_driver_the_extra_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(store, "find_spec", lambda _: None)
    with pytest.raises(OperatorError, match=r"edgefl-derm\[postgresql\]"):
        open_store(store.CoordinatorHome(tmp_path), url="postgresql:///fl")


# With a server. One cluster serves the tests of a process in turn, so a test may stop it.


@pytest.fixture
def running(postgres: Any) -> Iterator[Any]:
    """The server, which a test may stop; it runs again afterwards."""
    yield postgres
    try:
        postgres.run("SELECT 1")
    except psycopg.Error:
        postgres.start()


@pytest.fixture
def federated(running: Any, make_coordinator: Callable[..., Coordinator]) -> Iterator[Coordinator]:
    """A coordinator whose store is in PostgreSQL."""
    url = running.database()
    coordinator = make_coordinator(database=url, port=0, rounds={"quorum_target": 100})
    yield coordinator
    coordinator.store.close()
    if os.path.exists(running.folder / "data" / "postmaster.pid"):
        running.drop(url)


@pytest.fixture
def another(federated: Coordinator, clock: Any) -> Iterator[Coordinator]:
    """A second process of the same coordinator: it shares the folder and the database, and nothing else."""
    coordinator = open_coordinator(federated.store.home, clock=clock, joins=True)
    yield coordinator
    coordinator.store.close()


def rows(coordinator: Coordinator, table: Any = replies) -> list[Any]:
    with coordinator.store.transaction() as connection:
        return list(connection.execute(select(table)).all())


def events(coordinator: Coordinator) -> list[str]:
    """What the audit log tells, which is unbroken."""
    with coordinator.store.transaction() as connection:
        check_log(audit.kept_rows(connection))
        return [row.event for row in audit.rows(connection, after=0, most=10_000)]


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
def test_two_processes_accept_an_envelope_once(federated, another, tools) -> None:
    """docs/security.md, replay and idempotency, checks 17 and 18: at both at the same time, twenty times."""
    crowd = [tools.quick_member(federated, f"clinic-{number}") for number in range(20)]
    tools.start_rounds(federated)
    twins = {}
    for member in crowd:
        message = ReplyRequest(idem=f"{member.name:0>16}", reply=tools.maps_payload()).to_payload()
        twins[member.name] = member.envelope("reply", message, rnd=1)
    meet = threading.Barrier(2)

    def send(coordinator: Coordinator, member: Any) -> str:
        at = tools.Member(coordinator, member.name, signing=member.signing, sealing=member.sealing)
        meet.wait(30)
        answer = at.send("reply", twins[member.name])
        return answer.code if isinstance(answer, Refusal) else "accepted"

    with ThreadPoolExecutor(2) as pool:
        for member in crowd:
            one, two = pool.submit(send, federated, member), pool.submit(send, another, member)
            assert {one.result(), two.result()} == {"accepted", "replayed"}
    assert len(rows(federated)) == 20
    assert stored_round(another) == stored_round(federated)


def stored_round(coordinator: Coordinator) -> Any:
    with coordinator.store.transaction() as connection:
        return stored_rounds.current_round(connection)


@slow
def test_a_work_item_at_two_processes_has_one_effect(federated, another, tools) -> None:
    """Check 18: the same work in two envelopes; both hear the first answer."""
    crowd = [tools.quick_member(federated, f"clinic-{number}") for number in range(10)]
    tools.start_rounds(federated)
    meet = threading.Barrier(2)

    def send(coordinator: Coordinator, member: Any, seq: int) -> Any:
        at = tools.Member(coordinator, member.name, signing=member.signing, sealing=member.sealing)
        message = ReplyRequest(idem="work-item-00000001", reply=tools.maps_payload()).to_payload()
        request = at.envelope("reply", message, rnd=1, seq=seq)
        meet.wait(30)
        return at.send("reply", request)

    with ThreadPoolExecutor(2) as pool:
        for member in crowd:
            sent = [pool.submit(send, one, member, seq) for seq, one in enumerate((federated, another), 1)]
            first, second = (one.result() for one in sent)
            assert isinstance(first, Payload) and first == second
    assert len(rows(federated)) == 10
    assert events(federated).count("reply_accepted") == 10


@slow
def test_what_a_member_may_have_open_is_counted_for_all_processes(federated, another, tools) -> None:
    """Quotas lie in the database: a member that is shut out here is shut out there, at once."""
    member = tools.quick_member(federated, "clinic-a")
    there = tools.Member(another, member.name, signing=member.signing, sealing=member.sealing, counter=member.counter)
    assert isinstance(there.call("task", Payload()), Payload)
    OPERATIONS["revoke"](federated, {"name": "clinic-a"})
    assert there.call("task", Payload()) == 401


def met(store_: Any, times: int) -> Callable[[], None]:
    """Let each commit fail so often with 40001, as PostgreSQL does: it has undone the transaction."""
    dialect, left = store_.database.engine.dialect, {"now": times}
    commit = type(dialect).do_commit

    def commits(connection: Any) -> None:
        if left["now"] > 0:
            left["now"] -= 1
            connection.rollback()
            raise psycopg.errors.SerializationFailure("could not serialize access")
        left["now"] = times
        commit(dialect, connection)

    dialect.do_commit = commits
    return lambda: dialect.__dict__.pop("do_commit", None)


def until_done(work: Callable[[], Any], times: int) -> Any:
    """Do what an operator, or the loop of the rounds, does again."""
    failed = 0
    while True:
        try:
            return work()
        except StorageError as error:
            failed += 1
            assert failed <= 2 * times, error


@slow
def test_transactions_that_meet_others_are_done_again(federated, tools) -> None:
    """Check 66: 40001 at each commit, twenty times: members' requests succeed by themselves, the rest when it is done
    again, and each has its effect once."""
    undo = met(federated.store, 20)
    try:
        pair = []
        for name in ("clinic-a", "clinic-b"):
            member = tools.Member(federated, name)
            facts_ = until_done(lambda name=name: tools.token_of(federated, name), 20)
            proof = member.enrol(facts_)
            typed = {"name": name, "fingerprint": proof.fingerprint}
            until_done(lambda typed=typed: OPERATIONS["approve"](federated, typed), 20)
            pair.append(member)
        until_done(lambda: OPERATIONS["start"](federated, {}), 20)
        for _ in range(200):
            if until_done(lambda: step(federated, tools.toy_worker), 200):
                break
        for member in pair:
            assert isinstance(member.call("task", Payload()), Payload)
            assert isinstance(member.reply(1), Payload)
            assert isinstance(member.call("index", Payload()), Payload)
            assert member.reply(1, idem="another-item-0001").code == "already_replied"
    finally:
        undo()
    told = events(federated)
    for event, times in (("enrolled", 2), ("proved", 2), ("approved", 2), ("start", 1), ("round_opened", 1),
                         ("reply_accepted", 2), ("refused", 2)):  # fmt: skip
        assert told.count(event) == times, (event, told)
    assert len(rows(federated)) == 2


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
@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.long)])
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
def test_one_leads_and_another_follows_it(federated, another, running) -> None:
    """Whoever leads holds it against others until its session ends, however that ends."""
    first, second = federated.store.database, another.store.database
    assert first.lead() and first.lead() and not second.lead()
    with pytest.raises(OperatorError, match="another process leads"):
        open_coordinator(federated.store.home)
    leads = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1162233422"
    assert running.run(leads) == [(True,)]
    assert second.lead(wait_s=10) and not first.lead()
    another.store.close()
    assert first.lead(wait_s=10)


@slow
def test_a_job_that_two_processes_did_counts_once(federated, another, tools) -> None:
    """Whoever lost the lead in the middle of a job brings its result late: nothing changes, and no file stays."""
    tools.quick_member(federated, "clinic-a")
    tools.start_rounds(federated)
    tools.quick_member(federated, "clinic-b")  # who joins in the open round, and lacks a broadcast
    work = []
    for coordinator in (federated, another):
        due = next_job(coordinator)
        folder = coordinator.store.home.jobs / f"job-{len(work)}"
        folder.mkdir()
        lay_out(coordinator.store, folder, due.job)
        tools.toy_worker(folder, 60.0)
        work.append((coordinator, due, read_result(folder)))
    commit(*work[0])
    kept, before = rows(federated, broadcasts), {path.name for path in federated.store.home.blobs.iterdir()}
    commit(*work[1])
    assert rows(federated, broadcasts) == kept and len(kept) == 2
    assert {path.name for path in federated.store.home.blobs.iterdir()} == before
    assert events(federated).count("broadcasts_made") == 1


@slow
def test_others_take_over_keys_and_settings(federated, another, tools, asgi) -> None:
    """What one process changes in the folder, the next request at another finds."""
    member = tools.quick_member(federated, "clinic-a")
    there, client = tools.Member(another, "clinic-a", signing=member.signing, sealing=member.sealing), asgi(another)
    coordinator_keys.renew_sealing(federated)
    OPERATIONS["set"](federated, {"changes": {"rounds.deadline_s": "77"}})
    client.request("GET", "/healthz")
    assert another.keys.ring.number == federated.keys.ring.number == 2
    assert another.settings.rounds.deadline_s == 77
    there.coordinator = federated  # whose key it seals for
    request = there.envelope("task", Payload())
    assert client.request("POST", "/v1/task", request).status == 200


@slow
def test_a_sweep_leaves_what_others_write(federated, another) -> None:
    """A file without a row may be one that another process is about to name; an hour later it is not."""
    young, old = another.store.put_blob(b"young"), another.store.put_blob(b"old")
    path = federated.store.home.blobs / old.name
    with federated.store.transaction() as connection:
        named = federated.store.put_small(connection, b"orphan")
    real = time.time
    assert federated.store.sweep() == 1  # the small one: a row without a name is nobody's
    assert {one.name for one in federated.store.home.blobs.iterdir()} == {young.name, path.name}
    store.time.time = lambda: real() + 4000  # type: ignore[assignment]
    try:
        assert federated.store.sweep() == 2
    finally:
        store.time.time = real  # type: ignore[assignment]
    assert named.name not in federated.store.blob_names() and not list(federated.store.home.blobs.iterdir())


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
def test_commands_that_copy_a_file_say_so(federated) -> None:
    """`backup` and `upgrade` name pg_dump, each in one sentence."""
    home = federated.store.home
    federated.store.close()
    runner = CliRunner()
    for command in (["backup", str(home.root / "copy")], ["upgrade"], ["upgrade", "--dry-run"]):
        said = runner.invoke(main, [*command, "--home", str(home.root)])
        assert said.exit_code == 1 and "pg_dump" in said.stderr and said.stderr.count("\n") == 1, said.stderr
    assert not (home.root / "copy").exists()


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

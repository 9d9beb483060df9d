"""How often the store waits for PostgreSQL, and statements that travel together.

Source: PostgreSQL, "Message Flow": one ReadyForQuery ends each round trip, in a pipeline too; docs/decisions/0058.
"""

import contextlib
from typing import Any

import psycopg
import pytest
from sqlalchemy import delete, insert, select
from tests.coordinator.commits.test_shared_commit import keep, kept, together

from edgefl_coordinator.store.statements import FACT, KEEP_FACT, Statement
from edgefl_coordinator.store.tables import facts
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError

ADD = Statement(insert(facts))


def test_an_upload_waits_sixteen_times_at_most_under_the_lock(federated, tools, tmp_path) -> None:
    """Two transactions, each with a beginning and a commit, and nine questions, two for the maps. What is kept travels
    with the next question, or at the end. The driver may prepare one of the statements."""
    crowd = [tools.quick_member(federated, f"clinic-{letter}") for letter in "abc"]
    tools.start_rounds(federated)
    assert isinstance(crowd[0].reply(1), Payload)
    driver: Any = federated.store._commits._driver
    with (tmp_path / "trace").open("w") as trace:
        driver.pgconn.trace(trace.fileno())
        assert isinstance(crowd[1].reply(1), Payload)
        driver.pgconn.untrace()
    assert (tmp_path / "trace").read_text().count("ReadyForQuery") <= 16


def test_what_waits_is_done_before_what_is_asked_next(federated) -> None:
    """By a statement of ours and by one of SQLAlchemy's; what nobody asks for is done when the transaction ends."""
    store = federated.store
    with store.transaction() as connection:
        KEEP_FACT.send(connection, key="kept one", value="1")
        assert FACT.value(connection, key="kept one") == "1"
        KEEP_FACT.send(connection, key="kept two", value="2")
        assert connection.scalar(select(facts.c.value).where(facts.c.key == "kept two")) == "2"
        KEEP_FACT.send(connection, key="kept three", value="3")
        connection.execute(delete(facts).where(facts.c.key == "kept three"))
        KEEP_FACT.send(connection, key="kept four", value="4")
    assert kept(store) == {"kept one", "kept two", "kept four"}


@pytest.mark.parametrize("asks", [False, True])
def test_what_fails_while_it_waits_fails_its_transaction_alone(federated, asks) -> None:
    def fails(connection: Any) -> None:
        for _ in range(2):  # the key is there already
            ADD.send(connection, key="kept twice", value="1")
        if asks:
            FACT.value(connection, key="kept twice")

    done, failed, late = together(federated.store, fails, keep("kept late"), first=keep("kept first"))
    assert done.exception() is None and late.exception() is None
    assert isinstance(failed.exception(), StorageError) and failed.exception().code == "integrity"
    assert kept(federated.store) == {"kept first", "kept late"}


def test_a_failure_that_nobody_heard_is_not_kept_quietly(federated) -> None:
    """PostgreSQL makes a rollback of the commit of a transaction that failed, and says so in no error."""

    def deaf(connection: Any) -> None:
        keep("kept deaf")(connection)
        with contextlib.suppress(psycopg.Error):
            for _ in range(2):
                ADD.run(connection, key="kept deaf too", value="1")

    done, failed = together(federated.store, deaf, first=keep("kept first"))
    assert done.exception() is None and isinstance(failed.exception(), StorageError)
    assert kept(federated.store) == {"kept first"}


def test_what_is_undone_runs_nothing_that_waits(federated) -> None:
    def leaves(connection: Any) -> None:
        KEEP_FACT.send(connection, key="kept never", value="1")
        raise LookupError

    _, failed = together(federated.store, leaves, first=keep("kept first"))
    assert isinstance(failed.exception(), LookupError)
    assert kept(federated.store) == {"kept first"}

"""A coordinator whose store is in PostgreSQL, and the same one opened again.

One cluster serves the tests of a process in turn, so a test may stop it.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import select

from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import check_log
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.store.tables import replies


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
    coordinator = make_coordinator(database=url, port=0, rounds={"quorum_target": 1000})
    yield coordinator
    coordinator.store.close()
    if os.path.exists(running.folder / "data" / "postmaster.pid"):
        running.drop(url)


@pytest.fixture
def another(federated: Coordinator, clock: Any) -> Iterator[Coordinator]:
    """The same coordinator opened again: as by a second process, folder and database are shared, no more."""
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


def stored_round(coordinator: Coordinator) -> Any:
    with coordinator.store.transaction() as connection:
        return stored_rounds.current_round(connection)

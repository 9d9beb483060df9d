"""Members, kills and a bad network, then the books are compared: docs/security.md checks 62 and 68, `make soak`."""

import contextlib

import pytest
from benchmarks.coordinator import postgresql_cluster
from benchmarks.coordinator.bad_network import FATES
from benchmarks.coordinator.soak import main, soaking, sound
from click.testing import CliRunner
from sqlalchemy import delete, select

from edgefl_coordinator.store.tables import replies


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("database", "processes"), [("sqlite", 1), pytest.param("postgresql", 2, marks=pytest.mark.nightly)]
)
def test_twenty_members_through_kills_and_a_bad_network(database: str, processes: int) -> None:
    """Checks 62 and 68, in small: 20 s; servers, members and PostgreSQL killed, connections delayed, cut, silent and
    refused: what was put and accepted is in the store once, what was aggregated are these rows, and rounds only go
    forward."""
    if database == "postgresql" and postgresql_cluster.programs() is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed (apt-get install postgresql)")
    kills = {"server": 4.0, "members": 4.0, **({"database": 6.0} if database == "postgresql" else {})}
    with soaking(20, seed=62, pause_s=0.5, database=database, processes=processes) as soak:
        soak.run(20, **kills)
        soak.settle()
        facts = soak.reckon()
        assert sound(facts), facts
        assert facts["told_accepted"] >= 20 and facts["rounds"] >= 1, facts
        assert soak.kills.keys() == kills.keys() and soak.proxy.fates.keys() <= FATES.keys()
        assert soak.measured()["files"][1] < 100
        with contextlib.closing(soak.store()) as store, store.transaction() as connection:
            first = select(replies.c.skid).where(replies.c.number == 1).limit(1).scalar_subquery()
            gone = connection.execute(delete(replies).where(replies.c.number == 1, replies.c.skid == first))
            assert gone.rowcount == 1
        found = soak.reckon()  # it can say no: a row that is gone is a reply that was lost, and the chain is another
        assert (found["lost"], found["chain_holds"]) == (1, False) and not sound(found)


def test_sqlite_has_one_server() -> None:
    """Two `serve` on one file end with a sentence, and nothing begins."""
    run = CliRunner().invoke(main, ["--processes", "2"])
    assert run.exit_code == 2 and "SQLite has one server" in run.output

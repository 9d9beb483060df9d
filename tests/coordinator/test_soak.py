"""Members, kills and a bad network, then the books are compared: docs/security.md checks 62 and 68, `make soak`."""

import contextlib
import sqlite3

import pytest
from bad_network import FATES
from soak import soaking, sound


@pytest.mark.slow
@pytest.mark.long
def test_twenty_members_through_kills_and_a_bad_network() -> None:
    """Checks 62 and 68, in small: 20 s, server and members killed, connections delayed, cut, silent and refused:
    what was put and accepted is in the store once, what was aggregated are these rows, and rounds only go forward."""
    with soaking(20, seed=62, pause_s=0.5) as soak:
        soak.run(20, kill_server_s=4, kill_members_s=4)
        soak.settle()
        facts = soak.reckon()
        assert sound(facts), facts
        assert facts["told_accepted"] >= 20 and facts["rounds"] >= 1, facts
        assert soak.kills["server"] >= 1 and soak.kills["members"] >= 1 and soak.proxy.fates.keys() <= FATES.keys()
        assert soak.measured()["files"][1] < 100
        with contextlib.closing(sqlite3.connect(soak.home.database)) as connection, connection:
            connection.execute("DELETE FROM replies WHERE number = 1 AND rowid IN (SELECT MIN(rowid) FROM replies)")
        found = soak.reckon()  # it can say no: a row that is gone is a reply that was lost, and the chain is another
        assert (found["lost"], found["chain_holds"]) == (1, False) and not sound(found)

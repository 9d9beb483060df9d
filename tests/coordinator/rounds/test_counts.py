"""What is kept so that work is done per change and not per look, against the rows themselves.

Source: docs/decisions/0055; docs/security.md, reliability (quorum: the table of outcomes is exact, check 64).
"""

from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from edgefl_coordinator.rounds import findings, newest_replies, refused, stored_broadcasts, stored_rounds
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import counts
from edgefl_coordinator.store.coordinator import COUNTED, counted_settings
from edgefl_coordinator.store.store import open_store
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.setting_changes import note_edits
from edgefl_protocol import Payload

REPLIES = """
SELECT count(*) FROM replies AS r WHERE number = (SELECT max(number) FROM rounds) AND beside = 0
AND NOT EXISTS (SELECT 1 FROM refused_replies AS f WHERE f.number = r.number AND f.skid = r.skid)
"""
ARRAYS = """
SELECT coalesce(sum(arrays), 0) FROM replies AS r JOIN members AS m ON m.skid = r.skid AND m.state = 'approved'
WHERE r.number = (SELECT max(n.number) FROM replies AS n WHERE n.skid = r.skid AND NOT EXISTS
    (SELECT 1 FROM refused_replies AS f WHERE f.number = n.number AND f.skid = n.skid)
    AND NOT EXISTS (SELECT 1 FROM facts WHERE key = 'refused_round_' || n.number))
"""


def check(coordinator: Any, expected: int) -> None:
    """What is kept is what the rows say."""
    with coordinator.store.transaction() as connection:
        found = stored_rounds.current_round(connection)
        assert found is not None and found.replies == connection.scalar(text(REPLIES)) == expected
        assert newest_replies.held_arrays(connection) == connection.scalar(text(ARRAYS))


def test_the_counts_are_those_of_the_rows(coordinator, tools) -> None:
    crowd = [tools.approved_member(coordinator, f"clinic-{letter}") for letter in "abcd"]
    tools.start_rounds(coordinator)
    check(coordinator, 0)
    for number, member in enumerate(crowd[:3], 1):
        assert isinstance(member.reply(1, payload=tools.maps_payload(number, (0, 1)[: 1 + number % 2])), Payload)
        check(coordinator, number)
    assert crowd[0].reply(1).code == "idem_conflict"  # and is undone: the count stays
    check(coordinator, 3)
    with coordinator.store.transaction() as connection:
        refused.refuse_replies(connection, coordinator.clock(), 1, {"clinic-b": "the array maps.0 is not float16"})
    check(coordinator, 2)
    with coordinator.store.transaction() as connection:
        stored_rounds.judge_again(connection, coordinator.clock())
    check(coordinator, 3)
    OPERATIONS["revoke"](coordinator, {"name": "clinic-c"})
    check(coordinator, 2)
    newcomer = tools.approved_member(coordinator, "clinic-c")
    assert step(coordinator, tools.toy_worker)  # its broadcast
    assert isinstance(newcomer.reply(1), Payload)
    check(coordinator, 3)
    assert isinstance(crowd[3].reply(1), Payload)
    assert step(coordinator, tools.toy_worker)
    check(coordinator, 0)
    for number, member in enumerate((crowd[0], newcomer), 1):
        assert isinstance(member.reply(2, payload=tools.maps_payload(9, (0,))), Payload)
        check(coordinator, number)
    with coordinator.store.transaction() as connection:
        told: Any = SimpleNamespace(bounded={}, noticed={}, gate="refused", gate_said="too many errors")
        findings.note(connection, coordinator.clock(), 1, told)
    check(coordinator, 2)
    with coordinator.store.transaction() as connection:
        assert newest_replies.held_arrays(connection) == 2  # of round 2 alone


def test_settings_stay_noted_when_counts_are_dropped(coordinator) -> None:
    """The names of their facts begin alike. What was noted is what hand edits are held against."""
    with coordinator.store.transaction() as connection:
        note_edits(connection, coordinator)
        for number in (1, 9, 10):
            counts.keep(connection, number, 3)
        newest_replies.held_arrays(connection)
        counts.drop(connection)
        left = set(connection.scalars(text("SELECT key FROM facts WHERE key LIKE 'counted%'")))
        assert left == {COUNTED} and counted_settings(connection) == coordinator.settings


def test_a_look_at_the_rounds_asks_for_the_members_after_a_change_only(coordinator, tools, monkeypatch) -> None:
    for name in ("clinic-a", "clinic-b"):
        tools.approved_member(coordinator, name)
    tools.start_rounds(coordinator)
    asked, without = [], stored_broadcasts.without_broadcast
    monkeypatch.setattr(stored_broadcasts, "without_broadcast", lambda *given: asked.append(1) or without(*given))
    for _ in range(3):
        assert not step(coordinator, tools.toy_worker)
    assert len(asked) == 1
    tools.approved_member(coordinator, "clinic-c")
    assert step(coordinator, tools.toy_worker) and not step(coordinator, tools.toy_worker)
    assert not step(coordinator, tools.toy_worker) and len(asked) == 3


def test_ids_of_past_messages_are_forgotten_by_the_look(coordinator, tools, clock) -> None:
    """They are kept until their expiry refuses them (docs/security.md 2.5), and no longer."""
    member = tools.approved_member(coordinator, "clinic-a")
    member.call("task", Payload())
    limits = coordinator.settings.limits

    def kept() -> int:
        step(coordinator, tools.toy_worker)
        with coordinator.store.transaction() as connection:
            return int(connection.scalar(text("SELECT count(*) FROM mids")) or 0)

    first = kept()
    clock.now_ms += 300_000 + limits.skew_ms
    assert kept() == first > 0
    clock.now_ms += 1
    assert kept() == 0


def test_a_store_of_version_1_gets_what_came_later(make_coordinator, tools) -> None:
    """Its rows stay, and a reply as a row finds its table."""
    coordinator = make_coordinator()
    member = tools.approved_member(coordinator, "clinic-a")
    tools.start_rounds(coordinator)
    with coordinator.store.transaction() as connection:
        for statement in ("DROP TABLE small_blobs", "DROP INDEX audit_event", "DROP INDEX members_state"):
            connection.execute(text(statement))
        connection.execute(text("PRAGMA user_version = 1"))
    coordinator.store.close()
    coordinator.store = open_store(coordinator.store.home)
    assert isinstance(member.reply(1), Payload)
    with coordinator.store.transaction() as connection:
        assert connection.scalar(text("SELECT count(*) FROM small_blobs")) == 1
        found = set(connection.scalars(text("SELECT name FROM sqlite_schema WHERE type = 'index'")))
    assert {"audit_event", "members_state", "replies_skid", "uploads_touched"} <= found
    coordinator.store.close()


@pytest.mark.parametrize("seq", [1, 10**6])
def test_a_message_id_that_comes_again_is_a_replay(coordinator, tools, seq) -> None:
    """docs/security.md 2.5: whatever its number is now, behind the window or in it."""
    member = tools.approved_member(coordinator, "clinic-a")
    mid = {"mid": "ab" * 16}
    assert isinstance(member.send("task", member.envelope("task", Payload(), seq=5000, **mid)), Payload)
    assert member.send("task", member.envelope("task", Payload(), seq=seq, **mid)).code == "replayed"

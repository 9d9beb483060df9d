"""What a device does with the federation's root set and its list of revoked keys, at a real coordinator.

Source: docs/security.md 2.6.5 and 2.6.6, checks 24 and 26; TUF 5.3.10 (recovery from a fast-forward attack).
"""

from collections.abc import Callable
from typing import Any

import pytest

from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_exchange.errors import Unavailable
from edgefl_exchange.membership import load_membership
from edgefl_exchange.transport import Answer
from edgefl_exchange.trust_records import load_revoked, load_root
from edgefl_protocol.envelopes.key_files import signing_key_from_pem
from edgefl_protocol.errors import RecordError
from edgefl_protocol.records.coordinator_records import make_key_record, verify_key_record

DAY_MS = 24 * 3600 * 1000


def interrupt_after_first() -> Callable[..., Any]:
    calls: list[int] = []

    def verify(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return verify_key_record(*arguments, **named)

    return verify


def test_recovery_after_the_coordinator_was_taken_over(world) -> None:
    """Fast-forward recovery: numbers that a thief signed bind nobody once the root set lists another key."""
    world.publish_root(1)
    with world.member() as member:
        member.index()
    assert load_root(world.device).version == 1
    stolen = world.coordinator.keys.signing
    ahead = make_key_record(stolen, "skin", world.coordinator.keys.sealing.public_key, 2**52,
                            world.now_ms, world.now_ms + 2 * DAY_MS)  # fmt: skip
    world.now_ms += DAY_MS + 1
    world.fault = lambda request: Answer(status=200, body=ahead) if request.path == "/v1/keys" else None
    with world.member() as member:
        member.task()
    assert load_membership(world.device).key_number == 2**52
    world.fault = None
    with world.member() as member:  # the honest coordinator's number is refused now, but its key still opens
        member.task()
    OPERATIONS["rotate"](world.coordinator, {"signing": True})
    following = signing_key_from_pem(world.home.next_signing.read_bytes())
    assert OPERATIONS["status"](world.coordinator, {})["standing"]["cause"] != "key_not_changed"
    world.publish_root(2, coordinators=(following.public_key,))
    told = OPERATIONS["status"](world.coordinator, {})["standing"]  # between the steps nobody can take part
    assert (told["kind"], told["commands"]) == ("stuck", ["edgefl-coordinator rotate --signing"])
    assert told["since_ms"] == world.now_ms
    with pytest.raises(Unavailable, match=r"lists a new signing key .* does not use it yet"), world.member() as member:
        member.index()
    OPERATIONS["rotate"](world.coordinator, {"signing": True})
    assert OPERATIONS["status"](world.coordinator, {})["standing"]["cause"] != "key_not_changed"
    with world.member() as member:
        assert member.task().state == "waiting"
        member.index()
    found = load_membership(world.device)
    assert (found.coordinator_key_id, found.key_number) == (following.key_id, world.coordinator.keys.ring.number)
    with pytest.raises(Unavailable):  # the thief's coordinator is believed no more
        world.coordinator.keys.signing = stolen
        with world.member() as member:
            member.task()


def test_killed_between_the_root_set_and_the_new_keys(world, monkeypatch) -> None:
    """The root set is kept, the pinned key counts no more: the next start takes the new one before it speaks."""
    OPERATIONS["rotate"](world.coordinator, {"signing": True})
    following = signing_key_from_pem(world.home.next_signing.read_bytes())
    world.publish_root(1, coordinators=(following.public_key,))
    OPERATIONS["rotate"](world.coordinator, {"signing": True})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("edgefl_exchange.coordinator_keys.verify_key_record", interrupt_after_first())
        with world.member() as member:
            member.task()
    assert load_root(world.device).version == 1
    assert load_membership(world.device).coordinator_key_id != following.key_id
    with world.member() as member:
        assert member.task().state == "waiting"


def test_expired_root_lets_no_new_bundle_in(world) -> None:
    """Freeze: an expired root set and no newer one: refused and said why; the next set is taken."""
    world.publish_root(1, expires_ms=world.now_ms + DAY_MS)
    with world.member() as member:
        member.index()
        world.now_ms += DAY_MS + 1
        with pytest.raises(RecordError, match="root set 1 expired") as refused:
            member.index()
        assert refused.value.code == "root_expired"
        assert member.task().state == "waiting"  # all else goes on
        world.publish_root(2)
        member.index()


@pytest.mark.parametrize("body", [b"", b"x", b"<html>", b"a.b\n", b"x" * 600_000], ids=len)
def test_a_page_in_place_of_the_root_set(world, body) -> None:
    """Endless data and noise: anybody can send it, so it counts as no answer."""
    world.publish_root(1)
    world.fault = lambda request: Answer(status=200, body=body) if request.path == "/v1/root" else None
    with world.member() as member:
        member.index()
    assert load_root(world.device) is None


def test_a_list_of_revoked_keys_that_is_too_old(world, monkeypatch) -> None:
    """docs/security.md check 24: a list older than 24 h: no new bundle, and the sentence says why; older never wins."""
    from edgefl_coordinator.web import routes

    make = routes.make_revoked

    def late(key, federation, version, key_ids, issued_ms, expires_ms):
        return make(key, federation, version, key_ids, issued_ms - DAY_MS - 1, expires_ms - DAY_MS - 1)

    def earlier(key, federation, version, key_ids, issued_ms, expires_ms):
        return make(key, federation, 1, [], issued_ms, expires_ms)

    with world.member() as member:
        member.index()
        assert load_revoked(world.device).version == 1
        OPERATIONS["revoke_signer"](world.coordinator, {"key_id": "a" * 64, "name": "x"})
        member.index()
        for given, code in ((late, "revoked_stale"), (earlier, "rolled_back")):
            monkeypatch.setattr(routes, "make_revoked", given)
            with pytest.raises(RecordError) as refused:
                member.index()
            assert refused.value.code == code
            assert "24 hours" in str(refused.value) or code == "rolled_back"
        assert load_revoked(world.device).key_ids == {"a" * 64}


def test_a_backup_from_before_revocations(world) -> None:
    """docs/reference/coordinator.md, keep: revoked again and rotated, devices take the list again, with its keys.

    Before that they refuse it: a list without a stolen key would bring that key back.
    """
    thieves = ["a" * 64, "b" * 64, "c" * 64]
    OPERATIONS["rotate"](world.coordinator, {"signing": False})
    with world.coordinator.store.transaction() as connection:
        before = connection.exec_driver_sql("SELECT * FROM facts").all()
    for key_id in thieves:
        OPERATIONS["revoke_signer"](world.coordinator, {"key_id": key_id, "name": "x"})
    OPERATIONS["rotate"](world.coordinator, {"signing": False})
    with world.member() as member:
        member.index()
    with world.coordinator.store.transaction() as connection:  # as the backup has it
        connection.exec_driver_sql("DELETE FROM revocations")
        connection.exec_driver_sql("DELETE FROM facts")
        for row in before:
            connection.exec_driver_sql("INSERT INTO facts VALUES (?, ?)", tuple(row))
    with world.member() as member, pytest.raises(RecordError, match="edgefl-coordinator rotate") as refused:
        member.index()
    assert refused.value.code == "rolled_back"
    world.now_ms += 1000
    for key_id in thieves:
        OPERATIONS["revoke_signer"](world.coordinator, {"key_id": key_id, "name": "x"})
    assert OPERATIONS["rotate"](world.coordinator, {"signing": False})["revoked"] == len(thieves)
    with world.member() as member:
        member.index()
    assert load_revoked(world.device).key_ids == set(thieves)


def test_a_backup_from_weeks_ago(world) -> None:
    """docs/reference/coordinator.md, keep: `rotate` once, and once more for each week, reaches the members' number."""
    weeks, before = 3, world.coordinator.keys.ring
    for _ in range(weeks):
        world.now_ms += 7 * DAY_MS
        OPERATIONS["rotate"](world.coordinator, {"signing": False})  # as `serve` does each week
    with world.member() as member:
        member.task()
    world.coordinator.keys.ring = before
    for _ in range(weeks):
        OPERATIONS["rotate"](world.coordinator, {"signing": False})
    OPERATIONS["rotate"](world.coordinator, {"signing": False})
    with world.member() as member:
        assert member.task().state == "waiting"
    assert load_membership(world.device).key_number == before.number + weeks + 1

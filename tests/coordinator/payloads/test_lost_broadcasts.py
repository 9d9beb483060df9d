"""A stored broadcast that can no longer be read is made anew from the server's state; its member hears to wait.

Source: docs/security.md, reliability.
"""

from typing import Any

import pytest

from edgefl_coordinator.rounds.aggregation import next_job, step
from edgefl_coordinator.store.tables import broadcasts, states
from edgefl_coordinator.web import routes
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import BroadcastRequest

pytestmark = pytest.mark.both_places


def fetched(member: Any) -> Any:
    return member.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=1)


def blob_of(coordinator: Any, lab: Any, member: Any) -> str:
    (row,) = [one for one in lab.rows(coordinator, broadcasts) if one.skid == member.signing.key_id]
    return str(row.blob)


@pytest.mark.parametrize("how", ["missing", "missing after it was offered", "damaged", "damaged and large"])
def test_it_is_made_anew(federation, pair, lab, monkeypatch, how) -> None:
    """The other member's stays as it is. One that is sent in pieces is looked at whole when it is first offered."""
    if how.startswith("damaged") and "large" not in how:
        monkeypatch.setattr(routes, "BLOB_ABOVE_BYTES", 2**23)
    assert not step(federation, lab.averaging_worker)  # nobody lacks a broadcast
    if "offered" in how:
        assert isinstance(fetched(pair[0]), Payload)
    lost, other = blob_of(federation, lab, pair[0]), blob_of(federation, lab, pair[1])
    payloads = federation.store.payloads
    if how.startswith("missing"):
        payloads.delete([lost])
    else:
        payloads.put(lost, b"another content" * 100_000)
    for _ in range(2):
        assert fetched(pair[0]).code == "not_found"
    assert lost not in lab.files(federation) and isinstance(fetched(pair[1]), Payload)
    assert step(federation, lab.averaging_worker) and isinstance(fetched(pair[0]), Payload)
    assert blob_of(federation, lab, pair[0]) != lost and blob_of(federation, lab, pair[1]) == other
    assert not step(federation, lab.averaging_worker)


def test_another_process_finds_it_too(federation, pair, lab) -> None:
    """What tells the process that leads to look again stands in the store: it may be another that was asked."""
    assert not step(federation, lab.averaging_worker)
    known = federation.all_served
    federation.store.payloads.delete([blob_of(federation, lab, pair[0])])
    assert fetched(pair[0]).code == "not_found"
    federation.all_served = known  # as of a process that was not asked
    due = next_job(federation)
    assert due is not None and due.job.sites == ("clinic-a",)


@pytest.mark.parametrize(
    ("code", "told"), [("unreachable", "busy"), ("permissions", "internal"), ("storage", "internal")]
)
def test_a_fault_that_passes_loses_no_broadcast(federation, pair, lab, monkeypatch, code, told) -> None:
    """A store that does not answer: the member comes again, and nothing was struck out."""
    kept = blob_of(federation, lab, pair[0])

    def fails(name: str) -> int:
        raise StorageError("the store does not answer", code)

    with monkeypatch.context() as patch:
        patch.setattr(federation.store.payloads, "size", fails)
        assert fetched(pair[0]).code == told
    assert blob_of(federation, lab, pair[0]) == kept and isinstance(fetched(pair[0]), Payload)


def test_where_all_is_away_no_broadcast_is_called_lost(federation, pair, lab) -> None:
    """A disk that is not mounted, or another bucket's name: the state is missing, too."""
    kept = blob_of(federation, lab, pair[0])
    for row in lab.rows(federation, states):
        federation.store.payloads.delete([row.blob])
    federation.store.payloads.delete([kept])
    assert fetched(pair[0]).code == "internal"
    assert blob_of(federation, lab, pair[0]) == kept

"""A stored reply that can no longer be read: the round goes on without it, or its sender sends it again.

Source: docs/security.md, reliability and check 46.
"""

from pathlib import Path
from typing import Any

import pytest

from edgefl_coordinator.rounds import refused, stored_rounds
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.store.tables import refused_replies, replies, states
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.service import _Leader
from edgefl_exchange.outbox import learned_key
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import TaskReply

pytestmark = pytest.mark.both_places

LEARNED = learned_key("skin", 1)  # the same each time that a site or device learns the round


@pytest.fixture
def sent(federation: Any, pair: list[Any], lab: Any) -> list[Any]:
    """What both members have sent and heard to be stored."""
    made = [lab.Blob(lab.reply_of(number).to_bytes()) for number in (1, 2)]
    for member, blob in zip(pair, made, strict=True):
        blob.put_all(member)
        assert isinstance(blob.reply(member, idem=LEARNED), Payload)
    return made


def lose(coordinator: Any, name: str, how: str) -> None:
    payloads = coordinator.store.payloads
    if how == "missing":
        payloads.delete([name])
    else:
        payloads.put(name, b"something else")


def newest(coordinator: Any, lab: Any, member: Any) -> str:
    """The blob of a member's reply."""
    (row,) = [one for one in lab.rows(coordinator, replies) if one.skid == member.signing.key_id]
    return str(row.blob)


def averages(lab: Any, coordinator: Any, seeds: list[int]) -> bool:
    """Whether the newest state is the mean of these replies."""
    name = next(row.blob for row in lab.rows(coordinator, states) if row.number == 1)
    found = Payload.from_bytes(coordinator.store.get_blob(name)).arrays["backbone.conv"]
    want = sum(lab.reply_of(seed).arrays["backbone.conv"].astype(float) for seed in seeds) / len(seeds)
    return bool((found == want.astype("f4")).all())


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_the_round_goes_on_with_the_others(federation, pair, sent, lab, how) -> None:
    """It is refused by name; what was stored of the other counts, and its sender hears so."""
    lost = newest(federation, lab, pair[0])
    lose(federation, lost, how)
    assert step(federation, lab.averaging_worker) and len(lab.rows(federation, refused_replies)) == 1
    assert lost not in lab.files(federation)
    assert step(federation, lab.averaging_worker) and averages(lab, federation, [2])
    told = TaskReply.from_payload(pair[0].call("task", Payload()))
    assert told.refusal.endswith("is missing or damaged; the round went on without it") and not told.replied


@pytest.mark.parametrize("seed", [1, 3])
def test_its_sender_sends_it_again(federation, pair, sent, lab, seed) -> None:
    """Where too few are left the round opens again. The member is asked for what it learns, the same or other, under
    the key of the round, and as often as it is lost."""

    def needs_two(folder: Path, timeout_s: float) -> None:
        job = read_job(folder)
        if job.kind == "aggregate" and len(job.replies) < 2:
            write_result(folder, JobResult(b"", ("train",) * 3, {}, problem="too few replies"))
        else:
            lab.averaging_worker(folder, timeout_s)

    federation.serving = True
    for _ in range(2):
        lose(federation, newest(federation, lab, pair[0]), "damaged")
        assert step(federation, needs_two) and step(federation, needs_two)
        told = TaskReply.from_payload(pair[0].call("task", Payload()))
        assert (told.state, told.replied, told.refusal) == ("open", False, "")
        assert told.stuck.startswith("the coordinator lost this member's reply of round 1: the next edgefl sync")
        assert OPERATIONS["status"](federation, {})["standing"]["kind"] == "waits"
        again = lab.Blob(lab.reply_of(seed).to_bytes())
        again.put_all(pair[0])
        assert isinstance(again.reply(pair[0], idem=LEARNED), Payload)
        told = TaskReply.from_payload(pair[0].call("task", Payload()))
        assert (told.state, told.replied, told.stuck) == ("closed", True, "")
    assert step(federation, needs_two) and averages(lab, federation, [seed, 2])


def test_what_an_older_version_left_of_a_lost_reply_is_dropped(federation, pair, sent, lab) -> None:
    """It kept row and first answer where the round opened again: the member learned for ever, was told "accepted", and
    nothing was stored."""
    with federation.store.transaction() as connection:
        now_ms = federation.clock()
        stored_rounds.reopen_round(connection, now_ms, 1, {pair[0].name: refused.LOST}, "too few replies", 3600)
    lost = newest(federation, lab, pair[0])
    _Leader(federation, None).begin()
    assert lost not in lab.files(federation)
    assert not TaskReply.from_payload(pair[0].call("task", Payload())).replied
    again = lab.Blob(lab.reply_of(3).to_bytes())
    again.put_all(pair[0])
    assert isinstance(again.reply(pair[0], idem=LEARNED), Payload)
    assert step(federation, lab.averaging_worker) and averages(lab, federation, [3, 2])


def test_where_all_is_away_no_reply_is_called_lost(federation, pair, sent, lab) -> None:
    """A disk that is not mounted, or another bucket's name: the state is missing, too, and the replies stay."""
    for row in (*lab.rows(federation, states), *lab.rows(federation, replies)):
        federation.store.payloads.delete([row.blob])
    with pytest.raises(StorageError) as away:
        step(federation, lab.averaging_worker)
    assert away.value.code == "missing" and lab.rows(federation, refused_replies) == []

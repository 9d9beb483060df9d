"""A stored reply that can no longer be read: the round goes on without it, and its sender may send it again.

Source: docs/security.md, reliability and check 46.
"""

from pathlib import Path
from typing import Any

import pytest

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.store.tables import refused_replies, replies, rounds, states
from edgefl_protocol import Payload
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import TaskReply

pytestmark = pytest.mark.both_places


@pytest.fixture
def sent(federation: Any, pair: list[Any], lab: Any) -> list[Any]:
    """What both members have sent and heard to be stored."""
    made = [lab.Blob(lab.reply_of(number).to_bytes()) for number in (1, 2)]
    for member, blob in zip(pair, made, strict=True):
        blob.put_all(member)
        assert isinstance(blob.reply(member), Payload)
    return made


def lose(coordinator: Any, name: str, how: str) -> None:
    payloads = coordinator.store.payloads
    if how == "missing":
        payloads.delete([name])
    else:
        payloads.put(name, b"something else")


def averages(lab: Any, coordinator: Any, seeds: list[int]) -> bool:
    """Whether the newest state is the mean of these replies."""
    name = next(row.blob for row in lab.rows(coordinator, states) if row.number == 1)
    found = Payload.from_bytes(coordinator.store.get_blob(name)).arrays["backbone.conv"]
    want = sum(lab.reply_of(seed).arrays["backbone.conv"].astype(float) for seed in seeds) / len(seeds)
    return bool((found == want.astype("f4")).all())


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_the_round_goes_on_with_the_others(federation, pair, sent, lab, how) -> None:
    """It is refused by name; what was stored of the other counts."""
    lose(federation, lab.rows(federation, replies)[0].blob, how)
    assert step(federation, lab.averaging_worker) and len(lab.rows(federation, refused_replies)) == 1
    assert step(federation, lab.averaging_worker) and averages(lab, federation, [2])


def test_its_sender_may_send_the_same_again(federation, pair, sent, lab) -> None:
    """Where too few are left the round opens again, and its sender hears that another contribution may take its place:
    what it learns may be the same."""

    def needs_two(folder: Path, timeout_s: float) -> None:
        job = read_job(folder)
        if job.kind == "aggregate" and len(job.replies) < 2:
            write_result(folder, JobResult(b"", ("train",) * 3, {}, problem="too few replies"))
        else:
            lab.averaging_worker(folder, timeout_s)

    lose(federation, lab.rows(federation, replies)[0].blob, "damaged")
    assert step(federation, needs_two) and step(federation, needs_two)
    assert lab.rows(federation, rounds)[0].state == "open"
    assert TaskReply.from_payload(pair[0].call("task", Payload())).correctable
    again = lab.Blob(lab.reply_of(1).to_bytes())
    again.put_all(pair[0])
    assert isinstance(again.reply(pair[0], idem="work-item-00000002"), Payload)
    assert step(federation, needs_two) and averages(lab, federation, [1, 2])


def test_where_all_is_away_no_reply_is_called_lost(federation, pair, sent, lab) -> None:
    """A disk that is not mounted, or another bucket's name: the state is missing, too, and the replies stay."""
    for row in (*lab.rows(federation, states), *lab.rows(federation, replies)):
        federation.store.payloads.delete([row.blob])
    with pytest.raises(StorageError) as away:
        step(federation, lab.averaging_worker)
    assert away.value.code == "missing" and lab.rows(federation, refused_replies) == []

"""What becomes of an item that waits: settled, kept for the next round, or dropped."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from edgefl_exchange.delivery import Delivery, settle
from edgefl_exchange.errors import SignedRefusal, Unavailable
from edgefl_exchange.outbox import Outbox
from edgefl_protocol.messages.requests import Refusal
from edgefl_protocol.messages.task_reply import CORRECTABLE
from edgefl_protocol.payload import Payload

KEY = bytes(32)
REFUSED = f"the reply of round 1 was refused: the array a is float16{CORRECTABLE}"


def test_deliver_settles_a_promised_item_in_its_own_round(member, coordinator, wire, tmp_path, net):
    """docs/security.md, idempotency: the answer was lost and the round moved on: the first answer comes back."""
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put("skin", "reply", net.reply_of(1).to_bytes(), 0)
        wire.faults = [None] + [net.cut_answer] * 4
        task = member.task()
        with pytest.raises(Unavailable):
            member.deliver(outbox, task)
        assert len(coordinator.effects) == 1
        coordinator.round = 2
        (done,) = member.deliver(outbox, member.task())
        assert (done.outcome, done.round) == ("accepted", 1)
        assert outbox.items("skin") == []
    assert len(coordinator.effects) == 1


def test_deliver_offers_a_late_item_to_the_next_round(member, coordinator, wire, tmp_path, net):
    """docs/security.md, order of checks: late → typed round_closed; never mixed in, never lost."""
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        first = outbox.put("skin", "reply", net.reply_of(1).to_bytes(), 0)
        task = member.task()
        coordinator.round = 2
        (kept,) = member.deliver(outbox, task)
        assert (kept.outcome, kept.code) == ("kept", "round_closed")
        (item,) = outbox.items("skin")
        assert item.idem != first
        assert item.round is None
        (done,) = member.deliver(outbox, member.task())
        assert (done.outcome, done.round) == ("accepted", 2)
    assert [effect[1] for effect in coordinator.effects] == [2]


def test_deliver_drops_only_what_can_never_be_taken(member, coordinator, tmp_path, net):
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put("skin", "reply", net.reply_of(1).to_bytes(), 0)
        coordinator.refuse["reply"] = Refusal(code="bad_contribution", message="wrong shape")
        (done,) = member.deliver(outbox, member.task())
        assert (done.outcome, done.code) == ("refused", "bad_contribution")
        assert outbox.items("skin") == []


@pytest.mark.parametrize(
    "stuck", [REFUSED, f"{REFUSED}; round 1 is stuck since 9:00", REFUSED.replace("1 was", "0 was"), ""]
)
def test_another_contribution_takes_the_place_of_a_refused_one(member, coordinator, tmp_path, net, stuck):
    """Else it waits for the next round, as beside any reply of this one. docs/security.md 4."""
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put("skin", "reply", net.reply_of(1).to_bytes(), 0)
        task = dataclasses.replace(member.task(), replied=True, stuck=stuck)
        sent = member.deliver(outbox, task)
        taken = stuck.startswith(REFUSED)
        assert [one.outcome for one in sent] == ["accepted"] * taken and outbox.count() == 1 - taken


@pytest.mark.parametrize("state", ["waiting", "closed", "done"])
def test_nothing_is_sent_while_no_round_is_open(member, coordinator, tmp_path, net, state):
    coordinator.state = state
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put("skin", "reply", net.reply_of(1).to_bytes(), 0)
        assert member.deliver(outbox, member.task()) == []
        assert len(outbox.items("skin")) == 1


def test_what_was_learned_in_a_round_waits_for_no_other(member, coordinator, tmp_path, net):
    """docs/security.md, order of checks: late → typed, never mixed into a later round; told before it is forgotten."""
    told = []
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        key = outbox.put_learned("skin", 1, net.reply_of(1).to_bytes(), 0)
        assert outbox.put_learned("skin", 1, net.reply_of(2).to_bytes(), 0) == key  # after a crash: the first one stays

        def settled(item, delivery):
            told.append((item.payload, delivery.outcome, delivery.code, outbox.count()))

        task = member.task()
        coordinator.round = 2  # closes between the answer to `task` and the reply
        (late,) = member.deliver(outbox, task, settled=settled)
        assert (late.outcome, late.code, outbox.count()) == ("late", "round_closed", 0)
        outbox.put_learned("skin", 1, net.reply_of(1).to_bytes(), 0)
        (late,) = member.deliver(outbox, member.task(), settled=settled)  # is known to be over: not even sent
        assert (late.outcome, late.code, outbox.count()) == ("late", "round_over", 0)
    assert told == [(net.reply_of(1).to_bytes(), "late", code, 1) for code in ("round_closed", "round_over")]
    assert coordinator.effects == []


def test_what_was_learned_in_the_last_round_does_not_wait_for_ever(member, coordinator, tmp_path, net):
    """docs/design.md, the round: after the last one none opens, so what was never sent is told and dropped."""
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put_learned("skin", 1, net.reply_of(1).to_bytes(), 0)
        coordinator.state = "done"
        (late,) = member.deliver(outbox, member.task())
        assert (late.outcome, late.code, outbox.count()) == ("late", "round_over", 0)
    assert coordinator.effects == []


def test_what_was_learned_waits_while_its_round_is_closed(member, coordinator, tmp_path, net):
    """A round that cannot be aggregated opens again, and takes the reply then."""
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put_learned("skin", 1, net.reply_of(1).to_bytes(), 0)
        coordinator.state = "closed"
        assert member.deliver(outbox, member.task()) == [] and outbox.count() == 1
        coordinator.state = "open"
        (done,) = member.deliver(outbox, member.task())
        assert (done.outcome, done.round, outbox.count()) == ("accepted", 1, 0)


def test_what_was_learned_is_offered_again_after_a_refusal(member, coordinator, tmp_path, net):
    """docs/decisions/0077: the operator may mend the reason at any time in the round; nobody depends on it until then.
    Over is over: then it is dropped, and not sent once more."""
    told = []
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:

        def meet() -> list[tuple[str, str | None]]:
            sent = member.deliver(outbox, member.task(), settled=lambda _, one: told.append((one.outcome, one.round)))
            return [(one.outcome, one.code) for one in sent]

        for number in (1, 2):
            coordinator.round = number
            outbox.put_learned("skin", number, net.reply_of(number).to_bytes(), 0)
            coordinator.refuse["reply"] = Refusal(code="too_large", message="the federation is full")
            assert meet() == meet() == [("refused", "too_large")] and outbox.count() == 1
            coordinator.state = "closed"
            assert meet() == []
            coordinator.state = "open"
            if number == 1:
                coordinator.refuse.clear()
                assert meet() == [("accepted", None)]
        coordinator.round = 3
        assert meet() == [("late", "round_over")] and outbox.count() == 0
    assert told == [("accepted", 1), ("late", 2)] and [effect[1] for effect in coordinator.effects] == [1]


@pytest.mark.parametrize(("learned", "number", "state"), [(1, 2, "open"), (1, 1, "done"), (2, 1, "open")])
def test_what_was_refused_after_its_round_is_dropped(member, coordinator, tmp_path, net, learned, number, state):
    """docs/decisions/0077: while its round lasts, and no longer. The answer of the round was lost on the way, and the
    form is checked before the round; the last round, and one before which a restored coordinator stands, too."""
    told = []
    coordinator.round, coordinator.state = number, state
    coordinator.refuse["reply"] = Refusal(code="bad_contribution", message="n_train is above 10")
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.promise(outbox.put_learned("skin", learned, net.reply_of(1).to_bytes(), 0), learned)  # sent once
        (late,) = member.deliver(outbox, member.task(), settled=lambda _, one: told.append((one.outcome, one.round)))
        assert (late.outcome, late.code, outbox.count()) == ("late", "round_over", 0)
    assert told == [("late", learned)]


@pytest.mark.parametrize(("outcome", "told"), [("accepted", ("count", 3)), ("late", ("drop", 3))])
def test_a_round_counts_exactly_if_its_reply_was_accepted(outcome: str, told: Any) -> None:
    """docs/decisions/0028 and 0038: else it is dropped."""
    heard = list[Any]()
    delivery = Delivery(idem="a" * 32, round=3, outcome=outcome, bytes=1)
    settle(delivery, lambda number: heard.append(("count", number)), lambda number: heard.append(("drop", number)))
    assert heard == [told]


@pytest.mark.parametrize(("size", "way"), [(2**20 - 200, ["inline"]), (2**20, ["offered", "sent", "offered"])])
def test_what_a_slow_line_does_not_carry_at_once_goes_in_pieces(member, coordinator, tmp_path, monkeypatch, size, way):
    """docs/security.md 2.2: above 1 MiB, long before an envelope is full; the blob is offered before a byte is sent."""
    went = list[str]()

    def reply(idem: str, payload: Any, round_number: int) -> None:
        went.append("inline" if isinstance(payload, Payload) else "offered")
        if went == ["offered"]:
            raise SignedRefusal("a part of the blob is missing", "no_blob")

    monkeypatch.setattr(member, "reply", reply)
    monkeypatch.setattr(member, "send_blob", lambda *_: went.append("sent"))
    with Outbox(tmp_path / "o.sqlite3", KEY) as outbox:
        outbox.put("skin", "reply", Payload({"maps.0": np.zeros(size, np.uint8)}, {}).to_bytes(), 0)
        (done,) = member.deliver(outbox, member.task())
    assert (done.outcome, went) == ("accepted", way)

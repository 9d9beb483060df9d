"""`edgefl sync` on a device that learns: a round counts once, whether its reply was lost, late, refused or dropped."""

import hashlib
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.edge_client.learning.rounds.conftest import OPTIONS, PAUSE, STEPS, Learner

from edgefl_client.doctor.status import run_status, status_text
from edgefl_client.learning.checkpoint import load_standing
from edgefl_client.learning.live_round import counted_round, drop_reply
from edgefl_client.scoring.learning_verdict import Answers, LearningVerdict
from edgefl_client.scoring.personal import PersonalState, kept_personal, load_personal, save_personal
from edgefl_client.sharing.enrolled_device import Device, run_enrol
from edgefl_client.sharing.sync import run_sync
from edgefl_client.sharing.waiting_items import drop_waiting, list_waiting, show_waiting
from edgefl_exchange.errors import Unavailable
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import Refusal
from edgefl_protocol.payload import digest
from edgefl_protocol.records.invite import encode_invite

EVEN = Answers(balanced_accuracy=0.5, referred=0, balanced_accuracy_not_referred=0.5, wrong_not_referred=20, missed=0)


def test_a_round_is_learned_and_answered_in_one_sync(device: Learner) -> None:
    """docs/reference/device-learning.md: the reply holds maps under the federation's numbers, and the digest of the
    site."""
    found = device.report()
    assert found["learning"]["state"] == "done" and found["learning"]["round"] == 1
    (sent,) = found["sent"]
    assert (sent["outcome"], sent["round"], found["waiting"]) == ("accepted", 1, 0)
    ((_, number, content),) = device.coordinator.effects
    reply = Payload.from_bytes(content)
    assert number == 1 and set(reply.arrays) == {"maps.0", "maps.2"}  # NV and MEL, numbered as the task does
    assert all(maps.shape == (5, 36) for maps in reply.arrays.values())
    assert reply.scalars == {"site_sha256": found["learning"]["state_sha256"]}
    assert device.standing == f"1 {found['learning']['state_sha256']}"
    again = device.report()
    assert (again["learning"]["state"], again["learning"]["code"], again["sent"]) == ("skipped", "replied", [])
    device.coordinator.stuck = "the reply of round 1 was refused: it lies 20 times as far"  # by aggregation, later
    refused = device.report()
    assert (refused["learning"]["code"], refused["round"]["refused"], again["round"]["refused"]) == (
        "reply_refused", True, False,
    )  # fmt: skip
    assert "reply refused\n" in status_text(run_status(device.holder, online=True))
    status = run_status(Device(home=device.home), online=False)
    assert status["learning"]["counted_round"] == 1 and status["learning"]["table"].endswith("labels.csv")
    assert "last round learned here that counted: 1" in status_text(status)


def test_the_next_round_begins_with_the_last_that_counted(device: Learner) -> None:
    """docs/methods.md, 1.6: private prompts and moments live on from round to round."""
    device.sync()
    first = load_standing(device.home.learning / "live.payload")
    device.open_round(2)
    device.sync()
    second = load_standing(device.home.learning / "live.payload")
    assert first is not None and second is not None
    assert (first.round, second.round) == (1, 2)
    assert int(second.state["optimizer.step"]) == 2 * int(first.state["optimizer.step"]) == 2 * STEPS


def test_a_live_round_keeps_better_values_in_use_and_is_answered(device: Learner) -> None:
    """docs/reference/device-learning.md, `before`: the gate is the same in a round; the reply goes as it would."""
    device.sync()
    first = device.report(None)
    good = np.array([[-20, -20, -20], [20, 20, 20], [0, 0, 0]], np.float32)
    kept = kept_personal(device.home) or PersonalState(
        bundle_sha256=device.bundle.sha256, weights=device.bundle.weights, seen=(True, True, False), images=14, round=1,
        verdict=LearningVerdict(bundle=EVEN, personal=EVEN, held=40, least_of_a_class=20, class_rule=True),
    )  # fmt: skip
    better = {**kept.weights, "head.weight": good, "head.bias": np.float32([25, -21, -9])}
    save_personal(device.home, replace(kept, weights=better))
    device.open_round(2)
    found = device.report()
    gate = found["learning"]["gate"]
    assert gate["before"]["balanced_accuracy"] > 0.9 > gate["personal_balanced_accuracy"]
    assert "before" in gate["refused_for"] and not gate["passed"]
    assert found["sent"][0]["outcome"] == "accepted" and first["learning"] is None
    assert device.standing == f"2 {found['learning']['state_sha256']}"
    now = load_personal(device.home, device.bundle)
    assert now is not None and digest(now.weights) == digest(better)


def test_an_answer_that_was_lost_comes_again(device: Learner, net: SimpleNamespace) -> None:
    """docs/security.md, idempotency: the reply counted although the device never heard so; the round went on."""
    device.wire.faults = [None] * 4 + [net.cut_answer] * 4  # task, broadcast, index, task; then every attempt to reply
    with pytest.raises(Unavailable):
        device.sync()
    assert device.standing is None and len(device.coordinator.effects) == 1
    device.open_round(2)
    found = device.report(None)
    assert [(one["outcome"], one["round"]) for one in found["sent"]] == [("accepted", 1)]
    assert counted_round(device.home, "skin") == 1 and len(device.coordinator.effects) == 1


def test_no_round_is_learned_while_an_earlier_one_has_no_answer(device: Learner, net: SimpleNamespace) -> None:
    """Decision 0028: what counted is what the next round begins with, so it waits until that is known."""
    device.wire.faults = [None] * 4 + [net.cut_answer] * 4
    with pytest.raises(Unavailable):
        device.sync()
    device.open_round(2)
    found = run_sync(device.holder, OPTIONS, hold=True).report
    assert found["learning"]["code"] == "queued" and "round 1" in found["learning"]["message"]
    assert [(one["outcome"], one["round"]) for one in device.report()["sent"]] == [("accepted", 1), ("accepted", 2)]
    standing = load_standing(device.home.learning / "live.payload")
    assert standing is not None and (standing.round, int(standing.state["optimizer.step"])) == (2, 2 * STEPS)


def test_a_new_federation_of_the_same_name_meets_nothing_of_the_old(device: Learner) -> None:
    """Rounds are numbered from 1 again: nothing of a membership that is gone is taken for its own."""
    device.report()
    drop_reply(device.home, "skin", 2, "its owner dropped it")
    shutil.rmtree(device.home.member)
    new = type(device.coordinator)(classes=device.coordinator.classes, round=2)
    new.broadcasts[2] = Payload({"maps.0.0": np.full((1, 36), 0.5, np.float16)}, {"phase": "train", "round": 2})
    later = replace(device, coordinator=new, wire=new)
    run_enrol(later.holder, encode_invite(new.invite("device-2"), new.now_ms), None, None, 1)
    new.approve("device-2")
    assert device.standing is None
    found = later.report()
    assert (found["broadcast"]["maps"], found["learning"]["state"], found["waiting"]) == (1, "done", 0)
    standing = load_standing(device.home.learning / "live.payload")
    assert standing is not None and int(standing.state["optimizer.step"]) == STEPS  # from the bundle's values


def test_a_round_that_closed_meanwhile_is_skipped(device: Learner) -> None:
    """A paused round whose time is over leaves the site as it was, as a site of the local engine that takes no part."""
    paused = device.report(PAUSE)
    assert (
        paused["learning"]["state"] == "paused"
        and paused["learning"]["reason"] == "the limit of 1e-09 minutes is reached"
    )
    device.open_round(2)
    found = device.report()
    assert found["learning"]["round"] == 2 and device.coordinator.effects[0][1] == 2
    standing = load_standing(device.home.learning / "live.payload")
    assert standing is not None and int(standing.state["optimizer.step"]) == STEPS  # none of the paused one


def test_a_reply_that_comes_too_late_is_dropped_with_a_sentence(device: Learner) -> None:
    """docs/security.md, order of checks: late is typed, told, and never mixed into a later round."""
    real = device.coordinator._task

    def moving(*arguments: Any) -> Payload:
        if len(device.wire.sent) > 2:  # the exchange after learning
            device.open_round(2)
        return real(*arguments)

    device.coordinator._task = moving
    try:
        found = device.report()
    finally:
        device.coordinator._task = real
    (late,) = found["sent"]
    assert (late["outcome"], late["code"], late["round"]) == ("late", "round_over", 1)
    assert "round 1 was over before its reply was taken" in late["message"]
    assert device.coordinator.effects == [] and device.standing is None and found["waiting"] == 0
    assert device.report()["learning"]["round"] == 2 and counted_round(device.home, "skin") == 2


def test_a_refused_reply_is_sent_again_and_not_learned_again(device: Learner) -> None:
    """docs/decisions/0077: each sync offers it while its round lasts, for the operator may mend what it was refused
    for; with the next round it is dropped."""
    device.coordinator.refuse["reply"] = Refusal(code="bad_contribution", message="n_train is above 10000")
    first = device.report()
    assert first["sent"][0]["outcome"] == "refused" and first["waiting"] == 1
    again = device.report()
    assert [(one["outcome"], one["message"]) for one in again["sent"]] == [("refused", "n_train is above 10000")]
    assert again["learning"]["code"] == "queued" and "the next sync sends it again" in again["learning"]["message"]
    device.coordinator.refuse.clear()
    taken = device.report()
    assert [one["outcome"] for one in taken["sent"]] == ["accepted"] and taken["learning"]["code"] == "replied"
    assert device.standing == f"1 {first['learning']['state_sha256']}"
    device.open_round(2)
    device.coordinator.refuse["reply"] = Refusal(code="bad_contribution", message="n_train is above 10000")
    assert device.report()["sent"][0]["outcome"] == "refused"
    device.coordinator.refuse.clear()
    device.open_round(3)
    after = device.report()
    assert [(one["outcome"], one["round"]) for one in after["sent"]] == [("late", 2), ("accepted", 3)]
    standing = load_standing(device.home.learning / "live.payload")
    assert standing is not None and int(standing.state["optimizer.step"]) == 2 * STEPS  # of rounds 1 and 3


def test_what_was_learned_can_be_looked_at_before_it_leaves(device: Learner) -> None:
    """docs/reference/sharing.md: held, shown by its numbers, and then these very bytes leave."""
    holder = device.holder
    (held,) = run_sync(holder, OPTIONS, hold=True).report["sent"]
    assert (held["outcome"], held["code"]) == ("held", "held_back") and not device.coordinator.effects
    (item,) = list_waiting(device.home, device.coordinator.now_ms)
    assert (item.state, item.kind, item.round) == ("waiting", "learned", 1)
    shown = show_waiting(holder, item.id)
    assert shown["travels"] == ["maps"] and shown["bytes"] == held["bytes"]
    assert device.report()["waiting"] == 0
    ((_, _, data),) = device.coordinator.effects
    assert hashlib.sha256(data).hexdigest() == shown["sha256"]


def test_a_dropped_reply_is_not_learned_again(device: Learner) -> None:
    """docs/reference/sharing.md, the outbox: what its owner drops never leaves, and the next sync leaves the round
    alone."""
    holder = device.holder
    run_sync(holder, OPTIONS, hold=True)
    (item,) = list_waiting(device.home, device.coordinator.now_ms)
    drop_waiting(holder, item.id)
    report = device.report()
    assert (report["learning"]["state"], report["learning"]["code"]) == ("skipped", "refused")
    assert "its owner dropped it" in report["learning"]["message"]
    assert report["waiting"] == 0 and not device.coordinator.effects
    device.open_round(2)
    assert device.report()["sent"][0]["outcome"] == "accepted"

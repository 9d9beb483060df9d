"""`edgefl sync` on a device that learns: a round once, whatever is cut, killed, late, refused or not allowed."""

import datetime
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from edgefl_client.exchange import Unavailable, enrol
from edgefl_client.federate import Device, run_enrol
from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import load_standing, only_one
from edgefl_client.learning.limits import Limits
from edgefl_client.learning.live import counted_round, drop_reply
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.owned import Table, remember_table
from edgefl_client.learning.personal import load_personal
from edgefl_client.models import install
from edgefl_client.policy import Policy, save_policy
from edgefl_client.status import run_status, status_text
from edgefl_client.syncing import Synced, run_sync
from edgefl_client.trust import add_trusted
from edgefl_client.waiting import drop_waiting, list_waiting, show_waiting
from edgefl_protocol import Payload, ReplayWindow
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.invite import encode_invite
from edgefl_protocol.messages import Refusal
from edgefl_protocol.payload import digest

STEPS = 4  # 14 pictures that teach, four in a step, one epoch
OPTIONS = TrainOptions(threads=1, checkpoint_seconds=0)
PAUSE = replace(OPTIONS, limits=Limits(minutes=1e-9))


class Killed(BaseException):
    """What SIGKILL would do, at a point the test chooses; nothing catches it."""


@dataclass
class Learner:
    """A device that learns, its coordinator in memory, and the wire between them."""

    home: Home
    coordinator: Any
    wire: Any
    bundle: Any

    @property
    def holder(self) -> Device:
        return Device(
            home=self.home, connect=lambda folder, membership: self.wire, clock_ms=lambda: self.coordinator.now_ms
        )

    def sync(self, options: TrainOptions | None = OPTIONS) -> Synced:
        return run_sync(self.holder, options)

    def report(self, options: TrainOptions | None = OPTIONS) -> dict[str, Any]:
        return self.sync(options).report

    def copied(self, root: Path) -> "Learner":
        """The same device and coordinator before their first sync."""
        shutil.copytree(self.home.root, root)
        one = self.coordinator
        one.effects, one.answers, one.replied, one.window, one.round = [], {}, set(), ReplayWindow(), 1
        one.state, one.refuse, one.line, one.method, one.travels = "open", {}, "main", "fedevprompt", ()
        made = replace(self, home=Home(root), wire=type(self.wire)(one))
        made.open_round(1)
        return made

    def open_round(self, number: int) -> None:
        """The next round, with two others' maps."""
        rng = np.random.default_rng(number)
        maps = {f"maps.{peer}.{label}": rng.random((2, 36)).astype(np.float16) for peer in (0, 1) for label in (0, 1)}
        told = {"phase": "train", "round": number, "rounds": 5}
        self.coordinator.broadcasts[number] = Payload(maps, told)
        self.coordinator.round, self.coordinator.state = number, "open"

    @property
    def standing(self) -> str | None:
        found = load_standing(self.home.learning / "live.payload")
        return None if found is None else f"{found.round} {digest(dict(found.state))}"


@pytest.fixture(scope="module")
def template(tmp_path_factory, net: SimpleNamespace, school: SimpleNamespace, lab: SimpleNamespace) -> Learner:
    """Enrolled, approved, allowed to give maps, with a bundle that learns and a table of pictures."""
    folder = tmp_path_factory.mktemp("device")
    home, coordinator = Home(folder / "home"), net.FakeCoordinator()
    coordinator.classes = ("NV", "BCC", "MEL")  # the bundle numbers them otherwise
    enrol(home.prepare(home.member), coordinator.invite(), coordinator, clock_ms=lambda: net.NOW_MS)
    coordinator.approve()
    add_trusted(home, lab.SIGNER.public_key, "signer", datetime.date(2026, 9, 21))
    save_policy(home, Policy(allowed={"maps": None}))
    data = school.learning_bytes(epochs=1, kd_weight=0.05)
    bundle = load_bundle(data, [lab.SIGNER.public], lab.NOW_MS)
    install(home, data, bundle)
    remember_table(home, Table(file=school.table(folder / "pictures", spread=5)))
    made = Learner(home, coordinator, net.Wire(coordinator), bundle)
    made.open_round(1)
    return made


@pytest.fixture
def device(template: Learner, tmp_path: Path) -> Learner:
    return template.copied(tmp_path / "home")


def test_a_round_is_learned_and_answered_in_one_sync(device: Learner) -> None:
    """docs/device.md, taking part: the reply holds maps under the federation's numbers, and the digest of the site."""
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
    status = run_status(Device(home=device.home), online=False)
    assert status["learning"]["counted_round"] == 1 and status["learning"]["table"].endswith("labels.csv")
    assert "last round that was learned here and counted: 1" in status_text(status)


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


def kill_at(monkeypatch: pytest.MonkeyPatch, device: Learner, number: int) -> Callable[[], int]:
    """Kill before the `number`-th thing that outlives the process: a file replaced, a transaction, a request sent."""
    seen = [0]

    def happen() -> None:
        seen[0] += 1
        if seen[0] == number:
            raise Killed

    def replacing(source: Any, target: Any, real: Callable[..., None] = os.replace) -> None:
        happen()
        real(source, target)

    class Database:
        """A connection that counts its commits."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._real = connect(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def execute(self, sql: str, *values: Any) -> Any:
            if sql == "COMMIT":
                happen()
            return self._real.execute(sql, *values)

    connect = sqlite3.connect
    send = device.coordinator.send
    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(sqlite3, "connect", Database)
    monkeypatch.setattr(device.wire, "inner", SimpleNamespace(send=lambda request: (happen(), send(request))[1]))
    return lambda: seen[0]


def test_killed_before_every_write_and_every_request(template: Learner, tmp_path: Path) -> None:
    """docs/security.md check 56, each point once: nothing is lost, nothing is sent twice, no step is learned twice."""
    whole = template.copied(tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        counted = kill_at(patch, whole, 0)
        whole.sync()
        points = counted()
    expected, standing = list(whole.coordinator.effects), whole.standing
    assert len(expected) == 1 and points >= 20
    for number in range(1, points + 1):
        device = template.copied(tmp_path / str(number))
        steps: list[str] = []
        options = replace(OPTIONS, report=lambda facts, steps=steps: steps.append("step") if "step" in facts else None)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, device, number)
            device.sync(options)
        found = device.sync(options)
        assert found.problem is None, number
        assert device.coordinator.effects == expected, number
        assert device.standing == standing, number
        assert not (device.home.learning / "live-next.payload").exists(), number
        assert found.report["waiting"] == 0 and len(steps) <= STEPS + 1, (number, steps)
        personal = load_personal(device.home, device.bundle)
        assert personal is None or personal.round == 1
        shutil.rmtree(device.home.root)


def test_an_answer_that_was_lost_comes_again(device: Learner, net: SimpleNamespace) -> None:
    """docs/security.md, idempotency: the reply counted although the device never heard so; the round went on."""
    device.wire.faults = [None] * 4 + [net.cut_answer] * 4  # task, broadcast, index, task; then every attempt to reply
    with pytest.raises(Unavailable), pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)
        device.sync()
    assert device.standing is None and len(device.coordinator.effects) == 1
    device.open_round(2)
    found = device.report(None)
    assert [(one["outcome"], one["round"]) for one in found["sent"]] == [("accepted", 1)]
    assert counted_round(device.home, "skin") == 1 and len(device.coordinator.effects) == 1


def test_no_round_is_learned_while_an_earlier_one_has_no_answer(device: Learner, net: SimpleNamespace) -> None:
    """Decision 0028: what counted is what the next round begins with, so it waits until that is known."""
    device.wire.faults = [None] * 4 + [net.cut_answer] * 4
    with pytest.raises(Unavailable), pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", lambda seconds: None)
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
    assert paused["learning"]["state"] == "paused" and paused["learning"]["reason"] == "1e-09 minutes are over"
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
    assert "round 1 was over before its reply could be sent" in late["message"]
    assert device.coordinator.effects == [] and device.standing is None and found["waiting"] == 0
    assert device.report()["learning"]["round"] == 2 and counted_round(device.home, "skin") == 2


def test_a_refused_reply_is_not_learned_again(device: Learner) -> None:
    """What the coordinator can never take is told once and not tried at every tick of a timer."""
    device.coordinator.refuse["reply"] = Refusal(code="bad_contribution", message="wrong shape")
    assert device.report()["sent"][0]["outcome"] == "refused"
    device.coordinator.refuse.clear()
    found = device.report()
    assert (found["learning"]["code"], found["sent"]) == ("refused", [])
    assert "wrong shape" in found["learning"]["message"] and device.standing is None


def test_nothing_is_learned_that_may_not_leave(device: Learner) -> None:
    """docs/device.md, "What may leave": asked before the work, one sentence; no step is taken."""
    save_policy(device.home, Policy())
    done = device.sync()
    assert done.problem is not None and done.problem.code == "not_allowed"
    assert done.report["learning"]["state"] == "failed" and done.report["sent"] == []
    assert not (device.home.learning / "live-round.payload").exists()


@pytest.mark.parametrize("allowed", [{"maps", "features"}, {"maps", "weights"}, {"maps"}])
def test_every_kind_that_a_round_sends_is_asked_for(device: Learner, allowed: set[str]) -> None:
    """Features and weights need the owner's word as maps do: before the work, and before what lies there is sent."""
    device.coordinator.travels = ("features", "weights")
    save_policy(device.home, Policy(allowed=dict.fromkeys(allowed)))
    done = device.sync()
    assert done.problem is not None and done.problem.code == "not_allowed"
    learned = Payload(
        {"features": np.zeros((2, 128), np.float16), "backbone.conv": np.zeros(2**18, np.float32)},  # lies in a file
        {"site_sha256": "0" * 64},
    )
    with device.holder.member() as member, device.holder.outbox(member.identity) as outbox:
        outbox.put_learned("skin", 1, learned.to_bytes(), device.coordinator.now_ms)
    (sent,) = device.report()["sent"]
    assert (sent["outcome"], sent["code"]) == ("held", "not_allowed") and device.coordinator.effects == []
    save_policy(device.home, Policy(allowed={"features": None, "weights": None}))
    (sent,) = device.report()["sent"]
    assert sent["outcome"] == "accepted" and Payload.from_bytes(device.coordinator.effects[0][2]) == learned


def test_reasons_to_leave_a_round_alone(device: Learner, school: SimpleNamespace, lab: SimpleNamespace) -> None:
    """Each is a code and a sentence, and no failure: another process at work, a model of another line, no table."""
    with only_one(device.home):
        assert device.report()["learning"]["code"] == "busy"
    device.coordinator.line = "other"
    assert device.report()["learning"]["code"] == "other_line"
    device.coordinator.line, device.coordinator.method = "main", "fedavg"
    found = device.report()["learning"]
    assert (found["state"], found["code"]) == ("skipped", "other_method")
    device.coordinator.method, device.coordinator.state = "fedevprompt", "closed"
    assert device.report()["learning"]["code"] == "not_open"
    device.coordinator.state = "open"
    assert device.report(None)["learning"] is None
    (device.home.learning / "table.json").unlink()
    assert device.report()["learning"] is None


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({}, "other_broadcast"),
        ({"phase": "train", "round": -1}, "other_broadcast"),
        ({"phase": "warm", "round": 0}, "other_phase"),
    ],
)
def test_a_broadcast_that_means_nothing_is_one_sentence(device: Learner, told: dict[str, Any], code: str) -> None:
    """A coordinator that errs, or lies, ends a round with a code: no traceback, no step."""
    device.coordinator.broadcasts[1] = Payload({}, told)
    done = device.sync()
    assert done.problem is not None and done.problem.code == code
    assert device.coordinator.effects == [] and device.standing is None


def test_settings_that_cannot_be_learned_with_are_one_sentence(device: Learner) -> None:
    """More epochs than a bundle may name: refused before any picture is read."""
    device.coordinator.epochs = 2**31 - 1
    try:
        done = device.sync()
    finally:
        device.coordinator.epochs = 0
    assert done.problem is not None and done.problem.code == "bad_settings" and "epochs" in str(done.problem)


def test_what_the_gate_refers_teaches_and_gives_no_map(
    device: Learner, school: SimpleNamespace, tmp_path: Path
) -> None:
    """docs/device.md, the gate: grey pictures are not of skin; none of them says where a model looks on skin."""
    table = school.table(tmp_path / "grey", spread=5)
    for file in table.parent.glob("MEL*.png"):
        with Image.open(file) as picture:
            picture.convert("L").save(file)
    remember_table(device.home, Table(file=table))
    found = device.report()["learning"]
    assert (found["learned_from"], found["left_out"], found["state"]) == (14, 7, "done")
    ((_, _, content),) = device.coordinator.effects
    assert set(Payload.from_bytes(content).arrays) == {"maps.0"}  # NV alone


def test_a_picture_that_is_gone_is_named_and_nothing_is_lost(device: Learner, tmp_path: Path) -> None:
    """The exchange is done all the same; the command fails with the file's name."""
    table = tmp_path / "labels.csv"
    table.write_text("image,label\ngone.png,NV\n")
    remember_table(device.home, Table(file=table))
    done = device.sync()
    assert done.problem is not None and "gone.png" in str(done.problem)
    assert done.report["learning"]["state"] == "failed" and done.report["broadcast"]["maps"] == 8


def test_what_was_learned_can_be_looked_at_before_it_leaves(device: Learner) -> None:
    """docs/device.md, what may leave: held, shown by its numbers, and then these very bytes leave."""
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
    """docs/device.md, the outbox: what its owner drops never leaves, and the next sync leaves the round alone."""
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

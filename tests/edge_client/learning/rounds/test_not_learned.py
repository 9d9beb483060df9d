"""`edgefl sync` on a device that learns: what keeps it from learning or from sharing, each in one sentence."""

import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from tests.edge_client.learning.rounds.conftest import OPTIONS, STEPS, Learner

from edgefl_client.cli import cli
from edgefl_client.commands.failures import exit_code
from edgefl_client.learning.checkpoint import load_standing, only_one
from edgefl_client.learning.fedevprompt import FedEvPromptLearner
from edgefl_client.learning.limits import Battery, LearningLimits
from edgefl_client.learning.own_pictures import Table, remember_table, remembered_table
from edgefl_client.sharing import sync as sync_room
from edgefl_client.sharing.policy import Limits, Policy, save_policy
from edgefl_client.trust.trusted_keys import add_trusted, remove_trusted
from edgefl_exchange.trust_records import save_revoked
from edgefl_protocol import Payload
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.records.revocation import make_revoked


def test_nothing_is_learned_that_may_not_leave(device: Learner) -> None:
    """docs/reference/sharing.md: asked before the work, one sentence; no step is taken."""
    save_policy(device.home, Policy())
    done = device.sync()
    assert done.problem is not None and done.problem.code == "not_allowed"
    assert done.report["learning"]["state"] == "failed" and done.report["sent"] == []
    assert not (device.home.learning / "live-round.payload").exists()


@pytest.mark.parametrize(
    ("size", "code"), [(2**28, "round_too_large"), (2**27, "round_too_large"), (2**26 + 1, "too_large")]
)
def test_a_reply_that_would_be_too_large_is_refused_before_the_work(
    device: Learner, monkeypatch: pytest.MonkeyPatch, size: int, code: str
) -> None:
    """What a round's reply takes at most is held against the owner's limits and the federation's before any step."""
    monkeypatch.setattr(FedEvPromptLearner, "most_reply_bytes", lambda self, broadcast: size)
    save_policy(device.home, Policy(allowed={"maps": None}, limits=Limits(bytes_per_day=2**27 - 1)))
    found = device.report()["learning"]
    assert (found["state"], found["code"]) == ("failed", code) and str(size) in found["message"]
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


def test_an_empty_battery_only_exchanges(device: Learner) -> None:
    """docs/reference/device-learning.md: no picture is read and no step is taken; it is no failure, a timer asks
    again."""
    remember_table(device.home, Table(file=device.home.root / "none.csv"))  # it would be told to be missing
    low = replace(OPTIONS, limits=LearningLimits(battery=lambda: Battery(True, 3)))
    done = device.sync(low)
    found = done.report["learning"]
    assert (found["state"], found["code"], done.problem) == ("skipped", "paused", None)
    assert "battery is at 3 %" in found["message"] and done.report["broadcast"]["maps"] == 8


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
    """More epochs than a run may have: the task is refused before any picture is read."""
    device.coordinator.epochs = 2**31 - 1
    try:
        with pytest.raises(PayloadError, match="epochs is not a whole number from 0 to 10000"):
            device.sync()
    finally:
        device.coordinator.epochs = 0
    assert device.coordinator.effects == [] and device.standing is None


def telling(device: Learner, backbone: Mapping[str, Any] | None = None, **settings: Any) -> None:
    """From now on the task has these settings, and is described as a coordinator of today does."""
    real = device.coordinator._task

    def told(*arguments: Any) -> Payload:
        task = TaskReply.from_payload(real(*arguments))
        return replace(task, settings=settings, backbone=backbone or {}, train_rounds=5).to_payload()

    device.coordinator._task = told


@pytest.mark.parametrize(
    ("settings", "backbone", "sentence"),
    [
        ({"loss": "ce"}, {}, "the federation's loss is ce, but the training step of this bundle has evidential"),
        (
            {"evidence": "relu"},
            {},
            "the federation's evidence is relu, but the training step of this bundle has softplus",
        ),
        (
            {"rollout": "sink"},
            {},
            "the federation's rollout is sink, but the training step of this bundle has renormalise",
        ),
        ({}, {"sha256": "f" * 64}, "the federation's frozen network (SHA-256) is ffff"),
    ],
)
def test_settings_that_this_bundle_cannot_follow_are_one_sentence(
    device: Learner, settings: dict[str, Any], backbone: dict[str, Any], sentence: str
) -> None:
    """Decision 0028: what differs between the signed task and the bundle is refused before any picture is read."""
    remember_table(device.home, Table(file=device.home.root / "none.csv"))  # it would be told to be missing
    telling(device, backbone, **settings)
    try:
        done = device.sync()
    finally:
        del device.coordinator._task
    assert done.problem is not None and done.problem.code == "other_settings"
    assert sentence in str(done.problem) and "publish" in str(done.problem)
    assert device.coordinator.effects == [] and device.standing is None


def test_the_command_says_so_in_one_line(device: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/device-learning.md: exit code 1, one sentence on standard error, and the report names the code."""
    telling(device, kd_metric="nearest")
    monkeypatch.setattr("edgefl_client.commands.sync.device_of", lambda *_: device.holder)
    try:
        done = CliRunner().invoke(cli, ["sync", "--home", str(device.home.root), "--json"])
    finally:
        del device.coordinator._task
    assert done.exit_code == 1 and "kd_metric is nearest" in done.stderr and len(done.stderr.splitlines()) == 1
    assert json.loads(done.stdout)["learning"]["code"] == "other_settings"


def test_the_settings_of_the_task_hold(device: Learner) -> None:
    """Decision 0028: with a rate of 0 the head stays what the bundle holds, whatever rate the bundle names."""
    telling(device, lr_head=0.0, batch=7)
    steps: list[Any] = []
    try:
        found = device.sync(replace(OPTIONS, report=lambda facts: steps.append(facts.get("steps"))))
    finally:
        del device.coordinator._task
    assert found.problem is None and {one for one in steps if one} == {2}  # 14 pictures, seven in a step
    standing = load_standing(device.home.learning / "live.payload")
    assert standing is not None
    np.testing.assert_array_equal(standing.state["head.weight"], device.bundle.weights["head.weight"])
    assert device.bundle.training.rates["head.weight"] > 0 and abs(standing.state["optimizer.exp_avg.head.bias"]).max()


def test_a_folder_without_labels_teaches_no_classes(device: Learner) -> None:
    """FedEvPrompt learns from labels: one sentence says how to name them."""
    table = remembered_table(device.home)
    assert table is not None
    remember_table(device.home, Table(file=table.file.parent))
    done = device.sync()
    assert done.problem is not None and done.problem.code == "no_labels" and "--labels" in str(done.problem)


def test_what_the_gate_refers_teaches_and_gives_no_map(
    device: Learner, school: SimpleNamespace, tmp_path: Path
) -> None:
    """docs/reference/picture-gate.md: grey pictures are not of skin; none of them says where a model looks on skin."""
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


def remove(device: Learner, lab: SimpleNamespace) -> None:
    """`edgefl trust remove` in another process."""
    remove_trusted(device.home, lab.SIGNER.key_id)


def revoke(device: Learner, lab: SimpleNamespace) -> None:
    """Another `edgefl sync`, which fetched a list of revoked keys."""
    one = device.coordinator
    record = make_revoked(one.signing, "skin", 9, [lab.SIGNER.key_id], one.now_ms, one.now_ms + 24 * 3_600_000)
    save_revoked(device.home.member, record)


@pytest.mark.parametrize(("no_more", "code"), [(remove, "no_trusted_key"), (revoke, "revoked_signer")])
def test_a_round_ends_with_the_trust_in_its_bundle(
    device: Learner, lab: SimpleNamespace, no_more: Callable[[Learner, SimpleNamespace], None], code: str
) -> None:
    """docs/security.md 2.6.5, check 24: before the next step, a refusal; nothing leaves."""
    steps: list[Any] = []

    def told(facts: Mapping[str, Any]) -> None:
        steps.append(facts.get("step"))
        if facts.get("step") == 2:
            no_more(device, lab)

    done = device.sync(replace(OPTIONS, report=told))
    assert [step for step in steps if step] == [1, 2] and STEPS > 2
    assert done.problem is not None and (done.problem.code, exit_code(done.problem)) == (code, 3)
    assert done.report["learning"]["state"] == "failed" and done.report["sent"] == []
    assert device.coordinator.effects == [] and device.standing is None


def test_what_was_learned_when_the_trust_ended_waits_for_it(
    device: Learner, lab: SimpleNamespace, after: Callable[..., None]
) -> None:
    """Removed after the last step: the reply does not leave; once the signer is trusted again it does, as it was."""
    whole = device.copied(device.home.root.parent / "whole")
    assert whole.sync().problem is None
    (sent,) = whole.coordinator.effects
    late = device.copied(device.home.root.parent / "late")
    after(1, sync_room, "learn_live", lambda: remove(late, lab))
    done = late.sync()
    assert done.problem is not None and done.problem.code == "no_trusted_key"
    assert late.coordinator.effects == [] and done.report["waiting"] == 0
    add_trusted(late.home, lab.SIGNER.public_key, "signer", datetime.date(2026, 9, 21))
    assert late.sync().problem is None
    assert [one[2] for one in late.coordinator.effects] == [sent[2]]

"""A device's change of keys at a real coordinator: nothing is lost, and no crash leaves a device mute.

Source: docs/security.md 2.6.4, check 23.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.store.key_ring import KEPT_MS, RENEW_AFTER_MS
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_exchange.errors import SignedRefusal, Unavailable
from edgefl_exchange.identity import Identity
from edgefl_exchange.key_change import finish_change
from edgefl_exchange.keys_and_index import ROTATE_AFTER_MS
from edgefl_exchange.membership import load_membership
from edgefl_exchange.outbox import Outbox
from edgefl_exchange.transport import Answer, Request
from edgefl_protocol import Payload
from edgefl_protocol.records.rotation import OVERLAP_MS

DAY_MS = 24 * 3600 * 1000


def reply_of(value: float) -> Payload:
    return Payload({"maps.0": np.full((1, 4), 1, np.float16)}, {"site_sha256": f"{int(value):064x}"})


@pytest.mark.parametrize("messages", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_messages_across_rotations(world, messages) -> None:
    """docs/security.md check 23: 50 and 500 messages across changes of the device's keys and of the sealing key: 0
    lost."""
    with world.member() as member:
        for number in range(messages):
            world.now_ms += 500 * 45 * 60_000 // messages  # all in 16 days: each of both changes twice
            coordinator_keys.tend_keys(world.coordinator)
            if number in (messages // 4, messages * 3 // 4):
                member.rotate()
            assert member.task().state == "waiting"
    assert world.coordinator.keys.ring.number == 3
    with world.coordinator.store.transaction() as connection:
        rotated = connection.exec_driver_sql("SELECT COUNT(*) FROM audit WHERE event = 'keys_rotated'").scalar()
        refused = connection.exec_driver_sql("SELECT COUNT(*) FROM audit WHERE event = 'refused'").scalar()
    assert (rotated, refused) == (2, 0)
    assert world.answers >= messages + 2 + 2  # and two of the enrolment


def test_a_device_that_slept_through_renewals(world) -> None:
    """docs/security.md check 23: an old key record is refreshed before sealing, whatever was renewed meanwhile."""
    for sleep_ms in (RENEW_AFTER_MS, RENEW_AFTER_MS + KEPT_MS, 90 * DAY_MS):
        for _ in range(max(1, sleep_ms // RENEW_AFTER_MS)):
            world.now_ms += RENEW_AFTER_MS + KEPT_MS
            coordinator_keys.tend_keys(world.coordinator)
        with world.member() as member:
            assert member.task().state == "waiting"
    assert load_membership(world.device).key_number == world.coordinator.keys.ring.number > 3


def test_what_waited_in_the_outbox_survives_a_change_of_keys(world) -> None:
    """docs/security.md check 23: work items put before the change are opened and accepted after it."""
    OPERATIONS["start"](world.coordinator, {})
    with world.member() as member, Outbox(world.device / "outbox.sqlite3", member.identity.outbox_key) as outbox:
        outbox.put("skin", "reply", reply_of(7).to_bytes(), world.now_ms)
        before = member.identity.signing.key_id, member.identity.sealing.key_id
        member.rotate()
        assert member.identity.signing.key_id != before[0] and member.identity.sealing.key_id != before[1]
    with world.member() as member, Outbox(world.device / "outbox.sqlite3", member.identity.outbox_key) as outbox:
        (item,) = outbox.items("skin")
        assert Payload.from_bytes(item.payload) == reply_of(7)
        member.rotate()
    with Identity(world.device) as identity, Outbox(world.device / "outbox.sqlite3", identity.outbox_key) as outbox:
        assert len(outbox.items("skin")) == 1


STEPS = ["next-signing", "next-sealing", "request", "answer", "outbox.key", "changed", "rename-1", "rename-2", "remove"]


def kill_at(step: str, world: Any, patch: Any) -> None:
    """Make the process stop at one step of a change of keys, as kill -9 does: nothing after it happens."""
    from edgefl_exchange import key_change

    class Killed(BaseException):
        pass

    def stop(*_: object) -> Any:
        raise Killed

    write, names = key_change.write_atomic, {"outbox.key", "changed"}

    def writing(path: Path, data: bytes, mode: int = 0o644) -> None:
        if path.name in (step, f"{step}.key"):
            stop()
        write(path, data, mode)

    if step in names or step.startswith("next-"):
        patch.setattr(key_change, "write_atomic", writing)
    elif step == "request":
        world.fault = lambda request: stop() if request.path == "/v1/rotate" else None
    elif step == "answer":

        def cut(request: Request) -> Answer | None:
            if request.path == "/v1/rotate":
                world.answer(request)
                stop()
            return None

        world.fault = cut
    elif step.startswith("rename"):
        renamed: list[Path] = []
        replace = Path.replace

        def replacing(path: Path, target: Path) -> Path:
            if path.name.startswith("next-"):
                renamed.append(path)
                if len(renamed) == int(step[-1]):
                    stop()
            return replace(path, target)

        patch.setattr(Path, "replace", replacing)
    else:
        patch.setattr(key_change, "_remove", stop)


@pytest.mark.parametrize("sleep_ms", [0, OVERLAP_MS + DAY_MS], ids=["at once", "after the overlap"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_step_a_device_has_working_keys(world, monkeypatch, step, sleep_ms) -> None:
    """docs/security.md check 23: killed at each of 9 steps, tried again at once or after the overlap: it speaks."""
    with monkeypatch.context() as patch, pytest.raises(BaseException) as killed:
        kill_at(step, world, patch)
        with world.member() as member:
            member.rotate()
    assert killed.typename == "Killed"
    world.fault = None
    world.now_ms += sleep_ms
    with world.member() as member:
        assert member.task().state == "waiting"
    begun = step not in ("next-signing", "next-sealing")
    with world.coordinator.store.transaction() as connection:
        rotated = connection.exec_driver_sql("SELECT COUNT(*) FROM audit WHERE event = 'keys_rotated'").scalar()
    assert rotated == begun  # a change that was begun is carried to its end before anything else is asked
    with world.member() as member:
        member.rotate()
        assert member.task().state == "waiting"
    assert not [path.name for path in world.device.iterdir() if path.name.startswith("next-") or path.name == "changed"]


def test_no_signed_answer_leaves_both_keys_and_a_refusal_the_old(world) -> None:
    """docs/security.md, order of checks: what anybody could forge changes no state; a refusal ends the change."""
    world.fault = lambda request: Answer(status=401, body=b"") if request.path == "/v1/rotate" else None
    with world.member() as member:
        first = member.identity.signing.key_id
        with pytest.raises(Unavailable):
            member.rotate()
        assert (member.identity.is_changing, member.identity.signing.key_id) == (True, first)
        assert member.task().state == "waiting"  # the change waits, the device works
    world.fault = None
    copied = world.home.root / "copy"
    subprocess.run(["cp", "-a", str(world.device), str(copied)], check=True)  # the same device, restored elsewhere
    with world.member() as member:
        member.rotate()
    (copied / "next-signing.key").unlink()
    with world.member(copied) as stale:
        with pytest.raises(SignedRefusal) as refused:
            stale.rotate()
        assert refused.value.code == "replaced_key" and not stale.identity.is_changing


def test_keys_are_changed_by_themselves_after_thirty_days(world) -> None:
    """docs/guides/federation.md, keys over time: `sync` changes keys that are 30 days old, once."""
    with world.member() as member:
        member.task()
        assert not member.rotate_if_due()
    world.now_ms += ROTATE_AFTER_MS
    with world.member() as member:
        assert member.rotate_if_due() and not member.rotate_if_due()
    assert load_membership(world.device).keys_made_ms == world.now_ms


ROTATING = """
import os, sys
from pathlib import Path
from edgefl_exchange.identity import Identity
print("ready", flush=True)
with Identity(Path(sys.argv[1])) as identity:
    while True:
        identity.begin_change()
        identity.commit_change()
"""


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_kill_9_while_keys_change(world, kills) -> None:
    """docs/security.md check 23: 3 and 30 kills -9 while keys are replaced as fast as can be: both keys always load."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    seen, outbox_keys = set(), set()
    for number in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", ROTATING, str(world.device)], stdout=subprocess.PIPE, env=environment
        )
        assert child.stdout is not None and child.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.12 * (number + 1) / kills)
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        finish_change(world.device)
        with Identity(world.device) as identity:
            seen.add(identity.signing.key_id)
            outbox_keys.add(identity.outbox_key)
            assert identity.next_sequence() >= 1
    assert len(seen) > 1 and len(outbox_keys) == 1


def test_a_membership_of_before_reads_as_it_did(world) -> None:
    """A record without the new fields: no root key is pinned, and the keys' age is unknown, so they are due."""
    path = world.device / "membership.json"
    record = json.loads(path.read_text())
    for name in ("root_key_id", "keys_made_ms", "revoked_version"):
        del record[name]
    path.write_text(json.dumps(record))
    found = load_membership(world.device)
    assert (found.root_key_id, found.keys_made_ms, found.revoked_version) == (None, 0, 0)
    with world.member() as member:
        assert not member.rotate_if_due()  # not approved yet, as far as it knows
        member.task()
        assert member.rotate_if_due()

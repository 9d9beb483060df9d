"""A device killed again and again while it queues and sends. Source: docs/security.md, reliability table, check 56."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The coordinator lives in this process; the device is a fork of it that is killed, at a message or a moment drawn.
SCRIPT = """
import json, os, random, select, signal, sys
from multiprocessing.connection import Pipe
from pathlib import Path

from edgefl_exchange.enrolment import enrol
from edgefl_exchange.member import Member
from edgefl_exchange.outbox import Outbox
from edgefl_protocol import Payload
from tests.exchange.in_memory import NOW_MS, FakeCoordinator, reply_of

root, kills = Path(sys.argv[1]), int(sys.argv[2])
folder = root / "member"
folder.mkdir(mode=0o700)
coordinator = FakeCoordinator()
enrol(folder, coordinator.invite(), coordinator, clock_ms=lambda: NOW_MS, sleep=lambda _: None)
coordinator.approve()


class Wire:
    def __init__(self, pipe):
        self.pipe = pipe

    def send(self, request):
        self.pipe.send(("ask", request))
        return self.pipe.recv()


def device(pipe, last):
    with Member(folder, lambda _: Wire(pipe), clock_ms=lambda: NOW_MS, sleep=lambda _: None) as member:
        with Outbox(root / "outbox.sqlite3", member.identity.outbox_key) as outbox:
            while True:
                member.deliver(outbox, member.task())
                if outbox.count() == 0:
                    pipe.send(("next", None))
                    value = pipe.recv()
                    if value > last:
                        return
                    outbox.put("skin", "reply", reply_of(value).to_bytes(), NOW_MS)
                    pipe.send(("queued", value))


def values():
    return [round(float(Payload.from_bytes(data).arrays["maps.0"][0, 0])) for _, _, data in coordinator.effects]


def run(last, kill_after, when, pause):
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            device(theirs, last)
        finally:
            os._exit(0)
    theirs.close()
    heard = 0
    while True:
        try:
            kind, content = ours.recv()
        except (EOFError, ConnectionResetError):
            break
        heard += 1
        dies = heard == kill_after
        if dies and when == "before":
            os.kill(child, signal.SIGKILL)
        if kind == "ask":
            before = len(coordinator.effects)
            answer = coordinator.send(content)
            coordinator.round += len(coordinator.effects) - before
        elif kind == "next":
            answer = max(values(), default=0) + 1
        else:
            queued.append(content)
        if dies and when == "unanswered":
            os.kill(child, signal.SIGKILL)
        try:
            if kind != "queued":
                ours.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            pass
        if dies and when == "after":
            select.select([], [], [], pause)
            os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    ours.close()


queued, draw = [], random.Random(56)
for number in range(kills):
    when = ("before", "unanswered", "after")[number % 3]
    run(10**6, draw.randint(1, 9), when, draw.uniform(0.0, 0.004))
last = max([*values(), *queued], default=0) + 1
run(last, 10**6, "never", 0.0)
print(json.dumps({"effects": values(), "queued": queued, "last": last}))
"""


@pytest.mark.parametrize(
    "kills", [pytest.param(30, marks=pytest.mark.smaller), pytest.param(200, marks=pytest.mark.slow)]
)
def test_killed_while_queueing_and_sending_nothing_is_lost_and_nothing_comes_twice(tmp_path, kills):
    """docs/security.md check 56: 30 and 200 kills -9: 0 lost items, 0 duplicates at the coordinator."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["effects"] == list(range(1, told["last"] + 1))  # each once, in order, none left out
    assert set(told["queued"]) <= set(told["effects"])
    assert len(told["effects"]) >= 5  # it came somewhere between the kills

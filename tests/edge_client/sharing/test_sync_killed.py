"""A device killed while it learns and answers rounds. Source: docs/security.md, reliability table, checks 56 and 57."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

KILLS, ROUNDS = 30, 6

# The coordinator lives in this process; the device is a fork of it that is killed at a moment drawn.
SCRIPT = """
import datetime, json, os, random, select, signal, sys, threading
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np

from edgefl_exchange.enrolment import enrol
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.home import Home
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table, remember_table
from edgefl_client.trust.models import install
from edgefl_client.sharing.policy import Policy, save_policy
from edgefl_client.sharing.sync import run_sync
from edgefl_client.trust.trusted_keys import add_trusted
from edgefl_protocol import Payload
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.envelopes.keys import PublicSigningKey
from tests.exchange.in_memory import NOW_MS, FakeCoordinator

root, kills, rounds, bundle, signer, table = Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:7]
home, coordinator = Home(root / "home"), FakeCoordinator()
enrol(home.prepare(home.member), coordinator.invite(), coordinator, clock_ms=lambda: NOW_MS, sleep=lambda _: None)
coordinator.approve()
key = PublicSigningKey(bytes.fromhex(signer))
add_trusted(home, key, "signer", datetime.date(2026, 9, 21))
save_policy(home, Policy(allowed={"maps": None}))
data = Path(bundle).read_bytes()
install(home, data, load_bundle(data, [key.public], NOW_MS))
remember_table(home, Table(file=Path(table)))


def open_round(number):
    draw = np.random.default_rng(number)
    maps = {f"maps.{peer}.{label}": draw.random((2, 36)).astype(np.float16) for peer in (0, 1) for label in (0, 1)}
    coordinator.broadcasts[number] = Payload(maps, {"phase": "train", "round": number, "rounds": rounds})
    coordinator.round = number


class Wire:
    def __init__(self, pipe):
        self.pipe = pipe

    def send(self, request):
        self.pipe.send(request)
        return self.pipe.recv()


def run(seconds):
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        device = Device(home=home, connect=lambda folder, membership: Wire(theirs), clock_ms=lambda: NOW_MS)
        done = run_sync(device, TrainOptions(threads=1, checkpoint_seconds=0))
        os._exit(0 if done.problem is None else 3)
    theirs.close()
    killed = threading.Event()
    timer = threading.Timer(seconds, lambda: (killed.set(), os.kill(child, signal.SIGKILL)))
    timer.daemon = True
    if seconds:
        timer.start()
    while True:
        try:
            request = ours.recv()
        except (EOFError, ConnectionResetError):
            break
        before = len(coordinator.effects)
        answer = coordinator.send(request)
        if len(coordinator.effects) > before:
            open_round(coordinator.round + 1)
        try:
            ours.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            pass
    timer.cancel()
    _, status = os.waitpid(child, 0)
    ours.close()
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, status
    return os.WIFSIGNALED(status)


open_round(1)
draw, hit, longest = random.Random(56), 0, 0.6
for number in range(kills):
    killed = run(draw.uniform(0.02, longest))
    hit += killed
    longest *= 1.1 if killed else 0.8  # whatever the machine's pace, most are hit somewhere on the way
while len(coordinator.effects) < rounds:
    run(0)
print(json.dumps({"hit": hit, "effects": [(number, content.hex()) for _, number, content in coordinator.effects]}))
"""


def rounds_of(folder: Path, kills: int, *arguments: object) -> SimpleNamespace:
    """What the coordinator has after rounds in which the device is killed so many times."""
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(folder), str(kills), str(ROUNDS), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(**json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_killed_while_learning_and_answering_each_round_counts_once(
    tmp_path: Path, school: SimpleNamespace, lab: SimpleNamespace
) -> None:
    """docs/security.md checks 56 and 57: 30 kills -9; every round once, with an undisturbed run's bits."""
    bundle = tmp_path / "model.edgefl"
    bundle.write_bytes(school.learning_bytes(epochs=2, kd_weight=0.05))
    given = (bundle, lab.SIGNER.public.hex(), school.table(tmp_path / "pictures", spread=5))
    first, second = tmp_path / "whole", tmp_path / "killed"
    first.mkdir(), second.mkdir()
    whole, killed = rounds_of(first, 0, *given), rounds_of(second, KILLS, *given)
    assert killed.hit >= KILLS // 3
    assert [number for number, _ in killed.effects] == list(range(1, len(killed.effects) + 1))
    assert killed.effects[:ROUNDS] == whole.effects

"""Devices in a live federation: real commands against a real coordinator, over TLS on the loopback interface.

The oracle of the digest is the local engine of the trainer, which never sees a network: it runs the same method over
the devices' own learners (docs/design.md 4: same seed, same digest, whichever engine).
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from edgefl_client.cli import cli
from edgefl_client.home import Home as DeviceHome
from edgefl_client.learning.limits import Limits
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.owned import Table, read_dealt
from edgefl_client.learning.peers import numbered_as, renumbered
from edgefl_client.learning.rounds import Circumstances, PointFile, RoundLearner, learner_for
from edgefl_coordinator import cli as coordinator_cli
from edgefl_coordinator.admin import run_operation
from edgefl_coordinator.settings import Home
from edgefl_coordinator.setup import make_home
from edgefl_protocol import Payload
from edgefl_protocol.bundle import Bundle, load_bundle

DEVICES = ("dermatoscope-1", "dermatoscope-2", "phone.3")
CLASSES = ("NV", "BCC", "MEL")  # the bundle numbers them otherwise
OTHERS = dict(zip(DEVICES, (10 + 15, 10 + 15, 10 + 10), strict=True))  # five maps of each of two or three classes
ROUNDS, EPOCHS, SEED = 2, 2, 7
BACKBONE = {
    "name": "tiny", "image_px": 24, "patch": 4, "depth": 4, "heads": 1, "width": 8,
    "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


def edgefl(home: Path, *words: object) -> dict[str, Any]:
    """A command of a device, with its JSON."""
    done = CliRunner().invoke(cli, [*map(str, words), "--home", str(home), "--json"])
    assert done.exception is None and done.exit_code == 0, (words, done.stderr, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def serving(folder: Path) -> Iterator[Home]:
    """A coordinator in a process of its own, with its aggregation worker in another."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = Home(folder)
    task = {
        "method": "fedevprompt", "name": "all", "classes": list(CLASSES), "epochs": EPOCHS, "seed": SEED,
        "backbone": BACKBONE,
    }  # fmt: skip
    rounds = {
        "count": ROUNDS, "quorum_min": 3, "quorum_target": 3, "deadline_s": 3600, "start": "automatic",
        "min_cohort": 2, "allow_small_cohort": True,
    }  # fmt: skip
    table = {
        "federation": "skin", "public_url": f"https://localhost:{port}", "port": port, "suite": 1, "task": task,
        "rounds": rounds,
    }  # fmt: skip
    make_home(home, table)
    command = [sys.executable, "-m", "edgefl_coordinator.cli", "serve", "--home", str(folder)]
    log = folder / "log"
    with (
        log.open("wb") as sink,
        subprocess.Popen(command, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"}) as run,
    ):
        try:
            until = time.monotonic() + 120
            while "listening" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.05)
            yield home
        finally:
            run.terminate()
    assert run.returncode == 0 and "ERROR" not in log.read_text(), log.read_text()


def wait_for(home: Home, number: int, state: str) -> dict[str, Any]:
    """The coordinator's status, once its round is there."""
    until = time.monotonic() + 240  # the worker imports torch, on a busy machine
    while time.monotonic() < until:
        found: dict[str, Any] = run_operation(home, "status", {})
        if (found["round"], found["state"]) == (number, state):
            return found
        time.sleep(0.3)
    raise AssertionError(f"round {number} did not become {state}: {found}")


@pytest.fixture(scope="module")
def bundle_file(tmp_path_factory: pytest.TempPathFactory, school: SimpleNamespace) -> Path:
    """A bundle of the federation that learns; what others' maps teach is heavy enough to change every bit."""
    file: Path = tmp_path_factory.mktemp("bundle") / "model.edgefl"
    file.write_bytes(school.learning_bytes(kd_weight=0.05, seed=3, epochs=1))
    return file


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, school: SimpleNamespace) -> dict[str, Path]:
    """Every device's own labelled pictures; the third has three classes."""
    folder, three = tmp_path_factory.mktemp("pictures"), ("MEL", "NV", "BCC")
    return {
        name: school.table(folder / name, seed=index, spread=5, classes=three if index == 2 else three[:2])
        for index, name in enumerate(DEVICES)
    }


def join(home: Home, device: Path, name: str, lab: SimpleNamespace, table: Path) -> None:
    """Invite, enrol, compare the fingerprint, approve, allow, trust, pull, name the pictures."""
    text = run_operation(home, "invite", {"name": name, "role": "device", "hours": 1})["invite"]
    fingerprint = edgefl(device, "enrol", text, "--ca", home.tls / "ca.pem", "--suite", 1)["fingerprint"]
    run_operation(home, "approve", {"name": name, "fingerprint": fingerprint})
    for words in (["trust", "add", lab.SIGNER.public.hex()], ["policy", "allow", "maps"]):
        assert CliRunner().invoke(cli, [*words, "--home", str(device)]).exit_code == 0
    edgefl(device, "pull")
    found = edgefl(device, "train", "--labels", table, "--minutes", 1e-9, "--threads", 1)  # alone, apart from rounds
    assert found["state"] == "paused"


@dataclass(frozen=True)
class DeviceSite:
    """A site of the local engine that learns with a device's own step; the engine's numbers are the task's."""

    learner: RoundLearner
    bundle: Bundle

    def local_round(self, state: Any, broadcast: Payload, report: Callable[[Mapping[str, Any]], None]) -> Any:
        from edgefl_trainer.contract import State
        from edgefl_trainer.engine.checkpoint import SiteResult

        theirs = renumbered(broadcast, CLASSES, self.bundle.labels.classes)
        new, reply = self.learner.local_round(state.arrays or self.learner.start(), theirs, report)
        return SiteResult(State(new), numbered_as(reply, self.bundle.labels.classes, CLASSES), {})


def local_digest(folder: Path, bundle: Bundle, tables: Mapping[str, Path]) -> str:
    """`state_sha256` of the local engine over the devices' learners."""
    from edgefl_trainer.contract import Task
    from edgefl_trainer.engine.federation import LocalEngine
    from edgefl_trainer.methods.fedevprompt import FedEvPrompt
    from edgefl_trainer.models.spec import spec_from_facts

    sites = {}
    for name, table in tables.items():
        home = DeviceHome(folder / name)
        dealt = read_dealt(home, bundle, Table(file=table), Limits(), lambda facts: None)
        around = Circumstances(
            points=PointFile(home.learning / "point"), site=name,
            options=TrainOptions(threads=1, epochs=EPOCHS, seed=SEED),
        )  # fmt: skip
        sites[name] = DeviceSite(learner_for(bundle, dealt, around), bundle)
    task = Task(
        name="all", classes=CLASSES, backbone=spec_from_facts(BACKBONE), rounds=ROUNDS, epochs=EPOCHS, seed=SEED
    )
    watching: Any = SimpleNamespace(
        **dict.fromkeys(("phase_started", "site_started", "site_reported", "site_finished"), lambda *facts: None)
    )
    folder.mkdir(exist_ok=True)
    return LocalEngine(method=FedEvPrompt(), task=task, sites=sites, folder=folder, observer=watching).run().digest()


@pytest.mark.slow
def test_a_live_federation_of_devices_ends_with_the_digest_of_the_local_engine(
    tmp_path: Path, lab: SimpleNamespace, bundle_file: Path, tables: dict[str, Path]
) -> None:
    """docs/design.md 4 and 5: three devices, two rounds, one of them stopped after every step of its first round."""
    pytest.importorskip("torch")
    with serving(tmp_path / "coordinator") as home:
        trust = [lab.SIGNER.public.hex()]
        run_operation(home, "publish", {"path": str(bundle_file), "trust": trust})
        devices = {name: tmp_path / f"device-{index}" for index, name in enumerate(DEVICES)}
        for name, device in devices.items():
            join(home, device, name, lab, tables[name])
        for number in range(1, ROUNDS + 1):
            wait_for(home, number, "open")
            for name, device in devices.items():
                pauses = 0
                while name == DEVICES[1] and number == 1 and pauses < 7:  # of eight steps
                    found = edgefl(device, "sync", "--threads", 1, "--minutes", 1e-9)
                    assert found["learning"]["state"] == "paused" and not found["sent"]
                    pauses += 1
                found = edgefl(device, "sync", "--threads", 1)
                assert [one["outcome"] for one in found["sent"]] == ["accepted"]
                assert found["learning"]["state"] == "done" and found["learning"]["round"] == number
                assert found["broadcast"]["maps"] == (0 if number == 1 else OTHERS[name])
                again = edgefl(device, "sync", "--threads", 1)
                assert again["learning"]["state"] == "skipped" and not again["sent"]
        status = wait_for(home, ROUNDS, "done")
        told = CliRunner().invoke(coordinator_cli.main, ["status", "--home", str(home.root)]).stdout
        finals = {name: edgefl(device, "sync")["broadcast"] for name, device in devices.items()}
    bundle = load_bundle(bundle_file.read_bytes(), [lab.SIGNER.public], lab.NOW_MS)
    expected = local_digest(tmp_path / "local", bundle, tables)
    assert status["state_sha256"] == expected and expected in told
    assert all(final["error"] is None and final["maps"] > 0 for final in finals.values())

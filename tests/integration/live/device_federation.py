"""A live federation of devices on the loopback interface, and the same federation in the trainer's local engine.

Live: a coordinator in a process of its own, TLS, and the commands that a person types. Local: the engine that never
sees a network, over sites that learn with the devices' own step.
"""

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner

from edgefl_client.cli import cli
from edgefl_client.home import Home
from edgefl_client.learning.learner_table import learner_for
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table, read_dealt
from edgefl_client.learning.round_learner import Circumstances, PointFile, RoundLearner
from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import load_keys
from edgefl_coordinator.web.admin import run_operation
from edgefl_exchange.identity import Identity
from edgefl_protocol import Payload
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.learning_plan import LearningPlan
from edgefl_protocol.rules.maps import numbered_as_model, numbered_as_task

DEVICES = ("dermatoscope-1", "dermatoscope-2", "phone.3")
ROUNDS, EPOCHS, SEED = 2, 2, 7


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What devices learn together.

    Attributes:
        bundle: its file.
        signer: public key of who signed it.
        method: name.
        classes: of the task, in its order.
        settings: of the task.
        backbone: the task's description of the network.
        kinds: what leaves a device.
        pictures: of each device: a table, or a folder.
    """

    bundle: Path
    signer: bytes
    method: str
    classes: tuple[str, ...]
    settings: Mapping[str, Any]
    backbone: Mapping[str, Any]
    kinds: tuple[str, ...]
    pictures: Mapping[str, Path]

    @property
    def task(self) -> dict[str, Any]:
        """The coordinator's `[task]`."""
        return {
            "method": self.method, "name": "all", "classes": list(self.classes), "epochs": EPOCHS, "seed": SEED,
            "settings": dict(self.settings), "backbone": dict(self.backbone), "travels": list(self.kinds),
            "shares_maps": self.kinds == ("maps",),
        }  # fmt: skip

    def naming(self, device: str) -> tuple[str, Path]:
        """The option that names a device's pictures."""
        found = self.pictures[device]
        return ("--pictures" if found.is_dir() else "--labels"), found


def edgefl(home: Path, *words: object) -> dict[str, Any]:
    """A command of a device, with its JSON."""
    done = CliRunner().invoke(cli, [*map(str, words), "--home", str(home), "--json"])
    assert done.exception is None and done.exit_code == 0, (words, done.stderr, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def serving(folder: Path, task: Mapping[str, Any]) -> Iterator[CoordinatorHome]:
    """A coordinator in a process of its own, with its aggregation worker in another."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = CoordinatorHome(folder)
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
            until = time.monotonic() + 300
            while "listening" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.05)
            yield home
        finally:
            run.terminate()
    assert run.returncode == 0 and "ERROR" not in log.read_text(), log.read_text()


def wait_for(home: CoordinatorHome, number: int, state: str) -> dict[str, Any]:
    """The coordinator's status, once its exchange is there."""
    until = time.monotonic() + 600  # the worker imports torch, on a busy machine
    while time.monotonic() < until:
        found: dict[str, Any] = run_operation(home, "status", {})
        if (found["round"], found["state"]) == (number, state):
            return found
        time.sleep(0.3)  # each look costs the coordinator a handshake: it tries its certificate
    raise AssertionError(f"exchange {number} did not become {state}: {found}")


def secrets_of(home: CoordinatorHome, devices: Iterable[Path]) -> list[bytes]:
    """The coordinator's private keys, and the devices'."""
    keys = load_keys(home)
    found = [keys.signing.seed, keys.sealing.secret, keys.secret]
    for device in devices:
        with Identity(Home(device).member) as identity:
            found += [identity.signing.seed, identity.sealing.secret, identity.outbox_key]
    return found


def assert_nowhere(secrets: Iterable[bytes], files: Iterable[Path]) -> None:
    """Not one of them is in one of the files, as bytes, in hex or in base64."""
    for file in files:
        data = file.read_bytes()
        assert data, file
        for secret in secrets:
            coded = {base64.b64encode(bytes(lead) + secret)[4:-4] for lead in (0, 1, 2)}
            assert not [form for form in (secret, secret.hex().encode(), *coded) if form in data], file


def join(home: CoordinatorHome, device: Path, name: str, federation: Federation) -> str:
    """Invite, enrol, compare the fingerprint, approve, allow, trust, pull; returns the invite."""
    text = run_operation(home, "invite", {"name": name, "role": "device", "hours": 1})["invite"]
    fingerprint = edgefl(device, "enrol", text, "--ca", home.tls / "ca.pem", "--suite", 1)["fingerprint"]
    run_operation(home, "approve", {"name": name, "fingerprint": fingerprint})
    for words in (["trust", "add", federation.signer.hex()], ["policy", "allow", *federation.kinds]):
        assert CliRunner().invoke(cli, [*words, "--home", str(device)]).exit_code == 0
    edgefl(device, "pull")
    return str(text)


@dataclass(frozen=True)
class DeviceSite:
    """A site of the local engine that learns with a device's own step; the engine's numbers are the task's."""

    learner: RoundLearner
    theirs: tuple[str, ...]
    ours: tuple[str, ...]

    def local_round(self, state: Any, broadcast: Payload, report: Callable[[Mapping[str, Any]], None]) -> Any:
        """The device's half of a round."""
        from edgefl_trainer.contract import State
        from edgefl_trainer.engine.checkpoint import SiteResult

        given = Payload(numbered_as_model(broadcast.arrays, self.theirs, self.ours), broadcast.scalars)
        new, reply = self.learner.local_round(state.arrays or self.learner.start(), given, report)
        sent = numbered_as_task(reply.arrays, self.theirs, self.ours)
        return SiteResult(State(new), Payload(sent, reply.scalars), {})


def local_digest(folder: Path, bundle: Bundle, plan: LearningPlan, federation: Federation) -> str:
    """`state_sha256` of the local engine over the devices' learners, which learn as `plan` says."""
    from edgefl_trainer.contract import Task
    from edgefl_trainer.engine.hyper_parameters import build
    from edgefl_trainer.engine.local_engine import LocalEngine
    from edgefl_trainer.methods import METHODS
    from edgefl_trainer.models.spec import spec_from_facts

    bundle, sites = replace(bundle, training=plan), {}
    for name, pictures in federation.pictures.items():
        home = Home(folder / name)
        dealt = read_dealt(home, bundle, Table(file=pictures), LearningLimits(), lambda facts: None)
        around = Circumstances(
            points=PointFile(home.prepare(home.learning) / "point"), site=name,
            options=TrainOptions(threads=1, epochs=EPOCHS, seed=SEED),
        )  # fmt: skip
        sites[name] = DeviceSite(learner_for(bundle, dealt, around), federation.classes, bundle.labels.classes)
    task = Task(
        name="all", classes=federation.classes, backbone=spec_from_facts(federation.backbone), rounds=ROUNDS,
        epochs=EPOCHS, seed=SEED,
    )  # fmt: skip
    watching: Any = SimpleNamespace(
        **dict.fromkeys(("phase_started", "site_started", "site_reported", "site_finished"), lambda *facts: None)
    )
    method = build(METHODS[federation.method], dict(federation.settings))
    engine = LocalEngine(method=method, task=task, sites=sites, folder=folder, observer=watching)
    digest: str = engine.run().digest()
    return digest

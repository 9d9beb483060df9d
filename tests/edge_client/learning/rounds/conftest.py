"""A device that learns the rounds of a federation, with its coordinator in memory."""

import datetime
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgefl_client.home import Home
from edgefl_client.learning.checkpoint import load_standing
from edgefl_client.learning.limits import LearningLimits
from edgefl_client.learning.options import TrainOptions
from edgefl_client.learning.own_pictures import Table, remember_table
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.policy import Policy, save_policy
from edgefl_client.sharing.sync import Synced, run_sync
from edgefl_client.trust.models import install
from edgefl_client.trust.trusted_keys import add_trusted
from edgefl_exchange.enrolment import enrol
from edgefl_protocol import Payload, ReplayWindow
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.payload import digest

STEPS = 4  # 14 pictures that teach, four in a step, one epoch
OPTIONS = TrainOptions(threads=1, checkpoint_seconds=0)
PAUSE = replace(OPTIONS, limits=LearningLimits(minutes=1e-9))


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
        one.stuck = ""
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


@pytest.fixture(scope="session")
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

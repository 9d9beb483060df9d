"""A device that asked nothing between two lives of a round. Source: docs/guides/backup.md 3; docs/decisions/0056."""

from pathlib import Path

from tests.coordinator.backups import backup_of
from tests.coordinator.conftest import maps_payload, toy_worker

from edgefl_client.home import Home
from edgefl_client.sharing.broadcasts import read_broadcast
from edgefl_client.sharing.enrolled_device import Device
from edgefl_client.sharing.sync import run_sync
from edgefl_coordinator.members import restoration
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload


def test_a_round_that_is_done_again_is_learned_from_its_new_broadcast(world, tmp_path: Path) -> None:
    """The backup is of round 1; in round 2 the device gets what another member sent in round 1, each time anew."""
    rounds = {"rounds.quorum_target": "1", "rounds.min_cohort": "0", "rounds.allow_small_cohort": "true"}
    OPERATIONS["set"](world.coordinator, {"changes": rounds})
    home = Home(tmp_path / "home")
    world.join(home.prepare(home.member), "camera-1")
    device = Device(home=home, connect=lambda *_: world, clock_ms=lambda: world.now_ms)
    OPERATIONS["start"](world.coordinator, {})
    assert step(world.coordinator, toy_worker)

    def second_round(seed: int) -> Payload:
        with world.member() as member:
            member.reply(f"work-item-{seed:08}", maps_payload(seed), 1)
        while step(world.coordinator, toy_worker):
            pass
        found = run_sync(device).report
        assert found["round"]["number"] == 2 and found["broadcast"]["maps"] > 0, found
        return read_broadcast(Path(found["broadcast"]["file"]))

    path = backup_of(world.coordinator, tmp_path / "backup")
    first = second_round(1)
    world.coordinator.store.close()
    world.now_ms += 1000
    restoration.restore(path, again := CoordinatorHome(tmp_path / "again"), None, world.now_ms)
    world.coordinator = open_coordinator(again, clock=lambda: world.now_ms)
    second = second_round(2)
    assert first.arrays.keys() == second.arrays.keys() and first != second
    assert all((second.arrays[f"maps.0.{label}"] == maps_payload(2).arrays[f"maps.{label}"]).all() for label in (0, 1))

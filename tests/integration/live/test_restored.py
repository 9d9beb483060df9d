"""GPU sites in a federation whose coordinator is restored from a backup in the middle of a round.

Where no reply was lost, the oracle is the local engine, which never sees a network: same seed, same digest. Rounds that
were lost are learned again, from what a site has learned since; then coordinator and sites agree on how it ended.
Source: docs/security.md check 67, docs/decisions/0056.
"""

import gc
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.live.coordinator import Live
from tests.integration.live.test_sites import DATA, SITES, call, enrol, to_the_end

from edgefl_coordinator.cli import main
from edgefl_coordinator.founding.task import task_of_run
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_trainer.engine import run as engine
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.live import join

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the server in a thread, when it is stopped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Elsewhere(Live):
    """A restored folder, served on the port that members know."""

    def __init__(self, folder: Path, port: int) -> None:
        self.listening = socket.create_server(("127.0.0.1", port))
        self.home = CoordinatorHome(folder)
        self.coordinator = open_coordinator(self.home)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """Gives where a store lies, the file in the folder or a PostgreSQL database of its own."""
    if request.param == "sqlite":
        yield lambda: ""
        return
    from benchmarks.coordinator import postgresql_cluster  # of benchmarks/, which only pytest has on its path

    if postgresql_cluster.programs() is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed (apt-get install postgresql)")
    with postgresql_cluster.running() as cluster:
        yield cluster.database


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "database"), [(0, "sqlite"), (2, "sqlite"), (3, "sqlite"), (2, "postgresql")], indirect=["database"]
)
def test_a_restored_federation_goes_on_to_its_end(lost: int, database: Callable[[], str], tmp_path: Path) -> None:
    """One site replied before the backup; then so many rounds were done that the backup does not know. The third is the
    last hand-out: then the sites have their results, and learn again all the same."""
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"data": (DATA,), "preset": "tiny", "backbone": "tiny", "image_px": 36, "device": "cpu"}
    local = engine.run(resolve("fedevprompt", chosen, None, []), tmp_path / "local", resume=False)
    before = Live(tmp_path / "coordinator", *task_of_run(tmp_path / "local", []), database=database())
    with before.serving():
        for name in SITES:
            enrol(before, tmp_path, name)
        before.move_on()
        join(call(tmp_path / SITES[0], SITES[0]))
        before.coordinator.store.close()  # what `backup` opens itself, as no administration socket is there
        main(["backup", str(tmp_path / "backup"), "--home", str(before.home.root)], standalone_mode=False)
        before.coordinator = open_coordinator(before.home)
    port = before.coordinator.settings.port
    again = Live.__new__(Live)
    again.listening, again.home, again.coordinator = (
        socket.create_server(("127.0.0.1", port)), before.home, before.coordinator
    )  # fmt: skip
    with again.serving():
        for _ in range(lost):
            for name in SITES:
                join(call(tmp_path / name, name))
            again.move_on()
        gone = again.operate("status")
        again.coordinator.store.close()
    where = ["--home", str(tmp_path / "new"), "--database", database()]
    main(["restore", str(tmp_path / "backup"), *where], standalone_mode=False)
    restored = Elsewhere(tmp_path / "new", port)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    try:
        with restored.serving():
            told = restored.operate("status")
            reached = (2, "done") if lost else (1, "open")
            assert [(one["round"], one["state"]) for one in (gone, told)] == [reached, (1, "open")]
            assert [one["replied"] for one in told["members"]] == [True, False]
            found = to_the_end(restored, tmp_path)
            ended = restored.operate("status")["state_sha256"]
    finally:
        restored.coordinator.store.close()
    assert {one["summary"]["state_sha256"] for one in found.values()} == {ended}
    assert (ended == local["state_sha256"]) is (lost == 0)

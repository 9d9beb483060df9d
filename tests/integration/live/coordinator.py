"""A coordinator behind real TLS on the loopback interface, in the test's own process."""

import gc
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.worker import main as work
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.store.tables import rounds as rounds_table
from edgefl_coordinator.web import service
from edgefl_coordinator.web.operations import OPERATIONS


class Live:
    """A coordinator behind real TLS; rounds move on when the test says so."""

    def __init__(self, folder: Path, task: dict[str, Any], rounds: int, database: str = "", **changes: Any) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        port = self.listening.getsockname()[1]
        table = {
            "federation": "skin", "public_url": f"https://127.0.0.1:{port}", "port": port, "suite": 1,
            "database": database,
            "task": {"line": "main", "maps_per_class": 5, **task},
            "rounds": {
                "count": rounds, "quorum_min": 2, "quorum_target": 2, "min_cohort": 1, "allow_small_cohort": True,
                **changes,
            },
        }  # fmt: skip
        self.home = CoordinatorHome(folder)
        make_home(self.home, table)
        self.coordinator: Coordinator = open_coordinator(self.home)

    def stop(self) -> None:
        """Answer no more."""
        self.server.should_exit = self.server.force_exit = True  # connections that are kept alive are not waited for
        self.thread.join(30)
        self.listening.close()
        with warnings.catch_warnings():  # what the server's loop leaves open when it does not wait for its members
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    @contextmanager
    def serving(self) -> Iterator["Live"]:
        """Answer on the port until the end."""
        self.server = uvicorn.Server(service._config(self.coordinator))
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)
        try:
            yield self
        finally:
            self.stop()

    def move_on(self) -> None:
        """Do every job that is due, in this process."""
        while step(self.coordinator, lambda folder, timeout_s: self._work(folder)):
            pass

    def pass_deadline(self) -> None:
        """Let the open round close with what it has."""
        with self.coordinator.store.transaction() as connection:
            connection.execute(rounds_table.update().values(deadline_ms=0))
        self.move_on()

    def operate(self, operation: str, /, **arguments: Any) -> dict[str, Any]:
        return OPERATIONS[operation](self.coordinator, arguments)

    @property
    def ca(self) -> Path:
        return self.home.tls / "ca.pem"

    @staticmethod
    def _work(folder: Path) -> None:
        assert work(folder) == 0

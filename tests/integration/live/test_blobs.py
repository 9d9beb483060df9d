"""A live round whose network is above the cap of an envelope: the command lines, TLS, and no cap lowered.

One wide block of a transformer: 36 MB to send, next to nothing to compute. What a bad network and a kill do to a
blob is in tests/coordinator/payloads, with smaller ones. Source: docs/security.md 2.2; docs/design.md 7 (above 32 MiB a
payload travels as a blob).
"""

import gc
import json
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import uvicorn
from click.testing import CliRunner

from edgefl_coordinator import cli as coordinator_cli
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.worker import main as work
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.web import service
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_exchange.https import HttpsTransport
from edgefl_protocol.envelopes.blob import MAX_INLINE_BYTES
from edgefl_trainer import cli as trainer_cli

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # of the server in a thread, when it is stopped
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NETWORK = "vit:832x1/18"


def typed(commands: click.Command, *words: object) -> str:
    """What a command prints; it ends well."""
    done = CliRunner().invoke(commands, [str(word) for word in words])
    assert done.exception is None and done.exit_code == 0, (words, done.stderr, done.exception)
    return done.stdout


@contextmanager
def serving(folder: Path) -> Iterator[Coordinator]:
    """A coordinator as `init` makes it, answering over TLS."""
    listening = socket.create_server(("127.0.0.1", 0))
    typed(
        coordinator_cli.main, "init", folder, "--federation", "skin", "--method", "fedmae", "--preset", "tiny",
        "--backbone", NETWORK, "--image-px", 36, "--classes", "nevus,other", "--rounds", 1,
        "--port", listening.getsockname()[1], "--members", 1, "--allow-small-cohort",
    )  # fmt: skip
    coordinator = open_coordinator(CoordinatorHome(folder))
    server = uvicorn.Server(service._config(coordinator))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield coordinator
    finally:
        server.should_exit = server.force_exit = True  # connections that are kept alive are not waited for
        thread.join(30)
        listening.close()
        coordinator.store.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def move_on(coordinator: Coordinator) -> None:
    """Do every job that is due, in this process."""

    def run(folder: Path, timeout_s: float) -> None:
        assert work(folder) == 0

    while step(coordinator, run):
        pass


def join(folder: Path, *words: object) -> dict[str, Any]:
    """`edgefl-train join … --once`, with its JSON."""
    data = ("--data", "lesions:sites=1,images=20,px=36", "--device", "cpu", "--once", "--json")
    found: dict[str, Any] = json.loads(typed(trainer_cli.cli, "join", *words, *data, "--out", folder))
    return found


@pytest.mark.slow
def test_a_network_above_the_cap_of_an_envelope_goes_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/design.md 7: a broadcast and a reply above 32 MiB travel as blobs, and the round counts."""
    torch.set_num_threads(1)
    asked: list[str] = []
    send = HttpsTransport.send

    def noted(self: HttpsTransport, request: Any) -> Any:
        asked.append(request.path)
        return send(self, request)

    monkeypatch.setattr(HttpsTransport, "send", noted)
    site = tmp_path / "site"
    with serving(tmp_path / "coordinator") as coordinator:
        invite = OPERATIONS["invite"](coordinator, {"name": "hospital", "role": "site", "hours": 1})["invite"]
        pending = join(site, invite, "--ca", coordinator.store.home.tls / "ca.pem")
        OPERATIONS["approve"](coordinator, {"name": "hospital", "fingerprint": pending["fingerprint"]})
        move_on(coordinator)
        [reply] = join(site)["sent"]
        move_on(coordinator)
        status = OPERATIONS["status"](coordinator, {})
    assert reply["outcome"] == "accepted" and reply["bytes"] > MAX_INLINE_BYTES
    [line] = [json.loads(text) for text in (site / "metrics.jsonl").read_text().splitlines()]
    assert line["bytes_up"] == reply["bytes"] and line["bytes_down"] > MAX_INLINE_BYTES
    assert asked.count("/v1/blob") >= 2 * 2  # of the broadcast and of the reply at least two pieces each
    assert (status["round"], status["refused"], status["problem"]) == (2, [], None)

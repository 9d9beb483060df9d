"""A run whose sites work on Flower's simulation: Ray's worker processes on this machine, as many as are asked for.

Guarantees: engine, checkpoints and results are those of a run in one process, and so are the bits; every site that is
done is on disk before the run goes on, so that a run which ends for any reason resumes with either engine. Each worker
takes one core, and its part of a GPU where the run computes on one. Source: docs/guides/flower.md.
"""

import logging
import math
import os
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from edgefl_protocol import Payload
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.sentences import counted
from edgefl_trainer.contract import Scalar
from edgefl_trainer.engine.checkpoint import SiteResult
from edgefl_trainer.engine.folder import CONFIG, begun_inputs
from edgefl_trainer.engine.local_engine import FederationState, Given, LocalEngine, RunObserver
from edgefl_trainer.engine.run import Drive
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.engine.sites import choose_device
from edgefl_trainer.engine.workers.run_again import check_same
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower import simulated
from edgefl_trainer.flower.asking import Asking, NodeRequest, Silence
from edgefl_trainer.flower.records import MOST_BYTES

OBJECT_STORE_BYTES = 1 << 30  # of Ray, for payloads on their way; what is more goes to the disk
LOOPBACK = "127.0.0.2"  # Ray puts the machine's own address in the place of 127.0.0.1
POLL_S = 0.05
MOST_NAMED = 3  # sites, in a sentence about one of them
WORKING = 2  # requests under way for each worker: one that is done, one that waits


@dataclass(frozen=True)
class SimulatedCrew:
    """The sites of a run at the nodes of a simulation."""

    asking: Asking
    settings: str  # the run's, as TOML
    threads: int
    nodes: Mapping[str, int]  # site → node

    def learn(self, names: Sequence[str], given: Given, observer: RunObserver) -> Iterator[tuple[str, SiteResult]]:
        """Have each site work once on what it is given."""
        for name, found in self._asked("train", names, given, simulated.RESULT):
            result, warnings = simulated.result_of(found)
            observer.site_started(name)  # now: only then the display knows of it
            for warning in warnings:
                observer.site_reported(name, {"warning": warning})
            yield name, result

    def judge(self, names: Sequence[str], given: Given) -> Iterator[tuple[str, Mapping[str, Scalar]]]:
        """Have the current model of each site judged on its tune rows."""
        for name, found in self._asked("evaluate", names, given, ("facts",)):
            yield name, found["facts"].scalars

    def _asked(
        self, kind: str, names: Sequence[str], given: Given, reply: Sequence[str]
    ) -> Iterator[tuple[str, dict[str, Payload]]]:
        def requests() -> Iterable[NodeRequest]:
            for name in names:
                state, broadcast = given(name)
                facts = simulated.facts_of(self.settings, self.threads, site=name)
                asked = {"facts": facts, "state": state.payload(), "broadcast": broadcast}
                yield NodeRequest(name, self.nodes[name], asked)

        for name, found in self.asking.ask(kind, requests(), reply):
            if isinstance(found, Silence):
                raise failure(f"site {name}", found)
            yield name, found


def found_crew(
    asking: Asking, settings: RunSettings, names: Sequence[str], digests: Mapping[str, str]
) -> SimulatedCrew:
    """Ask every node which site it is.

    A `RunError` where a worker reads other rows or another network than this process did.
    """
    text, threads = settings.to_toml(), torch.get_num_threads()
    asked = {"facts": simulated.facts_of(text, threads)}
    while len(found_ids := sorted(asking.grid.get_node_ids())) < len(names):  # they come after the server
        asking.sleep(asking.poll_s)
    requests = [NodeRequest(str(node), node, asked) for node in found_ids]
    nodes = {}
    for node, found in asking.ask("query", requests, ("facts",)):
        if isinstance(found, Silence):
            raise failure(one_of(names), found)
        told = found["facts"].scalars
        check_same(digests, told)
        nodes[str(told["site"])] = int(node)
    if set(nodes) != set(names):
        raise RunError("the data changed while the run began: start it again with another --out.")
    return SimulatedCrew(asking, text, threads, nodes)


def one_of(names: Sequence[str]) -> str:
    """Say that it is one of these sites, before it is known which node is which."""
    more = f" and {counted(len(names) - MOST_NAMED, 'other')}" if len(names) > MOST_NAMED else ""
    return f"one of the sites {', '.join(names[:MOST_NAMED])}{more}"


def failure(who: str, silence: Silence) -> EdgeflError:
    """Say who ended the run, such as `site a`, and why; finished sites are kept."""
    kept = "add --resume to go on: what is finished is kept"
    if silence.trouble is None:
        return RunError(f"{who} has no result: {silence.why}; {kept}.", "worker")
    told = silence.trouble.sentence
    return EdgeflError(told if who.removeprefix("site ") in told else f"{who}: {told}", silence.trouble.code)


def resources(workers: int, gpus: int) -> dict[str, Any]:
    """Return what Ray is given and what each worker takes; a GPU is shared where there are more workers."""
    share = 0.0 if gpus == 0 else 1 / math.ceil(workers / gpus)
    init = {
        "num_cpus": workers,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": LOOPBACK,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }
    return {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": math.floor(share * 1e4) / 1e4}}


@dataclass
class _Outcome:
    """What the server's thread leaves behind, and whether a person asked to stop."""

    final: FederationState | None = None
    error: BaseException | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def sleep(self, seconds: float) -> None:
        """Wait; a `KeyboardInterrupt` once a person asked to stop."""
        if self.stopping.wait(seconds):
            raise KeyboardInterrupt


def on_simulation(settings: RunSettings) -> Drive:
    """Return what drives a run whose sites work on Flower's simulation."""
    return partial(simulate, settings=settings, workers=settings.workers)


def simulate(engine: LocalEngine, settings: RunSettings, workers: int) -> FederationState:
    """Run what is left of the engine's phases with its sites on Flower's simulation.

    Raises:
        EdgeflError: of a site, with its name; or Ray does not start.
    """
    names, outcome = sorted(engine.sites), _Outcome()
    settings = replace(read_settings(engine.folder / CONFIG), device=settings.device)  # with the batch that was fitted
    begun = begun_inputs(engine.folder)
    digests = {name: begun[name] for name in ("partition_sha256", "backbone_sha256")}
    gpus = torch.cuda.device_count() if choose_device(settings.device).type == "cuda" else 0

    def serve(grid: Grid, _: Context) -> None:
        asking = Asking(
            grid=grid, poll_s=POLL_S, most_open=WORKING * workers, most_bytes=MOST_BYTES, sleep=outcome.sleep
        )
        try:
            crew = found_crew(asking, settings, names, digests)
            outcome.final = replace(engine, crew=crew).run()
        except BaseException as error:  # noqa: BLE001 - Flower would end its own way with it
            outcome.error = error

    server = ServerApp()
    server.main()(serve)
    with _quiet(), _guarded(), _stopped_by_hand(outcome):
        try:
            run_simulation(server, simulated.app, len(names), backend_config=resources(workers, gpus))
        except RuntimeError as error:
            if outcome.error is None and outcome.final is None:
                cause = error.__cause__ or error
                raise RunError(f"Flower's simulation did not start or ended early: {cause}.", "worker") from error
    if outcome.error is not None:
        raise outcome.error
    if outcome.final is None:
        raise RunError("Flower's simulation ended before the run did; add --resume to go on.", "worker")
    return outcome.final


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what Flower prints of its own: what it means for a run is told in our words."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _guarded() -> Iterator[None]:
    """Have Ray's processes, which listen on every address, take only who knows a secret drawn for this run."""
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def _stopped_by_hand(outcome: _Outcome) -> Iterator[None]:
    """Let the first Ctrl-C end the server's thread, which Flower waits for; the second acts as ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        outcome.stopping.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""`serve`: uvicorn with TLS and our receive deadline, the administration socket, and the loop that runs the rounds.

Guarantees: a signal ends it after the answers under way; a killed one continues where the store stands. Of several
processes that share a store each answers members, and one *leads*: it runs the rounds, tends the keys, signs and logs
what happens, and listens to the operator. Where it ends, or loses the database, another leads within seconds. A failed
job is tried again after 10 s, then at growing intervals up to 10 minutes. Source: docs/security.md, decisions 7 to 9;
docs/decisions/0058.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.members import coordinator_keys
from edgefl_coordinator.process_memory import RETURN_S, bound_arenas, look_past_what_stands, return_free_memory
from edgefl_coordinator.rounds import stored_rounds
from edgefl_coordinator.rounds.aggregation import RunWorker, step
from edgefl_coordinator.rounds.worker_process import WorkerProcess
from edgefl_coordinator.store import audit, audit_heads
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.admin import serve_admin
from edgefl_coordinator.web.app import make_app
from edgefl_coordinator.web.deadline import deadline_protocol
from edgefl_coordinator.web.door import Door, DoorLoop, ListeningSocket, port_is_taken, raise_descriptors
from edgefl_coordinator.web.log_lines import EventLog
from edgefl_coordinator.web.setting_changes import check_edits, note_edits
from edgefl_coordinator.web.tls import server_context
from edgefl_protocol.errors import EdgeflError, StorageError
from edgefl_protocol.lock_file import is_held, share

log = logging.getLogger("edgefl_coordinator")

_IDLE_S = 0.25  # between two looks at the rounds
_KEYS_S = 60.0  # between two looks at the keys
_RETRY_S = 10.0
_MAX_RETRY_S = 600.0
_BACKLOG = 512
_LEAD_S = 1.0  # between two looks whether this process leads


def serve(coordinator: Coordinator, ready: Callable[[int], None], run_worker: RunWorker | None = None) -> None:
    """Serve until a signal comes.

    Args:
        ready: called with the TCP port once connections are taken.
        run_worker: runs aggregation jobs; None for a process of its own.

    Raises:
        OperatorError: the port is taken, the certificate cannot be used, the signing key is not this coordinator's, or
            a setting was changed by hand that must not be.
    """
    settings = coordinator.settings
    coordinator_keys.check_signing(coordinator)
    check_edits(coordinator)
    raise_descriptors()
    bound_arenas()
    limits, database = settings.limits, coordinator.store.database
    door = Door(limits.connections, limits.connections if settings.proxy_ends_tls else limits.one_address)
    with _listening(coordinator, door) as listening:
        server = _Server(_config(coordinator), ready, listening.getsockname()[1])
        leader = _Leader(coordinator, run_worker)
        if database.lead():
            leader.begin()
        else:
            log.info("another process leads; this one answers members, and leads when that one ends")
        look_past_what_stands()
        with asyncio.Runner(loop_factory=DoorLoop) as runner:
            runner.run(_run(coordinator, server, listening, leader))


class _Leader:
    """What one process does for all of them."""

    def __init__(self, coordinator: Coordinator, run_worker: RunWorker | None) -> None:
        self.coordinator = coordinator
        self.worker = WorkerProcess()
        self._run_worker = run_worker or self.worker
        self._events: EventLog | None = None  # while it leads
        self._admin: asyncio.Server | None = None
        self._socket = 0  # which file it listens on: who leads next puts another in its place
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Say in the audit log that this process leads, and see to the keys.

        An `OperatorError` where the payloads are another copy's by now.
        """
        coordinator = self.coordinator
        coordinator.keep_up()  # who led before may have changed settings since a member last asked this process
        try:
            coordinator.store.lead()
        except StorageError as error:  # of the payloads: whoever holds the lead does what it can without them
            log.warning("what a crash left over was not swept: %s", error)
        settings, events = coordinator.settings, EventLog(coordinator)
        rounds = settings.rounds
        with coordinator.store.transaction() as connection:
            note_edits(connection, coordinator)
            detail = {"min_cohort": rounds.min_cohort, "allow_small_cohort": rounds.allow_small_cohort}
            audit.append(connection, coordinator.clock(), "serve", settings.federation, detail)
            stored_rounds.try_again(connection)  # whoever starts it anew may have mended what failed
            past = stored_rounds.drop_lost(connection)
        coordinator.store.drop_blobs(past)
        coordinator_keys.tend_keys(coordinator)
        coordinator_keys.note_keys(coordinator)
        events.catch_up()  # before "listening", in the order of time
        self._events, coordinator.serving = events, True

    async def start(self) -> None:
        """Do it, where this process leads, until `end`."""
        if self._events is None:
            return
        self._admin = await serve_admin(self.coordinator)
        self._socket = self.coordinator.store.home.socket.stat().st_ino
        works = (
            _run_rounds(self.coordinator, self._run_worker),
            _tend_keys(self.coordinator),
            _sign_log(self.coordinator),
            _log_events(self._events),
        )
        self._tasks = [asyncio.create_task(work) for work in works]

    async def follow(self) -> None:
        """Lead when it falls to this process, and stop where it does not any more."""
        store = self.coordinator.store
        while True:
            await asyncio.sleep(_LEAD_S)
            try:
                leads = await asyncio.to_thread(store.database.lead)
                if leads and self._admin is None:
                    await asyncio.to_thread(self.begin)
                    log.info("this process leads from now on")
                    await self.start()
            except EdgeflError as error:
                log.error("nobody can lead: %s", error, extra={"once_a_minute": True})
                leads = False
            if not leads and self._events is not None:
                log.warning("this process does not lead any more")
                await self.end()

    async def end(self) -> EventLog | None:
        """Stop leading; return the log of events where this process led."""
        for task in self._tasks:
            task.cancel()
        events, self._events, self.coordinator.serving = self._events, None, False
        if self._admin is not None:
            self._admin.close()
            self._admin, path = None, self.coordinator.store.home.socket
            if path.exists() and path.stat().st_ino == self._socket:
                path.unlink(missing_ok=True)
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        return events


class _Server(uvicorn.Server):
    """uvicorn's server that says when it takes connections, and ends quietly."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[int], None], port: int) -> None:
        super().__init__(config)
        self._ready = ready
        self._port = port

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the server; uvicorn would raise them again before we have cleaned up."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report."""
        await super().startup(sockets)
        if not self.should_exit:
            self._ready(self._port)


async def _run(coordinator: Coordinator, server: uvicorn.Server, listening: socket.socket, leader: _Leader) -> None:
    await leader.start()
    beside = [asyncio.create_task(_return_memory())]
    if coordinator.store.database.shared:
        beside.append(asyncio.create_task(leader.follow()))
    try:
        await server.serve(sockets=[listening])
        log.info("the server stops; the federation goes on when it is served again")
    finally:
        for task in beside:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        events = await leader.end()
        leader.worker.stop()
        if events is not None:
            with contextlib.suppress(EdgeflError):
                note_stop(coordinator)
                events.catch_up()
                _sign(coordinator)


def note_stop(coordinator: Coordinator) -> None:
    """Note in the audit log that the server stopped: `status` tells since when none runs."""
    with coordinator.store.transaction() as connection:
        audit.append(connection, coordinator.clock(), "stop", coordinator.settings.federation)


async def _run_rounds(coordinator: Coordinator, run_worker: RunWorker) -> None:
    """Look at the rounds again and again; do what is due."""
    pause_s = _RETRY_S
    while True:
        try:
            done = await asyncio.to_thread(step, coordinator, run_worker)
            pause_s = _RETRY_S
            await asyncio.sleep(0.0 if done else _IDLE_S)
        except EdgeflError as error:
            log.error("the round's job failed and is tried again in %g s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)


async def _return_memory() -> None:
    """Give free memory back to the system, again and again."""
    while True:
        await asyncio.sleep(RETURN_S)
        await asyncio.to_thread(return_free_memory)


async def _log_events(events: EventLog) -> None:
    """Log what happens, as the audit log tells it."""
    while True:
        with contextlib.suppress(EdgeflError):  # of the disk: whoever writes says so
            await asyncio.to_thread(events.catch_up)
        await asyncio.sleep(_IDLE_S)


async def _tend_keys(coordinator: Coordinator) -> None:
    """Renew the sealing key in time, and forget what is past."""
    while True:
        await asyncio.sleep(_KEYS_S)
        try:
            await asyncio.to_thread(coordinator_keys.tend_keys, coordinator)
        except EdgeflError as error:
            log.error("the sealing key was not renewed; next try in %g s: %s", _KEYS_S, error)


async def _sign_log(coordinator: Coordinator) -> None:
    """Sign how far the audit log reaches, now and every hour."""
    while True:
        try:
            await asyncio.to_thread(_sign, coordinator)
        except EdgeflError as error:
            log.error("the audit log was not signed; next try in an hour: %s", error)
        await asyncio.sleep(audit_heads.EACH_S)


def _sign(coordinator: Coordinator) -> None:
    if head := audit_heads.sign(coordinator):
        facts = {"event": "audit_signed", "rows": head.rows, "sha256": head.sha256}
        log.info("the audit log is signed up to row %d, digest %s", head.rows, head.sha256, extra={"facts": facts})


def _config(coordinator: Coordinator) -> uvicorn.Config:
    settings, home = coordinator.settings, coordinator.store.home
    limits = settings.limits
    chain, key = home.root / settings.certificate, home.root / settings.certificate_key
    context = server_context(chain, key)
    config = uvicorn.Config(
        make_app(coordinator),
        http=deadline_protocol(limits.header_deadline_s, limits.body_deadline_s, limits.body_bytes_per_s),
        loop="asyncio",
        ws="none",
        lifespan="off",
        ssl_certfile=str(chain),
        ssl_keyfile=str(key),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=10,
        backlog=_BACKLOG,
    )
    config.load()
    config.ssl = context
    return config


@contextlib.contextmanager
def _listening(coordinator: Coordinator, door: Door) -> Iterator[socket.socket]:
    """Listen, on a shared database beside other processes of this folder; an `OperatorError` where others listen.

    Each holds the folder as long as it listens. The system would deal connections to a stranger as well, such as
    another federation of the same user, or a copy of this one.
    """
    settings, root = coordinator.settings, coordinator.store.home.root
    shared, where = coordinator.store.database.shared, (settings.host, settings.port)
    with contextlib.ExitStack() as until_done:
        if shared and port_is_taken(*where) and not is_held(root, shared=True, unknown=True):
            older = "stop each serve of this coordinator that runs an older version"
            why = f"{os.strerror(errno.EADDRINUSE)}; {older}"
            raise _cannot_listen(*where, why, "if another program has the port")
        if shared:
            with contextlib.suppress(OSError):  # a file system that knows no locks
                until_done.enter_context(share(root))
        yield until_done.enter_context(contextlib.closing(_listen(*where, door, shared=shared)))


def _listen(host: str, port: int, door: Door, *, shared: bool = False) -> socket.socket:
    try:
        return ListeningSocket.open(host, port, _BACKLOG, door, shared=shared)
    except OSError as error:
        raise _cannot_listen(host, port, error.strerror) from error


def _cannot_listen(host: str, port: int, why: str | None, when: str = "for another port") -> OperatorError:
    return OperatorError(
        f"cannot listen on {host} port {port}: {why}; {when}: edgefl-coordinator set port PORT public_url "
        "https://HOST:PORT, with the --home of this coordinator; then make invites anew"
    )

"""The HTTPS application: thin handlers between the guard and the sealed routes.

Guarantees: handlers hold no rule of their own; crypto and store run in bounded pools of threads, so one slow disk does
not stop the event loop, and requests that wait for the same commit share it. Large requests have threads of their own,
so small ones never wait behind them. A sealed answer's HTTP status is the signed `sts`. Whoever gets a 401 connects
anew. Where the store cannot be asked who sends, there is nobody to seal an answer to: 503, try again. Only what the
guard passes arrives here: one of these paths, with its method and its whole body. Routes: docs/security.md, routes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from edgefl_coordinator.commits.crowd import AllCarriedOut, CarriedOut, Crowd
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.bodies import SMALL_BYTES, Application, NotPassed, Receive, Scope, Send
from edgefl_coordinator.web.guard import Guard
from edgefl_coordinator.web.sealed_requests import UNAUTHENTICATED, handle, known_sender
from edgefl_protocol.errors import RecordError, StorageError
from edgefl_protocol.messages.requests import ROUTES, Route
from edgefl_protocol.records.coordinator_records import make_time

log = logging.getLogger("edgefl_coordinator")

Value = TypeVar("Value")

_SMALL = 64  # small requests in crypto or store at once, most of them at the commit; the others wait in bounded memory
_LARGE = 4
_SHORT = frozenset({"reply", "task"})  # routes that read and seal no file: all of them share one thread
_SEALED, _JSON, _TEXT = b"application/octet-stream", b"application/json", b"text/plain; charset=utf-8"


class _Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    media: bytes
    body: bytes


_REFUSAL = _Answer(401, _JSON, UNAUTHENTICATED)  # to whatever fails before its signature is verified


class _App:
    """The ASGI application behind the guard."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.small = ThreadPoolExecutor(_SMALL, thread_name_prefix="request")
        self.large = ThreadPoolExecutor(_LARGE, thread_name_prefix="large-request")
        self.crowd = None if coordinator.store.database.shared else Crowd(coordinator.store.commit, _tell)
        self.sealed = {route.path: route for route in ROUTES.values()}
        self.plain: dict[str, Callable[[Scope], Awaitable[_Answer]]] = {
            "/healthz": self._healthz,
            "/v1/time": self._time,
            "/v1/keys": self._keys,
            "/v1/root": self._root,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self.coordinator.keep_up()
        if scope["method"] == "POST":
            answer = await self._sealed(scope["path"], (await receive())["body"])
        else:
            answer = await self.plain[scope["path"]](scope)
        await _send(send, answer)

    async def known(self, path: str, start: bytes) -> str | None:
        """Say who sends an envelope, by its start; None where that one may not call the path."""
        return await _done(self.small, partial(known_sender, self.coordinator, self.sealed[path], start))

    async def _sealed(self, path: str, body: bytes) -> _Answer:
        route = self.sealed[path]
        work = partial(handle, self.coordinator, route, body)
        if self.crowd is not None and in_one_thread(route, body):
            answer = await _told(_with_others(self.crowd, work))
        else:
            answer = await _done(self.small if len(body) <= SMALL_BYTES else self.large, work)
        return _Answer(answer.status, _SEALED, answer.body) if answer.sealed else _REFUSAL

    async def _healthz(self, _: Scope) -> _Answer:
        return _Answer(200, _TEXT, b"ok\n")

    async def _time(self, scope: Scope) -> _Answer:
        try:
            nonce = _only_nonce(scope["query_string"])
            record = make_time(self.coordinator.keys.signing, nonce, self.coordinator.clock())
        except RecordError as error:
            return _Answer(400, _TEXT, f"{error}\n".encode())
        return _Answer(200, _SEALED, record)

    async def _keys(self, _: Scope) -> _Answer:
        return _Answer(200, _SEALED, self.coordinator.key_record())

    async def _root(self, _: Scope) -> _Answer:
        chain = await _done(self.small, self.coordinator.root_chain)
        return _Answer(200 if chain else 404, _SEALED, chain)


def make_app(coordinator: Coordinator) -> Application:
    """Return the guarded ASGI application of a coordinator."""
    app, limits = _App(coordinator), coordinator.settings.limits
    return Guard(
        app,
        app.known,
        refuse,
        body_bytes=limits.body_bytes,
        waiting_bytes=limits.waiting_bytes,
        per_minute=limits.open_per_minute,
    )


def in_one_thread(route: Route, body: bytes) -> bool:
    """Tell whether a request shares the crowd's thread, where the store has one."""
    return route.cty in _SHORT and len(body) <= SMALL_BYTES


async def refuse(_: Scope, __: Receive, send: Send) -> None:
    """Give the one answer to whatever fails before its signature is verified."""
    await _send(send, _REFUSAL)


async def _done(pool: ThreadPoolExecutor, work: Callable[[], Value]) -> Value:
    """Do work in a pool; `NotPassed` as of `_told`."""
    return await _told(asyncio.get_running_loop().run_in_executor(pool, work))


async def _with_others(crowd: Crowd, work: Callable[[], Value]) -> Value:
    """Have a crowd carry work on."""
    future: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
    crowd.run(work, future)
    return await future


def _tell(done: AllCarriedOut) -> None:
    """Hand outcomes over to the event loops whose futures wait for them, of many at once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], CarriedOut]]] = {}
    for future, outcome in done:
        by_loop.setdefault(future.get_loop(), []).append((future, outcome))
    for loop, found in by_loop.items():
        with contextlib.suppress(RuntimeError):  # it was closed meanwhile
            loop.call_soon_threadsafe(_set, found)


def _set(done: AllCarriedOut) -> None:
    for future, outcome in done:
        if future.done():  # whoever asked is gone
            continue
        if outcome.error is not None:
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome.value)


async def _told(doing: Awaitable[Value]) -> Value:
    """Wait for work; `NotPassed` where the store failed before it was known who asks."""
    try:
        return await doing
    except StorageError as error:
        log.error("storage: %s", error, extra={"once_a_minute": True})
        raise NotPassed(503, "busy") from error


async def _send(send: Send, answer: _Answer) -> None:
    headers = [(b"content-length", str(len(answer.body)).encode()), (b"content-type", answer.media)]
    if answer.status == 401:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _only_nonce(query: bytes) -> str:
    """Return the nonce of the query; a `RecordError` where there is none, or something beside it."""
    items = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    if len(items) != 1 or items[0][0] != "nonce":
        raise RecordError("ask with exactly one parameter, nonce: 16 to 64 characters of base64url")
    return items[0][1]

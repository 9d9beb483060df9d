"""The HTTPS application: thin handlers between the guard and the sealed routes.

Guarantees: handlers hold no rule of their own; crypto and store run in a bounded pool of threads, so one slow disk does
not stop the event loop. Large requests have threads of their own, so small ones never wait behind them. A sealed
answer's HTTP status is the signed `sts`. Whoever gets a 401 connects anew. Routes: docs/security.md, routes.
"""

from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as HttpRoute

from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.bodies import SMALL_BYTES, Application
from edgefl_coordinator.web.guard import Guard
from edgefl_coordinator.web.sealed_requests import UNAUTHENTICATED, handle, known_sender
from edgefl_protocol.errors import RecordError
from edgefl_protocol.messages.requests import ROUTES, Route
from edgefl_protocol.records.coordinator_records import make_time

_WORKERS = 4  # small requests in crypto or store at once, and as many large; others wait in memory, which is bounded
_SEALED = "application/octet-stream"
_BY_PATH = {route.path: route for route in ROUTES.values()}


def make_app(coordinator: Coordinator) -> Application:
    """Return the guarded ASGI application of a coordinator."""
    small, large = anyio.CapacityLimiter(_WORKERS), anyio.CapacityLimiter(_WORKERS)

    def sealed(route: Route) -> HttpRoute:
        async def endpoint(request: Request) -> Response:
            body = await request.body()
            limiter = small if len(body) <= SMALL_BYTES else large
            answer = await anyio.to_thread.run_sync(handle, coordinator, route, body, limiter=limiter)
            return Response(answer.body, status_code=answer.status, media_type=_SEALED) if answer.sealed else refusal()

        return HttpRoute(route.path, endpoint, methods=["POST"])

    async def known(path: str, start: bytes) -> str | None:
        return await anyio.to_thread.run_sync(known_sender, coordinator, _BY_PATH[path], start, limiter=small)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def signed_time(request: Request) -> Response:
        try:
            nonce = _only_nonce(request)
            record = make_time(coordinator.keys.signing, nonce, coordinator.clock())
        except RecordError as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        return Response(record, media_type=_SEALED)

    async def plain_keys(_: Request) -> Response:
        return Response(coordinator.key_record(), media_type=_SEALED)

    async def plain_root(_: Request) -> Response:
        chain = await anyio.to_thread.run_sync(coordinator.root_chain, limiter=small)
        return Response(chain, status_code=200 if chain else 404, media_type=_SEALED)

    plain: list[Any] = [
        HttpRoute("/healthz", healthz, methods=["GET"]),
        HttpRoute("/v1/time", signed_time, methods=["GET"]),
        HttpRoute("/v1/keys", plain_keys, methods=["GET"]),
        HttpRoute("/v1/root", plain_root, methods=["GET"]),
    ]
    limits = coordinator.settings.limits
    app = Starlette(routes=[*plain, *(sealed(route) for route in ROUTES.values())])
    return Guard(
        app,
        known,
        refusal(),
        body_bytes=limits.body_bytes,
        waiting_bytes=limits.waiting_bytes,
        per_minute=limits.open_per_minute,
    )


def refusal() -> Response:
    """Return the one answer to whatever fails before its signature is verified."""
    return Response(UNAUTHENTICATED, 401, {"connection": "close"}, "application/json")


def _only_nonce(request: Request) -> str:
    """Return the nonce of the query; a `RecordError` where there is none, or something beside it."""
    items = request.query_params.multi_items()
    if len(items) != 1 or items[0][0] != "nonce":
        raise RecordError("ask with exactly one parameter, nonce: 16 to 64 characters of base64url")
    return items[0][1]

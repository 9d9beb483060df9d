"""The raw ASGI guard in front of the application: bounds a request before a byte of its body is read.

Guarantees: only listed methods and paths pass (else 404), a query string only on `/v1/time`; a POST needs a
`Content-Length` within the limit (411, 413), no transfer coding (411) and no content coding (415). Of a large body only
the start is read until its clear header is found to name a sender that may call the route (401), and then the rest,
where there is room for it (503). The application sees a body once it is whole. A refused request's body is not read
further: the connection closes. Source: docs/security.md, decision 9 and check 39; RFC 9110, RFC 9112.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from edgefl_coordinator.web.bodies import (
    SMALL_BYTES,
    Application,
    Body,
    Event,
    LargeBodies,
    NotPassed,
    Receive,
    Scope,
    Send,
    SenderGone,
)
from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES
from edgefl_protocol.messages.requests import ROUTES

Known = Callable[[str, bytes], Awaitable[str | None]]  # path, start of an envelope → key id of a sender that may call

PLAIN_PATHS = frozenset({"/healthz", "/v1/time", "/v1/keys", "/v1/root"})
SEALED_PATHS = frozenset(route.path for route in ROUTES.values())
LIMITED_PATHS = frozenset({"/v1/time", "/v1/enrol", "/v1/root"})  # open to anybody who knows the address
_PATH_BYTES = {  # largest body; only a reply and a piece of a blob are large
    "/v1/reply": 32 * 2**20,
    "/v1/blob": MAX_PIECE_BYTES + 64 * 2**10,
    "/v1/enrol": SMALL_BYTES,  # never above: whoever enrols is not known
}
_OTHER_BYTES = 2**20
_MAX_ADDRESSES = 10_000  # remembered: a few megabytes
_MINUTE_S = 60.0


@dataclass
class RateLimit:
    """Counts requests of an address and path, each in minutes of its own.

    Bounded: above `max_addresses` the one that has been silent longest is forgotten, so a flood of new addresses frees
    nobody who keeps asking. Each request costs the same, however many addresses there are.
    """

    per_minute: int
    clock: Callable[[], float] = time.monotonic
    max_addresses: int = _MAX_ADDRESSES
    _counts: OrderedDict[tuple[str, str], tuple[float, int]] = field(default_factory=OrderedDict)

    def allows(self, address: str, path: str) -> bool:
        """Count one request and tell whether it is within the limit."""
        now, key = self.clock(), (address, path)
        since, count = self._counts.get(key, (now, 0))
        if now - since >= _MINUTE_S:
            since, count = now, 0
        self._counts[key] = (since, count + 1)
        self._counts.move_to_end(key)
        if len(self._counts) > self.max_addresses:
            self._counts.popitem(last=False)
        return count < self.per_minute


class Guard:
    """ASGI middleware; see the module's guarantees."""

    def __init__(
        self,
        app: Application,
        known: Known,
        refusal: Application,
        *,
        body_bytes: int,
        waiting_bytes: int,
        per_minute: int,
    ) -> None:
        """Wrap an application.

        Args:
            known: says who sends an envelope, by its clear header; None where that one may not call the path.
            refusal: answers whoever is not known.
            body_bytes: largest body on any path.
            waiting_bytes: of large bodies that are read or worked on at once, over all requests.
            per_minute: requests of one address to each path that needs no membership.
        """
        self.app = app
        self.known = known
        self.refusal = refusal
        self.body_bytes = body_bytes
        self.large = LargeBodies(waiting_bytes)
        self.rate = RateLimit(per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = Body(receive, self._check(scope))
            if body.length <= SMALL_BYTES:
                await self.app(scope, _replay(await body.rest(), receive), send)
                return
            sender = await self.known(scope["path"], await body.first())
            if sender is None:
                await self.refusal(scope, receive, send)
                return
            with self.large.held(sender, body) as place:
                await self.app(scope, _replay(await place.read(), receive), send)
        except NotPassed as answer:
            await _answer(send, answer)
        except SenderGone:
            return

    def _check(self, scope: Scope) -> int:
        """Return the length of the body that may be read; `NotPassed` where the request does not pass."""
        method, path = scope["method"], scope["path"]
        allowed = PLAIN_PATHS if method == "GET" else SEALED_PATHS if method == "POST" else frozenset[str]()
        if path not in allowed or (scope["query_string"] and path != "/v1/time"):
            raise NotPassed(404, "not found")
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        if headers.get(b"transfer-encoding") or (method == "POST" and not headers.get(b"content-length")):
            raise NotPassed(411, "length required")
        if any(value.strip().lower() != b"identity" for value in headers.get(b"content-encoding", [])):
            raise NotPassed(415, "no content coding is supported")
        lengths = headers.get(b"content-length", [b"0"])
        if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 12:
            raise NotPassed(400, "bad content length")
        length = int(lengths[0])
        if length > (min(self.body_bytes, longest_body(path)) if method == "POST" else 0):
            raise NotPassed(413, "too large")
        client = scope.get("client")
        if path in LIMITED_PATHS and not self.rate.allows(client[0] if client else "", path):
            raise NotPassed(503, "busy")
        return length


def longest_body(path: str) -> int:
    """Return the bytes of the largest body that a sealed path takes, whatever the settings allow."""
    return _PATH_BYTES.get(path, _OTHER_BYTES)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body once, then what really comes."""
    pending: list[Event] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Event:
        return pending.pop() if pending else await receive()

    return again


async def _answer(send: Send, refused: NotPassed) -> None:
    body = refused.reason.encode() + b"\n"
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refused.status == 503:
        headers.append((b"retry-after", b"2"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

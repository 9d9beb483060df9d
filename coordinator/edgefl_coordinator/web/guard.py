"""The raw ASGI guard in front of the framework: bounds a request before a byte of its body is read.

Guarantees: only listed methods and paths pass (else 404), a query string only on `/v1/time`; a POST needs a
`Content-Length` within the limit (411, 413), no transfer coding (411) and no content coding (415); its whole body is in
memory, within a total for all requests (503), before the framework sees it. A refused request's body is never read: the
connection closes. Source: docs/security.md, decision 9 and check 39; RFC 9110, RFC 9112.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES
from edgefl_protocol.messages.requests import ROUTES

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PLAIN_PATHS = frozenset({"/healthz", "/v1/time", "/v1/keys", "/v1/root"})
SEALED_PATHS = frozenset(route.path for route in ROUTES.values())
LIMITED_PATHS = frozenset({"/v1/time", "/v1/enrol", "/v1/root"})  # open to anybody who knows the address
_PATH_BYTES = {  # largest body; only a reply and a piece of a blob are large
    "/v1/reply": 32 * 2**20,
    "/v1/blob": MAX_PIECE_BYTES + 64 * 2**10,
    "/v1/enrol": 64 * 2**10,
}
_OTHER_BYTES = 2**20
_MAX_ADDRESSES = 10_000  # remembered: a few megabytes
_MINUTE_S = 60.0


class NotPassed(Exception):
    """The request does not pass; `status` and `reason` are the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


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

    def __init__(self, app: Application, *, body_bytes: int, waiting_bytes: int, per_minute: int) -> None:
        """Wrap an application.

        Args:
            body_bytes: largest body on any path.
            waiting_bytes: bytes of bodies that have arrived and are held at once, over all requests.
            per_minute: requests of one address to each path that needs no membership.
        """
        self.app = app
        self.body_bytes = body_bytes
        self.waiting_bytes = waiting_bytes
        self.rate = RateLimit(per_minute)
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        held = 0

        async def counted() -> Event:
            nonlocal held
            event = await receive()
            arrived = len(event.get("body", b""))
            held += arrived
            self._waiting += arrived
            if self._waiting > self.waiting_bytes:
                raise NotPassed(503, "busy")
            return event

        try:
            body = await _read(counted, self._check(scope))
            if body is not None:
                await self.app(scope, _replay(body, receive), send)
        except NotPassed as answer:
            await _answer(send, answer)
        finally:
            self._waiting -= held

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
        if length > (min(self.body_bytes, _PATH_BYTES.get(path, _OTHER_BYTES)) if method == "POST" else 0):
            raise NotPassed(413, "too large")
        client = scope.get("client")
        if path in LIMITED_PATHS and not self.rate.allows(client[0] if client else "", path):
            raise NotPassed(503, "busy")
        return length


async def _read(receive: Receive, length: int) -> bytes | None:
    """Read exactly `length` bytes, or return None where the sender went away."""
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        body += event.get("body", b"")
        if len(body) > length:
            raise NotPassed(400, "bad content length")
        if not event.get("more_body", False):
            break
    if len(body) != length:
        raise NotPassed(400, "bad content length")
    return bytes(body)


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

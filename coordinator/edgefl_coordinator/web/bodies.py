"""Room in memory for request bodies, and how a body is read into it.

Guarantees: a body of at most `SMALL_BYTES` needs no room, so it never waits behind larger ones; how many there are at
once is bounded by the connections. A larger one is read only once there is room for its whole announced length, among
all senders and within one sender's quarter; else it gets a 503, unread. Source: docs/security.md 5, checks 39 and 45.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("edgefl_coordinator")

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

SMALL_BYTES = 64 * 2**10
HEAD_BYTES = 4 * 2**10  # more than an envelope's clear header and all that stands before its payload
_OF_ONE = 4  # a sender's share of the room is one such part


class NotPassed(Exception):
    """The request does not pass; `status` and `reason` are the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class SenderGone(Exception):
    """The sender went away before its body was whole."""


class LargeBodies:
    """Memory for large bodies."""

    def __init__(self, most: int) -> None:
        """Set how many bytes all of them may announce together."""
        self.most = most
        self._held = Counter[str]()  # sender → bytes

    @contextmanager
    def held(self, sender: str, length: int) -> Iterator[None]:
        """Keep room for a body of a sender; its first may take more than its share. `NotPassed` where there is none."""
        mine = self._held[sender]
        if self._held.total() + length > self.most or (mine and mine + length > self.most // _OF_ONE):
            log.warning("no room for more large requests (limits.waiting_bytes): senders are told to come again",
                        extra={"once_a_minute": True})  # fmt: skip
            raise NotPassed(503, "busy")
        self._held[sender] += length
        try:
            yield
        finally:
            self._held[sender] -= length
            if not self._held[sender]:
                del self._held[sender]


class Body:
    """A body that is read in two parts, up to its announced length."""

    def __init__(self, receive: Receive, length: int) -> None:
        self.length = length
        self._receive = receive
        self._memory = bytearray()
        self._arrived = 0
        self._whole = False

    async def first(self) -> bytes:
        """Read as much as shows the clear header of an envelope."""
        while self._arrived < HEAD_BYTES and not self._whole:
            await self._step()
        return bytes(self._memory[:HEAD_BYTES])

    async def rest(self) -> bytes:
        """Read all of it, once; it is not kept here."""
        if self.length > SMALL_BYTES:  # all of its memory at once: what grows takes more than it needs
            self._memory += bytes(self.length - len(self._memory))
        while not self._whole:
            await self._step()
        whole, self._memory = bytes(self._memory), bytearray()
        return whole

    async def _step(self) -> None:
        event = await self._receive()
        if event["type"] == "http.disconnect":
            raise SenderGone
        part, self._whole = event.get("body", b""), not event.get("more_body", False)
        until = self._arrived + len(part)
        if until > self.length or (self._whole and until < self.length):
            raise NotPassed(400, "bad content length")
        self._memory[self._arrived : until] = part
        self._arrived = until

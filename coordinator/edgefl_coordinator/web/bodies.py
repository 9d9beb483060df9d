"""Room in memory for request bodies, and how a body is read into it.

Guarantees: a body of at most `SMALL_BYTES` needs no room, so it never waits behind larger ones; how many there are at
once is bounded by the connections. A larger one is read only once there is room for its whole announced length, among
all senders and within one sender's quarter; else it gets a 503, unread. Where the room is full, the slowest give way to
who comes, so few cannot keep it by sending slowly. Source: docs/security.md 5, checks 39 and 45; docs/decisions/0059.
"""

import asyncio
import logging
import time
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
_GRACE_S = 5.0  # a body that has come for less has no pace yet
_MOST_S = 60.0  # a body that takes no longer as a whole gives way to nobody


class NotPassed(Exception):
    """The request does not pass; `status` and `reason` are the answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class SenderGone(Exception):
    """The sender went away before its body was whole."""


class Place:
    """The room that one large body has."""

    def __init__(self, sender: str, body: "Body", since: float) -> None:
        self.sender = sender
        self.body = body
        self.since = since
        self._reading: asyncio.Timeout | None = None
        self._given_away = False

    async def read(self) -> bytes:
        """Read the body; `NotPassed` where its room was given to another one meanwhile."""
        try:
            async with asyncio.timeout(None) as self._reading:
                whole = await self.body.rest()
        except TimeoutError:
            raise NotPassed(503, "busy") from None
        finally:
            self._reading = None
        if self._given_away:  # in the very moment in which its last part came
            raise NotPassed(503, "busy")
        return whole

    def takes_s(self, now: float) -> float:
        """Return how long it takes as a whole, at its pace; 0 where it has come, or only just begins."""
        if self._reading is None or now - self.since < _GRACE_S:
            return 0.0
        return (now - self.since) * self.body.length / max(1, self.body.arrived)

    def give_away(self) -> None:
        """Stop reading."""
        self._given_away = True
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())


class LargeBodies:
    """Memory for large bodies."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Set how many bytes all of them may announce together."""
        self.most = most
        self._clock = clock
        self._held: list[Place] = []

    @contextmanager
    def held(self, sender: str, body: "Body") -> Iterator[Place]:
        """Keep room for a body of a sender; its first may take more than its share. `NotPassed` where there is none."""
        mine = sum(one.body.length for one in self._held if one.sender == sender)
        if (mine and mine + body.length > self.most // _OF_ONE) or not self._made_room(body.length):
            log.warning("no room for more large requests (limits.waiting_bytes): senders are told to come again",
                        extra={"once_a_minute": True})  # fmt: skip
            raise NotPassed(503, "busy")
        place = Place(sender, body, self._clock())
        self._held.append(place)
        try:
            yield place
        finally:
            if place in self._held:  # nobody else has its room yet
                self._held.remove(place)

    def _made_room(self, length: int) -> bool:
        """Have the slowest give way until there is room for so many bytes; nobody does where that is not enough."""
        missing, now = sum(one.body.length for one in self._held) + length - self.most, self._clock()
        slow = [(takes_s, one) for one in self._held if (takes_s := one.takes_s(now)) > _MOST_S]
        leaving = list[Place]()
        for _, one in sorted(slow, key=lambda found: -found[0]):
            if missing > 0:
                leaving.append(one)
                missing -= one.body.length
        if missing > 0:
            return False
        for one in leaving:
            one.give_away()
            self._held.remove(one)
        return True


class Body:
    """A body that is read in two parts, up to its announced length."""

    def __init__(self, receive: Receive, length: int) -> None:
        self.length = length
        self._receive = receive
        self._memory = bytearray()
        self.arrived = 0  # bytes
        self._whole = False

    async def first(self) -> bytes:
        """Read as much as shows the clear header of an envelope."""
        while self.arrived < HEAD_BYTES and not self._whole:
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
        until = self.arrived + len(part)
        if until > self.length or (self._whole and until < self.length):
            raise NotPassed(400, "bad content length")
        self._memory[self.arrived : until] = part
        self.arrived = until

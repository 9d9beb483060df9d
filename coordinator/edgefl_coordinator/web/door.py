"""The door: which connections are taken at all, before a byte of TLS is spent on them.

Whoever connects *knocks* until TLS and the first byte of HTTP are through, and is *in* from then on. Guarantees: at
most so many knock and are in at once, in all and from one address; the others are closed unheard. Where all places of
those who knock are taken, the address that holds most of them gives its oldest one to who comes. A handshake ends after
`HANDSHAKE_S`. So silent sockets do not fill the memory; and from however few addresses they come and come again, who
comes from another one gets in. Small packets leave at once (TCP_NODELAY). Source: docs/security.md 5, checks 39 and 40.
"""

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import logging
import resource
import socket
from asyncio import sslproto
from collections import Counter
from typing import Any, Protocol, Self

log = logging.getLogger("edgefl_coordinator")

HANDSHAKE_S = 10.0
MOST_KNOCKING = 256
KNOCKING_OF_ONE = 32  # of one address
_DESCRIPTORS = 65_536
_TLS_BYTES = 32 * 2**10  # that a connection reads at once, in a buffer of its own; asyncio's is 256 KiB


class Knocking(Protocol):
    """One who knocks."""

    def give_way(self) -> None:
        """Go; it is counted no more."""


class Door:
    """Counts who knocks and who is in, by address; of IPv6 by /64, which is what one subscriber has."""

    def __init__(self, connections: int, one_address: int) -> None:
        """Set the bounds.

        Args:
            connections: how many may be in at once.
            one_address: how many of them from one address; at `connections`, such as behind a proxy, which is one
                address for everybody, nobody is bounded by address.
        """
        self.connections = connections
        self.one_address = one_address
        self.knocking: dict[str, dict[Knocking, int]] = {}  # address → who knocks, the oldest first → its number
        self.inside: Counter[str] = Counter()
        self._bounded = one_address < connections
        self._numbers = itertools.count()  # of those who knocked

    def knock(self, one: Knocking, address: str) -> bool:
        """Count one who connects, and tell whether there is room for it; another one may have to give way."""
        held = len(self.knocking.get(address, ()))
        room = (
            not (self._bounded and held >= KNOCKING_OF_ONE)
            and self.inside.total() < self.connections
            and self.inside[address] < self.one_address
        )
        full = room and sum(map(len, self.knocking.values())) >= MOST_KNOCKING
        if full:
            self._make_room(address)
        if full or not room:
            log.warning("more connections at once than limits.connections and the door allow: some are closed unheard",
                        extra={"once_a_minute": True})  # fmt: skip
        if room:
            self.knocking.setdefault(address, {})[one] = next(self._numbers)
        return room

    def enter(self, one: Knocking, address: str) -> None:
        """Count one who knocked as one who is in."""
        self._stops_knocking(one, address)
        self.inside[address] += 1

    def leave(self, one: Knocking, address: str, *, inside: bool) -> None:
        """Count one less of those who are in, or who knock."""
        if not inside:
            self._stops_knocking(one, address)
            return
        self.inside[address] -= 1
        if self.inside[address] <= 0:
            del self.inside[address]

    def _make_room(self, newcomer: str) -> None:
        """Let the oldest one give way of the address that holds most, the newcomer counted; of several, the oldest.

        The newcomer counts, so an address that has its share takes from itself, and not from another's only one.
        """

        def holds(address: str) -> tuple[int, int]:
            its = self.knocking[address]
            return len(its) + (address == newcomer), -next(iter(its.values()))

        address = max(self.knocking, key=holds)
        oldest = next(iter(self.knocking[address]))
        self._stops_knocking(oldest, address)
        oldest.give_way()

    def _stops_knocking(self, one: Knocking, address: str) -> None:
        del self.knocking[address][one]
        if not self.knocking[address]:
            del self.knocking[address]


def counted_address(address: str) -> str:
    """Return what an address is counted as: IPv6 as its /64, IPv4 that is written as IPv6 as IPv4."""
    found = ipaddress.ip_address(address)
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> 64 << 64))


def port_is_taken(host: str, port: int) -> bool:
    """Tell whether another program has this address now; False where that cannot be told. Nobody can connect here."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


class ListeningSocket(socket.socket):
    """A listening socket that closes who finds no room, and accepts the others as a `Visitor`."""

    door: Door

    @classmethod
    def open(cls, host: str, port: int, backlog: int, door: Door, *, shared: bool = False) -> Self:
        """Listen; an `OSError` where the address cannot be had.

        Where it is `shared` the system deals connections to all processes of this user that listen so.

        Its protocol is named, and not 0: only then asyncio sets TCP_NODELAY, without which each answer on a kept
        connection waits 40 ms for an acknowledgement.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = cls(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listening.bind((host, port))
            listening.listen(backlog)
        except OSError:
            listening.close()
            raise
        listening.door = door
        return listening

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next one; a `ConnectionAbortedError`, as of one who left again, where there is no room for it."""
        descriptor, address = self._accept()  # type: ignore[attr-defined]  # of `socket.socket`, which wraps it alike
        visitor, counted = Visitor(self.family, self.type, self.proto, fileno=descriptor), counted_address(address[0])
        if not self.door.knock(visitor, counted):
            visitor.close()
            raise ConnectionAbortedError
        visitor.knocks(self.door, counted)
        return visitor, address


class Visitor(socket.socket):
    """A connection that knows whether it still knocks."""

    _door: Door | None = None
    _address = ""
    _inside = False

    def knocks(self, door: Door, address: str) -> None:
        """Remember where it is counted."""
        self._door, self._address = door, address

    def comes_in(self) -> None:
        """Count it as one who is in."""
        if self._door is not None and not self._inside:
            self._inside = True
            self._door.enter(self, self._address)

    def give_way(self) -> None:
        """End it for another one's sake; the loop, which holds its descriptor, then reads the end and closes it."""
        self._door = None
        with contextlib.suppress(OSError):  # it is gone already
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it; it is counted no more."""
        door, self._door = self._door, None
        if door is not None:
            door.leave(self, self._address, inside=self._inside)
        super().close()


class DoorLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with our deadline of a TLS handshake, which is a minute there, and smaller buffers.

    Threads that are done at once, as after a commit, wake it once.
    """

    _woken = False

    def _write_to_self(self) -> None:
        if not self._woken:  # else it is about to look at what was handed over, this too
            self._woken = True
            super()._write_to_self()  # type: ignore[misc]

    def _process_self_data(self, data: bytes) -> None:
        self._woken = False
        super()._process_self_data(data)  # type: ignore[misc]

    def _make_ssl_transport(self, *args: Any, **given: Any) -> asyncio.Transport:
        if given.get("waiter") is not None:
            given["waiter"].add_done_callback(self._let_go)
        return super()._make_ssl_transport(*args, **given)  # type: ignore[misc, no-any-return]

    def _let_go(self, handshake: asyncio.Future[None]) -> None:
        """Free a connection whose handshake failed: asyncio's frames and its error hold each other, and with them some
        50 KiB until Python looks for such circles, which thousands of connections do not make it do."""
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            self.call_soon(error.with_traceback, None)  # once asyncio has caught it

    async def create_server(self, *args: Any, **given: Any) -> Any:
        """Listen as asyncio does."""
        if given.get("ssl") is not None:
            given["ssl_handshake_timeout"] = HANDSHAKE_S
            sslproto.SSLProtocol.max_size = _TLS_BYTES
        return await super().create_server(*args, **given)


def let_in(transport: asyncio.BaseTransport) -> None:
    """Say that a connection is past TLS and speaks HTTP."""
    found = transport.get_extra_info("socket")
    visitor = getattr(found, "_sock", found)  # asyncio hands out a wrapper
    if isinstance(visitor, Visitor):
        visitor.comes_in()


def bound_buffer(transport: asyncio.BaseTransport) -> None:
    """Let what nobody reads of a TLS connection wait in the kernel; asyncio would take 256 KiB more of it."""
    if isinstance(transport, sslproto._SSLProtocolTransport):
        transport.set_read_buffer_limits(1)


def raise_descriptors() -> None:
    """Allow this process as many open files as the system lets it have, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

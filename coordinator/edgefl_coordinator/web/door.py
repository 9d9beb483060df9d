"""The door: which connections are taken at all, before a byte of TLS is spent on them.

Whoever connects *knocks* until TLS and the first byte of HTTP are through, and is *in* from then on. Guarantees: at
most so many knock and are in at once, in all and from one address; the others are closed unheard. A handshake ends
after `HANDSHAKE_S`. So a thousand silent sockets neither fill the memory nor keep out who comes from elsewhere. Small
packets leave at once (TCP_NODELAY). Source: docs/security.md 5, checks 39 and 40.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import resource
import socket
from asyncio import sslproto
from collections import Counter
from typing import Any, Self

log = logging.getLogger("edgefl_coordinator")

HANDSHAKE_S = 10.0
MOST_KNOCKING = 256
KNOCKING_OF_ONE = 32  # of one address
_DESCRIPTORS = 65_536
_M_ARENA_MAX = -8  # glibc, malloc.h
_TLS_BYTES = 32 * 2**10  # that a connection reads at once, in a buffer of its own; asyncio's is 256 KiB


class Door:
    """Counts who knocks and who is in, by address."""

    def __init__(self, connections: int, one_address: int) -> None:
        """Set the bounds.

        Args:
            connections: how many may be in at once.
            one_address: how many of them from one address; at `connections`, such as behind a proxy, which is one
                address for everybody, nobody is bounded by address.
        """
        self.connections = connections
        self.one_address = one_address
        self.knocking_of_one = MOST_KNOCKING if one_address >= connections else KNOCKING_OF_ONE
        self.knocking: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self.turned_away = 0

    def knock(self, address: str) -> bool:
        """Count one who connects, and tell whether there is room for it."""
        room = (
            self.knocking.total() < MOST_KNOCKING
            and self.knocking[address] < self.knocking_of_one
            and self.inside.total() < self.connections
            and self.inside[address] < self.one_address
        )
        if room:
            self.knocking[address] += 1
        else:
            self.turned_away += 1
        return room

    def enter(self, address: str) -> None:
        """Count one who knocked as one who is in."""
        _less(self.knocking, address)
        self.inside[address] += 1

    def leave(self, address: str, *, inside: bool) -> None:
        """Count one less of those who are in, or who knock."""
        _less(self.inside if inside else self.knocking, address)


def _less(counts: Counter[str], address: str) -> None:
    counts[address] -= 1
    if counts[address] <= 0:
        del counts[address]


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
        visitor = Visitor(self.family, self.type, self.proto, fileno=descriptor)
        if not self.door.knock(address[0]):
            visitor.close()
            log.warning("more connections at once than limits.connections and the door allow: some are closed unheard",
                        extra={"once_a_minute": True})  # fmt: skip
            raise ConnectionAbortedError
        visitor.knocks(self.door, address[0])
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
            self._door.enter(self._address)

    def close(self) -> None:
        """Close it; it is counted no more."""
        door, self._door = self._door, None
        if door is not None:
            door.leave(self._address, inside=self._inside)
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


def bound_arenas() -> None:
    """Let all threads share two of the C library's arenas; each of up to sixteen would keep what it once held.

    Where there is no glibc nothing changes.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def raise_descriptors() -> None:
    """Allow this process as many open files as the system lets it have, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""The door: silent sockets, slow handshakes, small packets. Source: docs/security.md 5, checks 39 and 40."""

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_coordinator.web import door
from edgefl_coordinator.web.door import KNOCKING_OF_ONE, MOST_KNOCKING, Door, DoorLoop, ListeningSocket
from edgefl_coordinator.web.tls import make_development_certificate, server_context

STEP = st.tuples(st.sampled_from(["knock", "knock", "knock", "enter", "leave"]), st.sampled_from(["a", "b", "c", "d"]))


class Someone:
    """One who knocks at a door that no socket belongs to."""

    def __init__(self, address: str) -> None:
        self.address, self.inside, self.gone = address, False, False

    def give_way(self) -> None:
        self.gone = True


def knocks(at: Door, address: str) -> Someone | None:
    """Somebody new who knocks; None where there is no room."""
    one = Someone(address)
    return one if at.knock(one, address) else None


def expected_to_go(silent: list[Someone], newcomer: str) -> Someone:
    """The oldest of those whose address holds most, the newcomer counted."""
    held = Counter([one.address for one in silent] + [newcomer])
    most = max(held[one.address] for one in silent)
    return next(one for one in silent if held[one.address] == most)


@given(st.lists(STEP, min_size=40, max_size=200), st.integers(1, 40))
def test_the_counts_are_those_of_who_is_there(steps, connections) -> None:
    """Against a plain list of who is there, the oldest first: bounds hold after each step, the right one gives way, and
    nobody is counted who left. There are ten places for those who knock, four of one address."""
    found, there = Door(connections, max(connections // 2, 1)), list[Someone]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(door, "MOST_KNOCKING", 10)
        patched.setattr(door, "KNOCKING_OF_ONE", 4 if found.one_address < connections else 10**6)
        for step, address in steps:
            its = [one for one in there if one.address == address]
            silent = [one for one in there if not one.inside]
            if step == "knock" and (new := knocks(found, address)):
                goes = expected_to_go(silent, address) if len(silent) == 10 else None
                assert [one for one in there if one.gone] == ([goes] if goes else [])
                there = [one for one in there if one is not goes] + [new]
            elif step == "enter" and (one := next((one for one in its if not one.inside), None)):
                found.enter(one, address)
                one.inside = True
            elif step == "leave" and its:
                there.remove(its[0])
                found.leave(its[0], address, inside=its[0].inside)
            counts = Counter((one.address, one.inside) for one in there)
            assert {one: len(held) for one, held in found.knocking.items()} == {
                one: count for (one, inside), count in counts.items() if not inside
            }
            assert found.inside == {one: count for (one, inside), count in counts.items() if inside}
            assert sum(map(len, found.knocking.values())) <= 10
            assert all(len(held) <= door.KNOCKING_OF_ONE for held in found.knocking.values())
    for one in there:
        found.leave(one, one.address, inside=one.inside)
    assert not found.knocking and not found.inside


def test_one_address_leaves_room_for_others() -> None:
    found = Door(10, 5)
    of_a = [one for _ in range(40) if (one := knocks(found, "a"))]
    assert len(of_a) == KNOCKING_OF_ONE
    for one in of_a[:5]:
        found.enter(one, "a")
    assert not knocks(found, "a") and knocks(found, "b")
    proxy = Door(10, 10)
    assert all(knocks(proxy, "a") for _ in range(40))


def test_who_has_few_places_keeps_them() -> None:
    """255 addresses knock again and again: none takes the place of who has one, nor has more than its share."""
    found = Door(10_000, 5_000)
    member = knocks(found, "member")
    for number in range(3 * (MOST_KNOCKING - 1)):
        assert knocks(found, f"10.0.{number % (MOST_KNOCKING - 1)}.1")
    assert member and not member.gone
    assert {len(its) for its in found.knocking.values()} == {1}
    late = [knocks(found, f"10.1.{number}.1") for number in range(MOST_KNOCKING)]  # more addresses than places
    assert all(late) and member.gone and sum(map(len, found.knocking.values())) == MOST_KNOCKING


def test_behind_a_proxy_the_oldest_gives_way() -> None:
    """There everybody has one address."""
    proxy = Door(1000, 1000)
    came = [knocks(proxy, "proxy") for _ in range(MOST_KNOCKING + 2)]
    assert [one is not None and one.gone for one in came] == [True, True] + [False] * MOST_KNOCKING


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),  # RFC 4291 2.5.5.2: an IPv4 address, as a socket of both kinds tells it
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::"),
        ("2001:db8:1:3::1", "2001:db8:1:3::"),
        ("fe80::1%eth0", "fe80::"),
        ("::1", "::"),
    ],
)
def test_ipv6_is_counted_by_64(address, counted) -> None:
    assert door.counted_address(address) == counted


def test_a_port_that_another_program_has_is_told_before_the_server_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert door.port_is_taken("127.0.0.1", port)
    assert not door.port_is_taken("127.0.0.1", port)
    assert not door.port_is_taken("192.0.2.1", port)  # of nobody (RFC 5737): that is not a port that is taken


def seeing(most: Door) -> tuple[Any, list[Any]]:
    """A protocol and what it saw: a connection's TCP_NODELAY, and the door's counts before and after it came in."""
    seen: list[Any] = []

    class Seeing(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken = transport.get_extra_info("socket")
            seen.append((taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0, len(most.knocking)))
            door.let_in(transport)
            seen.append((len(most.knocking), most.inside.total()))

    return Seeing, seen


def test_small_packets_leave_at_once_and_who_speaks_is_in() -> None:
    """asyncio sets TCP_NODELAY only where a socket names its protocol; the default of `create_server` does not."""
    most = Door(10, 5)
    made, seen = seeing(most)

    async def run() -> None:
        listening = ListeningSocket.open("127.0.0.1", 0, 16, most)
        server = await asyncio.get_running_loop().create_server(made, sock=listening)
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            while len(seen) < 2:
                await asyncio.sleep(0.01)
            writer.close()
            while most.inside:
                await asyncio.sleep(0.01)

    with asyncio.Runner(loop_factory=DoorLoop) as runner:
        runner.run(asyncio.wait_for(run(), 20))
    assert seen == [(True, 1), (0, 1)]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a server's certificate, its key and its authority."""
    made, folder = make_development_certificate([], datetime.now(UTC)), tmp_path_factory.mktemp("tls")
    (folder / "chain.pem").write_bytes(made.chain)
    (folder / "key.pem").write_bytes(made.key)
    (folder / "ca.pem").write_bytes(made.ca)
    return folder


@pytest.fixture(scope="module")
def context(certificate: Path) -> ssl.SSLContext:
    return server_context(certificate / "chain.pem", certificate / "key.pem")


def test_a_silent_handshake_ends_at_our_deadline(context, monkeypatch) -> None:
    """A minute with asyncio alone; `HANDSHAKE_S` is shortened to three tenths of a second."""
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.3)
    most = Door(10, 5)

    async def run() -> bytes:
        listening = ListeningSocket.open("127.0.0.1", 0, 16, most)
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, sock=listening, ssl=context)
        async with server:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            said = await reader.read()
            writer.close()
            return said

    with asyncio.Runner(loop_factory=DoorLoop) as runner, contextlib.suppress(ConnectionResetError):
        assert runner.run(asyncio.wait_for(run(), 20)) == b""
    assert door.HANDSHAKE_S < asyncio.constants.SSL_HANDSHAKE_TIMEOUT and not most.knocking


def test_who_gives_way_is_closed(context, monkeypatch) -> None:
    """Nine addresses open 32 each: 256 stay, of each address 28 or 29, and its newest; the others are closed."""
    came: list[tuple[str, door.Visitor]] = []
    monkeypatch.setattr(door.Visitor, "knocks", lambda one, _, address: came.append((address, one)))

    async def run() -> dict[str, list[bool]]:
        """Address → which of its connections are open, the oldest first; as the server and as the client see it."""
        listening = ListeningSocket.open("127.0.0.1", 0, 512, Door(1000, 500))
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, sock=listening, ssl=context, backlog=512
        )
        async with server:
            silent = []
            with contextlib.ExitStack() as held:
                for number in range(9 * KNOCKING_OF_ONE):
                    one = held.enter_context(socket.socket())
                    one.bind((f"127.0.0.{number // KNOCKING_OF_ONE + 1}", 0))
                    one.connect(listening.getsockname())
                    one.setblocking(False)
                    silent.append(one)
                while len(came) < len(silent) or sum(one.fileno() >= 0 for _, one in came) > MOST_KNOCKING:
                    await asyncio.sleep(0.01)
                found: dict[str, list[bool]] = {}
                for (address, one), client in zip(came, silent, strict=True):
                    with contextlib.suppress(BlockingIOError):
                        assert client.recv(1) == b"" and one.fileno() < 0
                    found.setdefault(address, []).append(one.fileno() >= 0)
                return found

    with asyncio.Runner(loop_factory=DoorLoop) as runner:
        found = runner.run(asyncio.wait_for(run(), 20))
    assert sum(map(sum, found.values())) == MOST_KNOCKING
    assert all(sum(its) in (28, 29) and its == sorted(its) for its in found.values())


def tls_connections() -> int:
    return sum(isinstance(one, asyncio.sslproto.SSLProtocol) for one in gc.get_objects())


def test_a_handshake_that_failed_is_forgotten_at_once(context) -> None:
    """asyncio leaves its frames and the error in a circle that holds the connection until Python looks for circles."""

    async def run() -> list[int]:
        listening = ListeningSocket.open("127.0.0.1", 0, 16, Door(100, 50))
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, sock=listening, ssl=context)
        async with server:
            gc.collect()
            before = tls_connections()
            for said in [b"", b"no TLS\r\n\r\n"] * 5:
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                writer.write(said)
                writer.write_eof()
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
                writer.close()
            while listening.door.knocking:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            return [before, tls_connections()]

    gc.disable()
    try:
        with asyncio.Runner(loop_factory=DoorLoop) as runner:
            before, after = runner.run(asyncio.wait_for(run(), 20))
    finally:
        gc.enable()
    assert after == before


def test_a_tls_connection_holds_little(context, certificate) -> None:
    """Check 45: asyncio would have a quarter of a megabyte to read into, and take as much that nobody reads."""
    seen: list[tuple[int, int]] = []

    class Seeing(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            door.bound_buffer(transport)
            seen.append((transport.get_read_buffer_limits()[1], len(transport._ssl_protocol.get_buffer(-1))))

    async def run() -> None:
        listening = ListeningSocket.open("127.0.0.1", 0, 16, Door(10, 5))
        trusting = ssl.create_default_context(cafile=str(certificate / "ca.pem"))
        server = await asyncio.get_running_loop().create_server(Seeing, sock=listening, ssl=context)
        async with server:
            _, writer = await asyncio.open_connection(
                *listening.getsockname(), ssl=trusting, server_hostname="localhost"
            )
            while not seen:
                await asyncio.sleep(0.01)
            writer.transport.abort()

    with asyncio.Runner(loop_factory=DoorLoop) as runner:
        runner.run(asyncio.wait_for(run(), 20))
    assert seen == [(1, 2**15)]


def test_threads_that_are_done_at_once_wake_the_loop_once() -> None:
    """What each hands over is done all the same, also what comes while the loop wakes up."""
    seen: list[int] = []

    async def waits() -> int:
        loop = asyncio.get_running_loop()
        sent: list[bytes] = []
        pipe, loop._csock = loop._csock, type("Counting", (), {"send": lambda _, data: sent.append(data)})()
        crowd = [threading.Thread(target=loop.call_soon_threadsafe, args=(seen.append, one)) for one in range(50)]
        for one in crowd:
            one.start()
        for one in crowd:
            one.join()
        loop._csock = pipe
        pipe.send(sent[0])
        while len(seen) < 50:
            await asyncio.sleep(0.001)
        for number in range(50, 60):  # and each time again
            await asyncio.to_thread(loop.call_soon_threadsafe, seen.append, number)
        return len(sent)

    with asyncio.Runner(loop_factory=DoorLoop) as runner:
        assert runner.run(asyncio.wait_for(waits(), 20)) == 1
    assert sorted(seen) == list(range(60))

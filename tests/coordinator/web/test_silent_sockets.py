"""Silent sockets at a served coordinator, from many addresses of loopback: what they keep out, hold and log.

Source: docs/security.md 5, checks 39 and 40.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.coordinator.conftest import settings_table
from tests.coordinator.web.served import Served, cpu_s, memory_kib

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.web.door import KNOCKING_OF_ONE, MOST_KNOCKING, raise_descriptors

MEMBER = "127.0.0.17"
CLOSED_UNHEARD, REFUSED = "some are closed unheard", "refused before the signature: task"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = CoordinatorHome(tmp_path_factory.mktemp("silent") / "home")
    make_home(home, settings_table(port=0))
    running = Served(home)
    yield running
    running.close()


class Crowd:
    """Addresses that hold silent sockets, and open another in the place of each that was closed."""

    def __init__(self, port: int, addresses: range, each: int) -> None:
        self.port, self.opened = port, 0
        self.held: dict[str, list[socket.socket]] = {}
        self.grow(addresses, each)

    def grow(self, addresses: range, each: int) -> None:
        """Connect from more addresses; the system's queue of 512 drops what is more than that at once."""
        for address in (f"127.0.0.{number}" for number in addresses):
            self.held[address] = [self._connect(address) for _ in range(each)]

    def _connect(self, address: str) -> socket.socket:
        one = socket.socket()
        one.bind((address, 0))
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", self.port))
        self.opened += 1
        return one

    def count(self) -> int:
        """How many of them the server holds."""
        return sum(is_open(one) for its in self.held.values() for one in its)

    def reopen(self) -> None:
        for address, its in self.held.items():
            for place, one in enumerate(its):
                if not is_open(one):
                    one.close()
                    its[place] = self._connect(address)

    def close(self) -> None:
        for its in self.held.values():
            for one in its:
                one.close()


def is_open(silent: socket.socket) -> bool:
    """Whether the server still holds a connection that it said nothing on."""
    try:
        return silent.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def healthy(served: Served, address: str) -> bool:
    """Whether a newcomer at an address is answered over TLS."""
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=20, source_address=(address, 0)) as plain,
        served.context().wrap_socket(plain, server_hostname="localhost") as asking,
    ):
        asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return b" 200 " in asking.recv(200)


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds within five seconds: handshakes end after ten."""
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.05)
    return holds()


def descriptors(served: Served) -> int:
    return len(os.listdir(f"/proc/{served.process.pid}/fd"))


def at_rest(served: Served) -> int:
    """Descriptors of the server, once half a second changes nothing: the test before may have left some."""
    now = descriptors(served)
    while True:
        time.sleep(0.5)
        before, now = now, descriptors(served)
        if now == before:
            return now


def test_a_thousand_silent_sockets_keep_nobody_out(served) -> None:
    """All from one address: so many as may knock are held, and a newcomer from another is answered among them."""
    with contextlib.closing(Crowd(served.port, range(2, 3), 1000)) as crowd:
        assert healthy(served, MEMBER)
        assert soon(lambda: 0 < crowd.count() <= KNOCKING_OF_ONE)


def test_sixteen_addresses_that_come_again_keep_nobody_out(served) -> None:
    """They hold twice as many as there are places, and reopen what is closed; a member at a seventeenth gets in."""
    ends = threading.Event()

    def insist(crowd: Crowd) -> None:
        while not ends.wait(0.5):
            crowd.reopen()

    with contextlib.closing(Crowd(served.port, range(1, 17), KNOCKING_OF_ONE)) as crowd:
        first, answers, until = crowd.opened, list[bool](), time.monotonic() + 30
        attack = threading.Thread(target=insist, args=(crowd,))
        attack.start()
        try:
            while len(answers) < 10 or (crowd.opened - first <= MOST_KNOCKING and time.monotonic() < until):
                answers.append(healthy(served, MEMBER))
        finally:
            ends.set()
            attack.join()
        assert all(answers)
        assert first > MOST_KNOCKING and crowd.opened - first > MOST_KNOCKING  # they did come again


def told(served: Served, words: str) -> int:
    return sum(words in line for line in list(served.lines))


def test_what_anybody_can_cause_fills_no_log(served) -> None:
    """300 sockets that are refused unheard, 300 that say no TLS, 30 requests that say nothing: a line for each cause
    and minute, of those that are told at all."""
    began, before, told_before = time.monotonic(), len(served.lines), told(served, CLOSED_UNHEARD)
    with contextlib.closing(Crowd(served.port, range(2, 3), KNOCKING_OF_ONE + 300)) as crowd:
        assert soon(lambda: 0 < crowd.count() <= KNOCKING_OF_ONE)
    for _ in range(300):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in loud.recv(100)
    for _ in range(30):
        assert served.post("/v1/task", b"no envelope")[0] == 401
    minutes = 1 + (time.monotonic() - began) / 60
    assert soon(lambda: told(served, REFUSED) >= 1)
    assert told(served, REFUSED) <= minutes and told(served, CLOSED_UNHEARD) - told_before <= minutes
    assert told(served, CLOSED_UNHEARD) >= 1  # by this test or, within the same minute, by one before
    assert len(served.lines) - before <= 2 * minutes  # of TLS that fails there is none


@pytest.mark.slow
def test_what_four_thousand_silent_sockets_cost(served, capsys) -> None:
    """From 125 addresses: memory and log hardly grow, a newcomer is answered, and nothing is left of them."""
    raise_descriptors()  # of this process, which opens them
    open_before = at_rest(served)
    before, logged = memory_kib(served.process.pid), sum(map(len, served.lines))
    worked = cpu_s(served.process.pid)
    with contextlib.closing(Crowd(served.port, range(1, 6), KNOCKING_OF_ONE)) as crowd:
        for number in range(6, 126, 5):
            crowd.grow(range(number, number + 5), KNOCKING_OF_ONE)
            assert soon(lambda: crowd.count() <= MOST_KNOCKING)
        during, opened = memory_kib(served.process.pid), crowd.opened
        each_ms = (cpu_s(served.process.pid) - worked) / opened * 1000
        assert healthy(served, "127.0.0.127")
    assert soon(lambda: at_rest(served) == open_before)
    after, lines = memory_kib(served.process.pid), sum(map(len, served.lines)) - logged
    with capsys.disabled():
        print(f"\n{opened} silent sockets: {before / 1024:.1f} MiB before, {during / 1024:.1f} with them, "
              f"{after / 1024:.1f} after; {lines} bytes of log; {each_ms:.2f} ms of the processor each")  # fmt: skip
    assert opened == 4000 and max(during, after) - before < 128 * 1024 and lines < 1000


DESCRIPTORS = """
import resource, sys
from edgefl_coordinator.web import door
soft, hard, door._DESCRIPTORS = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
door.raise_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "raised"),
    [(64, 900, 65_536, 900), (900, 900, 65_536, 900), (64, 900, 500, 500), (700, 900, 500, 700)],
)
def test_a_server_may_open_as_many_files_as_the_system_lets_it(soft, hard, wanted, raised) -> None:
    """The soft limit rises to the hard one, or to what is wanted; neither ever falls."""
    words = [sys.executable, "-c", DESCRIPTORS, *map(str, (soft, hard, wanted))]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(raised), str(hard)]

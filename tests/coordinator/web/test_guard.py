"""The guard's counts and what it reads of a body: check 45, docs/security.md 2.3 and signed time."""

import asyncio
import contextlib
import time

from hypothesis import given
from hypothesis import strategies as st

from edgefl_coordinator.web.bodies import SMALL_BYTES, Application, Body, Event, LargeBodies, NotPassed, Send
from edgefl_coordinator.web.guard import Guard, RateLimit


def test_the_minute_ends() -> None:
    now = [0.0]
    limit = RateLimit(1, clock=lambda: now[0])
    assert [limit.allows("a", "/"), limit.allows("a", "/")] == [True, False]
    now[0] = 60.0
    assert limit.allows("a", "/")


def test_a_flood_of_addresses_resets_nobody() -> None:
    """docs/security.md, signed time: with more addresses than are remembered, one that keeps asking stays refused."""
    limit = RateLimit(2, clock=lambda: 0.0)
    assert [limit.allows("attacker", "/") for _ in range(3)] == [True, True, False]
    for number in range(25_000):
        assert limit.allows(f"flood-{number}", "/")
        if number % 5000 == 0:
            assert not limit.allows("attacker", "/")
    assert not limit.allows("attacker", "/")
    assert len(limit._counts) == 10_000


def test_the_longest_silent_is_forgotten_first() -> None:
    """The bound: of three places, the address that asked last is kept and the one that asked first gives way."""
    now = [0.0]
    limit = RateLimit(1, clock=lambda: now[0], max_addresses=3)
    assert [limit.allows(name, "/") for name in "abc"] == [True] * 3
    assert not limit.allows("a", "/")
    assert limit.allows("d", "/")  # b goes
    assert not limit.allows("a", "/") and not limit.allows("c", "/")
    assert limit.allows("b", "/")  # d goes: a and c asked after it
    now[0] = 60.0
    assert [limit.allows(name, "/") for name in "acb"] == [True] * 3  # everybody's own minute has passed


def test_a_request_costs_the_same_however_many_addresses() -> None:
    """Bounded and O(1): a full table takes no longer for each new address than an empty one (within a factor of 20)."""

    def seconds(limit: RateLimit, first: int) -> float:
        start = time.perf_counter()
        for number in range(first, first + 5000):
            limit.allows(f"address-{number}", "/")
        return time.perf_counter() - start

    limit = RateLimit(60)
    empty = seconds(limit, 0)
    seconds(limit, 5000)
    assert seconds(limit, 10_000) < 20 * empty + 0.05


async def never() -> Event:
    raise AssertionError


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=60))
def test_room_is_shared_and_given_back(steps) -> None:
    """Against a plain list: never above the room, nobody above a quarter of it but with one body, nothing left over."""
    room, taken = LargeBodies(100), list[tuple[str, int, contextlib.ExitStack]]()
    for sender, length, gives_back in steps:
        if gives_back and taken:
            taken.pop(0)[2].close()
        mine, stack = [held for one, held, _ in taken if one == sender], contextlib.ExitStack()
        fits = sum(held for _, held, _ in taken) + length <= 100 and (not mine or sum(mine) + length <= 25)
        with contextlib.suppress(NotPassed):
            stack.enter_context(room.held(sender, Body(never, length)))
            taken.append((sender, length, stack))
            assert fits
            continue
        assert not fits
    for *_, stack in taken:
        stack.close()
    assert not room._held


class Asked:
    """A guard whose members are known by the first byte of what they send, and what became of each request."""

    def __init__(self, known: bytes) -> None:
        self.statuses: list[int] = []
        self.read: list[int] = []

        async def sender(_: str, start: bytes) -> str | None:
            return start[:1].decode() if start[:1] in known else None

        self.guard = Guard(
            self._answers(200),
            sender,
            self._answers(401),
            body_bytes=32 * 2**20,
            waiting_bytes=256 * 2**20,
            per_minute=60,
        )

    @staticmethod
    def _answers(status: int) -> Application:
        async def answer(_: object, __: object, send: Send) -> None:
            await send({"type": "http.response.start", "status": status, "headers": []})

        return answer

    async def ask(self, body: bytes, length: int) -> None:
        """Send a body in pieces of 16 KiB, and stay silent where it is shorter than announced."""
        left = bytearray(body)

        async def receive() -> Event:
            if not left:
                await asyncio.Event().wait()
            piece = bytes(left[: 2**14])
            del left[: 2**14]
            return {"type": "http.request", "body": piece, "more_body": bool(left) or len(body) < length}

        async def send(event: Event) -> None:
            if event["type"] != "http.response.start":
                return
            self.statuses.append(event["status"])
            self.read.append(len(body) - len(left))

        headers = [(b"content-length", str(length).encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/reply", "query_string": b"", "headers": headers}
        await self.guard(scope, receive, send)


def test_a_strangers_body_is_not_read() -> None:
    """Docs/security.md 2.3: beyond the start, which shows the clear header."""

    async def run() -> Asked:
        asked = Asked(b"m")
        await asked.ask(b"s" * 2**20, 2**20)
        await asked.ask(b"m" * 2**20, 2**20)
        return asked

    asked = asyncio.run(run())
    assert asked.statuses == [401, 200] and asked.read == [2**14, 2**20]


def test_members_that_announce_much_hold_up_no_small_body() -> None:
    """Check 45: eight members that announce 32 MiB each and send a little fill the room; a small body is taken."""

    async def run() -> Asked:
        asked = Asked(bytes(range(1, 20)))
        slow = [asyncio.create_task(asked.ask(bytes([number]) * 5000, 32 * 2**20)) for number in range(1, 9)]
        await asyncio.sleep(0.01)
        await asked.ask(b"\x09" * 100_000, 100_000)
        await asked.ask(b"\x09" * SMALL_BYTES, SMALL_BYTES)
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await asked.ask(b"\x09" * 100_000, 100_000)
        return asked

    assert asyncio.run(run()).statuses == [503, 200, 200]


def test_who_fills_the_room_slowly_gives_way() -> None:
    """Members that announce 32 MiB each and stay silent have the room for five seconds: then whoever comes gets the
    place of the slowest, once. A body of which 4 MiB came meanwhile stays, and so do the newcomers."""
    now = [0.0]

    async def run() -> tuple[Asked, list[bool]]:
        asked = Asked(bytes(range(1, 30)))
        asked.guard.large = LargeBodies(256 * 2**20, clock=lambda: now[0])
        tasks = [asyncio.create_task(asked.ask(bytes([1]) * 2**22, 32 * 2**20))]
        tasks += [asyncio.create_task(asked.ask(bytes([number]) * 5000, 32 * 2**20)) for number in range(2, 9)]
        await asyncio.sleep(0.05)
        now[0] = 4.9
        await asked.ask(b"\x09" * 100_000, 100_000)
        assert asked.statuses == [503]
        now[0] = 6.0
        tasks += [asyncio.create_task(asked.ask(bytes([number]) * 5000, 32 * 2**20)) for number in range(10, 18)]
        await asyncio.sleep(0.05)
        done = [one.done() for one in tasks]
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return asked, done

    asked, done = asyncio.run(run())
    assert asked.statuses == [503] * 9
    assert done == [False, *[True] * 7, *[False] * 7, True]
    assert not asked.guard.large._held


def test_nobody_gives_way_where_that_is_not_enough() -> None:
    """One slow body of 1 MiB makes no room for 32: it is read on, and who came is told to come again."""
    now = [0.0]

    async def run() -> tuple[Asked, bool]:
        asked = Asked(bytes(range(1, 30)))
        asked.guard.large = LargeBodies(32 * 2**20, clock=lambda: now[0])
        slow = asyncio.create_task(asked.ask(b"\x01" * 5000, 2**20))
        fast = asyncio.create_task(asked.ask(b"\x02" * 2**22, 16 * 2**20))
        await asyncio.sleep(0.05)
        now[0] = 6.0
        await asked.ask(b"\x03" * 5000, 32 * 2**20)
        still = not slow.done()
        for one in (slow, fast):
            one.cancel()
        await asyncio.gather(slow, fast, return_exceptions=True)
        return asked, still

    asked, still = asyncio.run(run())
    assert asked.statuses == [503] and still

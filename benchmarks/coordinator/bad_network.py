"""A TCP proxy that does to connections what a bad network does; each has a fate, drawn when it is taken.

It forwards bytes and knows nothing of them, so TLS goes through it. The faults are toxiproxy's: delays, a connection
that is cut, one that falls silent, one that is refused. Source: docs/security.md, reliability table.
"""

import asyncio
import contextlib
import random
import struct
import threading
from collections import Counter

FATES = {"clean": 60, "slow": 15, "cut": 15, "silent": 5, "refused": 5}  # of a connection, in percent


class Proxy:
    """Forwards each connection to one of the ports `targets` of this machine; all of them well while it is `good`."""

    def __init__(self, seed: int) -> None:
        self.draw, self.good = random.Random(seed), False
        self.targets: list[int] = []
        self.fates: Counter[str] = Counter()
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def listen() -> None:
            server = await asyncio.start_server(self._one, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()

        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(listen(), self.loop)
        ready.wait()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fate = "clean" if self.good else self.draw.choices([*FATES], [*FATES.values()])[0]
        self.fates[fate] += 1
        if fate == "refused":
            self._reset(writer)
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.draw.choice(self.targets))
        except OSError:
            self._reset(writer)
            return
        limit = self.draw.randrange(200, 12_000) if fate in ("cut", "silent") else None
        ways = [self._way(reader, up_writer, fate, limit), self._way(up_reader, writer, fate, limit)]
        _, left = await asyncio.wait([asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED)
        for way in left:
            way.cancel()
        for one in (writer, up_writer):
            self._reset(one)

    async def _way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fate: str, limit: int | None
    ) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(16_384):
                if fate == "slow":
                    await asyncio.sleep(self.draw.uniform(0.02, 0.4))
                passed += len(data)
                if limit is not None and passed > limit:
                    writer.write(data[: max(0, limit - passed)])
                    await asyncio.sleep(5.0 if fate == "silent" else 0.0)
                    return
                writer.write(data)
                await writer.drain()

    @staticmethod
    def _reset(writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SOL_SOCKET, SO_LINGER: close with RST
            writer.transport.abort()

"""Sealed uploads a second: the whole coordinator under load, beside what its cryptography alone allows.

Members lie in the store from the start, approved, and a round is open. Replies of 4 KiB are sealed before the clock
starts. One process sends them over TLS on kept connections to the real `serve` in a process of its own, whose disk is
the one under TMPDIR: an answer means that the reply is durable. A round takes one reply of each member, so where there
are fewer members than uploads the next round is opened in between, by its row alone. Nothing is aggregated.

On PostgreSQL the server is one of our own, with its usual settings, on the same disk; several `serve` share it, and the
sender deals its connections to them in turn. Their processor time is told beside that of the database.

With kills, servers are killed and started again at random moments while replies come. What was sent without an answer
is sealed anew around the same work item, as a member does. It goes on until so many were killed; in the end each reply
was acknowledged, and is in the store and in the audit log once.

The floor, in the same run on one core: verify and open the same envelopes and seal the answers, with the project's own
primitives, no store, no HTTP. The ratio is one of processor time, which a busy machine changes less than the clock.

Replies above 64 KiB (`--values`) lie in files, or in an S3 server of our own on the same disk (JuiceFS's gateway).

    python -m benchmarks.coordinator.coordinator_load [--members N]... [--database sqlite|postgresql]... \\
        [--processes N]... [--payloads disk|s3]... [--uploads N] [--values N] [--connections N] \\
        [--suite 1|2] [--kills N] [--json]
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.coordinator.crowded_coordinator import Federation
from benchmarks.processes import started

if TYPE_CHECKING:
    from benchmarks.coordinator.postgresql_cluster import Cluster
    from benchmarks.coordinator.s3_gateway import Gateway

MODULE = "benchmarks.coordinator.coordinator_load"
FLOOR = 400  # envelopes that the floor is measured on, at most
AT_THE_DOOR = 16  # connections that the sender opens at once
SEALED = 24  # times, where servers are killed: envelopes around one work item
UP_S = 0.6  # longest time from the start of a server to the next kill


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def serve(home: Path) -> None:
    """The coordinator's HTTP process; there is no job for its worker."""
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import service

    service.serve(open_coordinator(CoordinatorHome(home), joins=True), lambda port: tell(port=port))


def send(file: Path, ca: Path, ports: Sequence[int], connections: int) -> None:
    """Send the envelopes of a file, each connection one after the other, and tell how long each answer took."""
    tell(**asyncio.run(_send(list(frames(file)), ssl.create_default_context(cafile=ca), ports, connections)))


def insist(file: Path, ca: Path, ports: Sequence[int], connections: int) -> None:
    """Send the envelopes of a file, `SEALED` of each work item, until each is acknowledged."""
    bodies, context = list(frames(file)), ssl.create_default_context(cafile=ca)
    items = [bodies[first : first + SEALED] for first in range(0, len(bodies), SEALED)]
    took_ms: list[float] = []

    async def work() -> None:
        reader: asyncio.StreamReader | None = None
        while items:
            item, started = items.pop(), time.perf_counter()
            while True:
                try:
                    if reader is None:
                        port = random.choice(ports)
                        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                        writer.transport.set_write_buffer_limits(0)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                try:
                    status, _ = await ask(reader, writer, "POST", "/v1/reply", item.pop())
                except (OSError, EOFError):
                    reader = None
                    continue
                assert status in (200, 500), status
                if status == 200:
                    break
            took_ms.append((time.perf_counter() - started) * 1000)

    async def all_of_them() -> None:
        await asyncio.gather(*(work() for _ in range(connections)))

    started, processor = time.perf_counter(), time.process_time()
    asyncio.run(all_of_them())
    spent = {"seconds": time.perf_counter() - started, "processor_s": time.process_time() - processor}
    tell(**spent, took_ms=took_ms, statuses={200: len(took_ms)})


async def _send(bodies: list[bytes], context: ssl.SSLContext, ports: Sequence[int], connections: int) -> dict[str, Any]:
    door = asyncio.Semaphore(AT_THE_DOOR)

    async def come_in(number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = ports[number % len(ports)]
        async with door:
            found = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="127.0.0.1")
            assert (await ask(*found, "GET", "/healthz", b""))[0] == 200
        return found

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while bodies:
            body = bodies.pop()
            started = time.perf_counter()
            status, _ = await ask(reader, writer, "POST", "/v1/reply", body)
            took_ms.append((time.perf_counter() - started) * 1000)
            statuses[status] = statuses.get(status, 0) + 1

    took_ms: list[float] = []
    statuses: dict[int, int] = {}
    inside = await asyncio.gather(*map(come_in, range(min(connections, len(bodies)))))
    started, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(*found) for found in inside))
    seconds, processor_s = time.perf_counter() - started, time.process_time() - processor
    for _, writer in inside:
        writer.close()
    return {"seconds": seconds, "processor_s": processor_s, "took_ms": took_ms, "statuses": statuses}


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    """One request on a kept connection: its status and body."""
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].split()[0])
    return int(head.split()[1]), await reader.readexactly(length)


def write_frames(file: Path, bodies: Sequence[bytes]) -> None:
    file.write_bytes(b"".join(struct.pack("<I", len(body)) + body for body in bodies))


def frames(file: Path) -> Iterator[bytes]:
    data, at = file.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def processor_s(process: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: int) -> float:
    """Resident memory of a process now."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


class Servers:
    """Processes of `serve` on one folder."""

    def __init__(self, home: Path, count: int) -> None:
        self.home = home
        self.running = [self._begin() for _ in range(count)]
        self.ports = [self._port(one) for one in self.running]

    def _begin(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*started(MODULE), "--role", "serve", str(self.home)], stdout=subprocess.PIPE, text=True
        )

    @staticmethod
    def _port(server: "subprocess.Popen[str]") -> int:
        assert server.stdout is not None
        return int(json.loads(server.stdout.readline())["port"])

    def kill(self) -> None:
        """Kill one and start it again."""
        place = random.randrange(len(self.running))
        self._end(self.running[place], hard=True)
        self.running[place] = self._begin()
        self._port(self.running[place])

    @staticmethod
    def _end(server: "subprocess.Popen[str]", *, hard: bool) -> None:
        if hard:
            server.kill()
        else:
            server.terminate()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()

    def end(self) -> None:
        """Stop them as an operator does."""
        for server in self.running:
            self._end(server, hard=False)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(
    root: Path, members: int, uploads: int, connections: int, suite: int, values: int, processes: int,
    kills: int, cluster: "Cluster | None", gateway: "Gateway | None",
) -> dict[str, Any]:  # fmt: skip
    database, payloads = cluster.database() if cluster else "", gateway.url() if gateway else ""
    federation = Federation(root, members, suite, values, database, payloads, free_port() if kills else 0)
    servers = Servers(federation.home.root, processes)
    found: list[dict[str, Any]] = []
    memory, floor, killed = [], dict[str, float](), 0
    spent_s, database_s = 0.0, 0.0

    def spent() -> tuple[float, float]:
        return sum(processor_s(one.pid) for one in servers.running), cluster.processor_s() if cluster else 0.0

    try:
        while (left := uploads - len(federation.sent)) > 0 or killed < kills:
            federation.open_round()
            bodies = federation.seal(min(left, members) if left > 0 else members, SEALED if kills else 1)
            floor = floor or federation.floor(bodies[:FLOOR])
            write_frames(root / "uploads", bodies)
            before, role = spent(), "insist" if kills else "send"
            told = ",".join(map(str, servers.ports))
            asked = ["--role", role, str(root / "uploads"), str(federation.home.tls / "ca.pem"), told, str(connections)]
            command = [*started(MODULE), *asked]
            sender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            while killed < kills and sender.poll() is None:
                time.sleep(random.uniform(0, UP_S))
                servers.kill()
                killed += 1
            answer = sender.communicate()[0]
            assert sender.returncode == 0
            found.append(json.loads(answer.splitlines()[-1]))
            after = spent()
            if not kills:  # whose time is gone with them
                spent_s, database_s = spent_s + after[0] - before[0], database_s + after[1] - before[1]
            memory.append(sum(memory_mib(one.pid) for one in servers.running))
            assert found[-1]["statuses"].keys() == {"200"}, found[-1]["statuses"]
    finally:
        servers.end()
    took_ms = sorted(one for each in found for one in each["took_ms"])
    uploads = len(federation.sent)
    assert uploads == len(took_ms)
    federation.check()
    server_ms = spent_s / uploads * 1000
    return {
        "members": members, "uploads": uploads, "connections": connections, "suite": suite,
        "database": "postgresql" if cluster else "sqlite",
        "payloads": "s3" if gateway else "disk", "processes": processes, "kills": killed,
        "database_ms": database_s / uploads * 1000,
        "per_s": uploads / sum(one["seconds"] for one in found),
        "p50_ms": took_ms[len(took_ms) // 2], "p99_ms": took_ms[min(len(took_ms) - 1, len(took_ms) * 99 // 100)],
        "server_ms": server_ms, "sender_ms": sum(one["processor_s"] for one in found) / uploads * 1000,
        **floor, "ratio": server_ms / floor["floor_ms"], "mib_first": memory[0], "mib_last": memory[-1],
    }  # fmt: skip


ROLES: dict[str, Any] = {
    "serve": lambda home: serve(Path(home)),
    "send": lambda file, ca, ports, most: send(Path(file), Path(ca), [*map(int, ports.split(","))], int(most)),
    "insist": lambda file, ca, ports, most: insist(Path(file), Path(ca), [*map(int, ports.split(","))], int(most)),
}


@click.command()
@click.option("--members", metavar="N", multiple=True, default=(100,), show_default=True, help="Once or more often.")
@click.option("--database", "databases", type=click.Choice(["sqlite", "postgresql"]), multiple=True,
              default=("sqlite",), show_default=True, help="Once or twice.")  # fmt: skip
@click.option("--processes", metavar="N", multiple=True, default=(1,), show_default=True,
              help="Servers on PostgreSQL; once or more often. SQLite has one.")  # fmt: skip
@click.option("--payloads", "places", type=click.Choice(["disk", "s3"]), multiple=True, default=("disk",),
              show_default=True, help="Once or twice.")  # fmt: skip
@click.option("--values", metavar="N", default=1000, show_default=True,
              help="float32 of a reply: 1000 are 4 KiB with names and the envelope.")  # fmt: skip
@click.option("--uploads", metavar="N", default=1000, show_default=True, help="Replies to send.")
@click.option("--connections", metavar="N", default=64, show_default=True, help="Kept connections of the sender.")
@click.option("--suite", type=click.Choice(["1", "2"]), default="2", show_default=True, help="Of all sealing keys.")
@click.option("--kills", metavar="N", default=0, show_default=True, help="Of servers, at random moments.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    members: tuple[int, ...],
    databases: tuple[str, ...],
    processes: tuple[int, ...],
    places: tuple[str, ...],
    values: int,
    uploads: int,
    connections: int,
    suite: str,
    kills: int,
    as_json: bool,
) -> None:
    """Measure sealed, durable uploads a second beside the cryptographic floor."""
    from benchmarks.coordinator import postgresql_cluster, s3_gateway

    os.environ.update(s3_gateway.CREDENTIALS)
    rows = []
    for count, database, place in itertools.product(members, databases, places):
        for servers in processes if database == "postgresql" else (1,):
            with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as ends:
                cluster = ends.enter_context(postgresql_cluster.running()) if database == "postgresql" else None
                gateway = ends.enter_context(s3_gateway.running()) if place == "s3" else None
                sized = (count, uploads, connections, int(suite), values, servers, kills)
                rows.append(measure(Path(root), *sized, cluster, gateway))
    if as_json:
        print(json.dumps(rows))
        return
    print(
        "| members | store | payloads | processes | uploads a second | p50 ms | p99 ms | server, processor ms "
        "| database | floor | ratio | sender | MiB | uploads, kills |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['members']} | {row['database']} | {row['payloads']} | {row['processes']} "
            f"| {row['per_s']:.0f} | {row['p50_ms']:.0f} | {row['p99_ms']:.0f} | {row['server_ms']:.2f} "
            f"| {row['database_ms']:.2f} | {row['floor_ms']:.2f} | {row['ratio']:.1f} | {row['sender_ms']:.2f} "
            f"| {row['mib_first']:.0f} to {row['mib_last']:.0f} | {row['uploads']}, {row['kills']} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        ROLES[sys.argv[2]](*sys.argv[3:])
    else:
        main()

"""Sealed uploads a second: the whole coordinator under load, beside what its cryptography alone allows.

Members lie in the store from the start, approved, and a round is open. Replies of 4 KiB are sealed before the clock
starts. One process sends them over TLS on kept connections to the real `serve` in a process of its own, whose disk is
the one under TMPDIR: an answer means that the reply is durable. A round takes one reply of each member, so where there
are fewer members than uploads the next round is opened in between, by its row alone. Nothing is aggregated.

On PostgreSQL the server is one of our own, with its usual settings, on the same disk; several `serve` share it, and the
sender deals its connections to them in turn. Their processor time is told beside that of the database.

The floor, in the same run on one core: verify and open the same envelopes and seal the answers, with the project's own
primitives, no store, no HTTP. The ratio is one of processor time, which a busy machine changes less than the clock.

Replies above 64 KiB (`--values`) lie in files, or in an S3 server of our own on the same disk (JuiceFS's gateway).

    python benchmarks/coordinator_load.py [--members N]... [--database sqlite|postgresql]... [--processes N]...
        [--payloads disk|s3]... [--uploads N] [--values N] [--connections N] [--suite 1|2] [--json]
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
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

if TYPE_CHECKING:
    from postgresql_cluster import Cluster
    from s3_gateway import Gateway

FLOOR = 400  # envelopes that the floor is measured on, at most
AT_THE_DOOR = 16  # connections that the sender opens at once
CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


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


class Federation:
    """A coordinator's folder with approved members, and their keys."""

    def __init__(self, root: Path, members: int, suite: int, values: int, database: str, payloads: str) -> None:
        from edgefl_coordinator.commands.setup import make_home
        from edgefl_coordinator.settings import CoordinatorHome
        from edgefl_coordinator.store.coordinator import open_coordinator
        from edgefl_protocol import generate_sealing_key, generate_signing_key

        self.home = CoordinatorHome(root / "home")
        make_home(self.home, {
            "federation": "bench", "database": database, "payloads": payloads,
            "public_url": "https://127.0.0.1:8443", "port": 0, "suite": suite,
            "task": {"method": "fedclf", "name": "pixels", "classes": ["a", "b"], "shares_maps": False,
                     "backbone": CNN},
            "rounds": {"count": 1000, "quorum_target": members + 1, "start": "manual", "deadline_s": 86_400},
            "limits": {"one_address": 1000},
        })  # fmt: skip
        self.database, self.payloads, self.values = database, payloads, values
        self.signing = [generate_signing_key() for _ in range(members)]
        self.sealing = [generate_sealing_key(suite) for _ in range(members)]
        self.round = 0
        coordinator = open_coordinator(self.home)
        self.keys, now_ms = coordinator.keys, coordinator.clock()
        try:
            self._enter(coordinator.store, now_ms)
        finally:
            coordinator.store.close()

    def _enter(self, store: Any, now_ms: int) -> None:
        """Put the members into the store, with the start and a broadcast for each, so that no job is due."""
        from sqlalchemy import insert

        from edgefl_coordinator.rounds import stored_rounds
        from edgefl_coordinator.store.tables import broadcasts, members

        state, keys = store.put_blob(b"the start"), zip(self.signing, self.sealing, strict=True)
        rows = [
            {"skid": one.key_id, "name": f"device-{number}", "role": "device", "state": "approved",
             "signing_public": one.public, "sealing_suite": other.suite, "sealing_public": other.public,
             "enrolled_ms": now_ms, "approved_ms": now_ms}
            for number, (one, other) in enumerate(keys)
        ]  # fmt: skip
        with store.transaction() as connection:
            connection.execute(insert(members), rows)
            stored_rounds.commit_state(connection, now_ms, 0, state)
            stored_rounds.set_fact(connection, "phases", ["train"] * 1000)
            sent = [{"number": 1, "skid": row["skid"], "sha256": "", "others": 0} for row in rows]
            connection.execute(insert(broadcasts), sent)

    def open_round(self) -> None:
        """Open the next round by its row, from beside: the server finds it at its next look."""
        from sqlalchemy import create_engine, insert, update

        from edgefl_coordinator.store.tables import rounds

        self.round, now_ms = self.round + 1, time.time_ns() // 10**6
        file = f"sqlite:///{self.home.database}"
        engine = create_engine(self.database.replace("postgresql:", "postgresql+psycopg:") or file)
        row = {"number": self.round, "phase": "train", "state": "open", "opened_ms": now_ms,
               "deadline_ms": now_ms + 86_400_000, "tried": 0}  # fmt: skip
        with engine.begin() as connection:
            connection.execute(update(rounds).values(state="done"))
            connection.execute(insert(rounds).values(row))
        engine.dispose()

    def seal(self, count: int) -> list[bytes]:
        """Replies of the open round, of one member each."""
        import numpy as np

        from edgefl_protocol import Payload, seal
        from edgefl_protocol.messages.requests import ReplyRequest

        reply = Payload({"weights": np.zeros(self.values, np.float32)}, {"site_sha256": "0" * 64, "n_train": 100})
        now_ms, to, made = time.time_ns() // 10**6, self.keys.sealing.public_key, []
        for number in range(count):
            message = ReplyRequest(idem=f"{self.round:06}-{number:010}", reply=reply).to_payload().to_bytes()
            header = {"typ": "request", "mth": "POST", "pth": "/v1/reply", "fed": "bench", "cty": "reply",
                      "rnd": self.round, "iat": now_ms, "exp": now_ms + 600_000, "seq": self.round}  # fmt: skip
            made.append(seal(message, header, self.signing[number], to))
        return made

    def floor(self, bodies: Sequence[bytes]) -> dict[str, float]:
        """Open envelopes and seal their answers; processor milliseconds of an upload."""
        from edgefl_protocol import Expected, JudgedByCaller, open_envelope, seal
        from edgefl_protocol.envelopes.replies import reply_fields
        from edgefl_protocol.messages.requests import ReplyReply

        now_ms = time.time_ns() // 10**6
        expected = Expected(pth="/v1/reply", fed="bench", typ="request", cty="reply")
        senders = {
            one.key_id: (one.public_key, to.public_key) for one, to in zip(self.signing, self.sealing, strict=True)
        }
        answer = ReplyReply(accepted=True, first_answer_ms=now_ms).to_payload().to_bytes()
        started, processor = time.perf_counter(), time.process_time()
        for body in bodies:
            opened = open_envelope(
                body, self.keys.sealing, lambda skid: senders[skid][0], expected, now_ms, JudgedByCaller()
            )
            fields = reply_fields(opened, sts=200, now_ms=now_ms)
            seal(answer, fields, self.keys.signing, senders[opened.header.skid][1])
        return {
            "floor_ms": (time.process_time() - processor) / len(bodies) * 1000,
            "floor_per_s": len(bodies) / (time.perf_counter() - started),
        }

    def stored(self) -> int:
        """Replies in the store, each with its content."""
        from sqlalchemy import select

        from edgefl_coordinator.store.store import open_store
        from edgefl_coordinator.store.tables import replies

        store = open_store(self.home, wait_s=20.0, url=self.database, payloads=self.payloads)
        try:
            with store.transaction() as connection:
                rows = connection.execute(select(replies.c.blob, replies.c.sha256)).all()
            assert all(hashlib.sha256(store.get_blob(row.blob)).hexdigest() == row.sha256 for row in rows)
            return len(rows)
        finally:
            store.close()


def processor_s(process: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: int) -> float:
    """Resident memory of a process now."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def measure(
    root: Path,
    members: int,
    uploads: int,
    connections: int,
    suite: int,
    values: int,
    processes: int,
    cluster: "Cluster | None",
    gateway: "Gateway | None",
) -> dict[str, Any]:
    database, payloads = cluster.database() if cluster else "", gateway.url() if gateway else ""
    federation = Federation(root, members, suite, values, database, payloads)
    command = [sys.executable, __file__, "--role"]
    servers = [
        subprocess.Popen([*command, "serve", str(federation.home.root)], stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    found: list[dict[str, Any]] = []
    memory, floor = [], dict[str, float]()
    spent_s, database_s = 0.0, 0.0

    def spent() -> tuple[float, float]:
        return sum(processor_s(one.pid) for one in servers), cluster.processor_s() if cluster else 0.0

    try:
        ports = [json.loads(one.stdout.readline())["port"] for one in servers if one.stdout is not None]
        while (left := uploads - sum(len(one["took_ms"]) for one in found)) > 0:
            federation.open_round()
            bodies = federation.seal(min(left, members))
            floor = floor or federation.floor(bodies[:FLOOR])
            write_frames(root / "uploads", bodies)
            before = spent()
            told = ",".join(map(str, ports))
            asked = [*command, "send", str(root / "uploads"), str(federation.home.tls / "ca.pem"), told, connections]
            done = subprocess.run(list(map(str, asked)), check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            after = spent()
            spent_s, database_s = spent_s + after[0] - before[0], database_s + after[1] - before[1]
            memory.append(sum(memory_mib(one.pid) for one in servers))
            assert found[-1]["statuses"] == {"200": len(bodies)}, found[-1]["statuses"]
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
    took_ms = sorted(one for each in found for one in each["took_ms"])
    assert federation.stored() == len(took_ms) == uploads
    server_ms = spent_s / uploads * 1000
    return {
        "members": members, "uploads": uploads, "connections": connections, "suite": suite,
        "database": "postgresql" if cluster else "sqlite", "payloads": "s3" if gateway else "disk",
        "processes": processes,
        "database_ms": database_s / uploads * 1000,
        "per_s": uploads / sum(one["seconds"] for one in found),
        "p50_ms": took_ms[len(took_ms) // 2], "p99_ms": took_ms[min(len(took_ms) - 1, len(took_ms) * 99 // 100)],
        "server_ms": server_ms, "sender_ms": sum(one["processor_s"] for one in found) / uploads * 1000,
        **floor, "ratio": server_ms / floor["floor_ms"], "mib_first": memory[0], "mib_last": memory[-1],
    }  # fmt: skip


ROLES: dict[str, Any] = {
    "serve": lambda home: serve(Path(home)),
    "send": lambda file, ca, ports, connections: send(
        Path(file), Path(ca), [int(port) for port in ports.split(",")], int(connections)
    ),
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
    as_json: bool,
) -> None:
    """Measure sealed, durable uploads a second beside the cryptographic floor."""
    import postgresql_cluster
    import s3_gateway

    os.environ.update(s3_gateway.CREDENTIALS)
    rows = []
    for count, database, place in itertools.product(members, databases, places):
        for servers in processes if database == "postgresql" else (1,):
            with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as ends:
                cluster = ends.enter_context(postgresql_cluster.running()) if database == "postgresql" else None
                gateway = ends.enter_context(s3_gateway.running()) if place == "s3" else None
                sized = (count, uploads, connections, int(suite), values, servers)
                rows.append(measure(Path(root), *sized, cluster, gateway))
    if as_json:
        print(json.dumps(rows))
        return
    print(
        "| members | store | payloads | processes | uploads a second | p50 ms | p99 ms | server, processor ms "
        "| database | floor | ratio | sender | MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['members']} | {row['database']} | {row['payloads']} | {row['processes']} "
            f"| {row['per_s']:.0f} | {row['p50_ms']:.0f} | {row['p99_ms']:.0f} | {row['server_ms']:.2f} "
            f"| {row['database_ms']:.2f} | {row['floor_ms']:.2f} | {row['ratio']:.1f} | {row['sender_ms']:.2f} "
            f"| {row['mib_first']:.0f} to {row['mib_last']:.0f} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        ROLES[sys.argv[2]](*sys.argv[3:])
    else:
        main()

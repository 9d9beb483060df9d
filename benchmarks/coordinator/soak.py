"""A soak: twenty members, a coordinator, kills at random and a bad network between them, and then a reckoning.

The coordinator is `serve` in a process of its own, or several on one PostgreSQL of our own. Its jobs are done by a
worker of ten lines, which chains the digests of the replies that it is given, so the last state tells every reply that
was ever aggregated. Members are the real `edgefl_exchange` with real outboxes, five to a process. They speak through a
proxy that delays, cuts, swallows and refuses connections, and deals them to the servers at random. Servers, member
processes and PostgreSQL are killed at random moments. In the last two fifths of the time servers and PostgreSQL are
left alone, and measured: memory of all servers together, open files of the one with most, and answers.

In the end the network is good, the outboxes empty themselves, and the books are compared: what a member put and what it
was told was accepted, the rows of the store, the chain of digests, the rounds in the audit log. Source:
docs/security.md checks 62 and 68.

    python -m benchmarks.coordinator.soak [--database sqlite|postgresql] [--processes N] [--minutes N] [--members N]
        [--kill-server S] [--kill-members S] [--kill-database S] [--json]
"""

import contextlib
import functools
import json
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from benchmarks.coordinator.bad_network import Proxy
from benchmarks.coordinator.soak_processes import following

if TYPE_CHECKING:
    from benchmarks.coordinator.postgresql_cluster import Cluster
    from edgefl_coordinator.store.store import Store

OF_A_PROCESS = 5  # members
ALONE = 0.6  # of the time, after which the server is not killed
LEAST = 5  # times measured, of which the first fifth does not count
DRAIN_S = 180.0
PROCESSES = Path(__file__).with_name("soak_processes.py")
CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


class Soak:
    """A federation's folders and its processes."""

    def __init__(
        self, root: Path, count: int, seed: int, pause_s: float, cluster: "Cluster | None", processes: int
    ) -> None:
        self.root, self.draw, self.pause_s, self.cluster = root, random.Random(seed), pause_s, cluster
        self.database = cluster.database() if cluster else ""
        self.proxy = Proxy(seed)
        self.names = [f"site-{number:02}" for number in range(count)]
        self.kills: Counter[str] = Counter()
        self.samples: list[tuple[float, float, int, float]] = []  # seconds, MiB, open files, seconds of an answer
        self.servers: list[subprocess.Popen[str]] = []
        self._make()
        for _ in range(processes):
            self._serve(len(self.servers))
        self.crowd = [self._members(place) for place in range(0, count, OF_A_PROCESS)]

    def _make(self) -> None:
        from edgefl_coordinator.founding.folder import make_home
        from edgefl_coordinator.settings import CoordinatorHome

        self.home, count = CoordinatorHome(self.root / "home"), len(self.names)
        make_home(self.home, {
            "federation": "soak", "database": self.database, "port": 0,
            "public_url": f"https://127.0.0.1:{self.proxy.port}",
            "task": {"method": "fedclf", "name": "pixels", "classes": ["a", "b"], "shares_maps": False,
                     "backbone": CNN},
            "rounds": {"count": 10**5, "quorum_min": 3, "quorum_target": max(3, count * 3 // 4),
                       "deadline_s": 10, "min_cohort": 2, "start": "automatic"},
            "limits": {"one_address": 1000, "open_per_minute": 10**6},
        })  # fmt: skip
        self._serve(0)
        self.proxy.good = True
        for name in self.names:
            self._enrol(self.root / name)
        self.proxy.good = False
        self._end_servers()

    def _enrol(self, folder: Path) -> None:
        from edgefl_coordinator.web.admin import run_operation
        from edgefl_exchange.enrolment import enrol
        from edgefl_exchange.https import HttpsTransport
        from edgefl_protocol.records.invite import decode_invite

        folder.mkdir(mode=0o700)
        (folder / "book").touch()
        (folder / "ca.pem").write_bytes((self.home.tls / "ca.pem").read_bytes())
        made = run_operation(self.home, "invite", {"name": folder.name, "role": "site", "hours": 72})
        invite = decode_invite(made["invite"], time.time_ns() // 10**6)
        membership = enrol(folder, invite, HttpsTransport(invite.url, folder / "ca.pem"))
        run_operation(self.home, "approve", {"name": folder.name, "fingerprint": membership.fingerprint})

    def _start(self, *words: object) -> "subprocess.Popen[str]":
        command = [sys.executable, str(PROCESSES), *map(str, words)]
        with (self.root / "errors").open("ab") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def _serve(self, place: int) -> None:
        """Begin a server in the place of the one that was there."""
        server = self._start("serve", self.home.root)
        self.servers[place : place + 1] = [server]
        assert server.stdout is not None
        self.proxy.targets[place : place + 1] = [int(server.stdout.readline())]

    def _end_servers(self) -> None:
        """Stop them as an operator does."""
        for server in self.servers:
            self._end(server, signal.SIGTERM)
        self.servers, self.proxy.targets = [], []

    def _members(self, place: int, *, drain: bool = False) -> "subprocess.Popen[str]":
        folders = [self.root / name for name in self.names[place : place + OF_A_PROCESS]]
        return self._start("drain" if drain else "members", self.draw.getrandbits(30), self.pause_s, *folders)

    @staticmethod
    def _end(process: "subprocess.Popen[str]", how: int) -> None:
        process.send_signal(how)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()

    def run(self, seconds: float, **kill_s: float) -> None:
        """Kill `server`, `members` and `database` at random moments, so often on average; measure once a second."""
        begun = now = time.monotonic()
        due = {what: now + self._pause(usual_s) for what, usual_s in kill_s.items()}
        while (now := time.monotonic()) < begun + seconds or len(self.samples) < LEAST:  # a busy machine takes longer
            alone = now > begun + ALONE * seconds
            for what in due:
                if now > due[what] and (what == "members" or not alone):
                    self._kill(what)
                    self.kills[what] += 1
                    due[what] = time.monotonic() + self._pause(kill_s[what])
            if alone:
                self._measure(now - begun)
            time.sleep(max(0.0, 1 - (time.monotonic() - now)))

    def _kill(self, what: str) -> None:
        """Kill one of these, and begin it again."""
        if what == "members":
            place = self.draw.randrange(len(self.crowd))
            self._end(self.crowd[place], signal.SIGKILL)
            self.crowd[place] = self._members(place * OF_A_PROCESS)
        elif what == "server":
            place = self.draw.randrange(len(self.servers))
            self._end(self.servers[place], signal.SIGKILL)
            self._serve(place)
        elif self.cluster:
            self.cluster.stop("immediate")
            self.cluster.start()

    def _measure(self, at_s: float) -> None:
        pids = [server.pid for server in self.servers]
        files = max(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
        self.samples.append((at_s, sum(map(memory_mib, pids)), files, self._answer_s()))

    def _pause(self, usual_s: float) -> float:
        return self.draw.uniform(0.25, 1.75) * usual_s

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.home.tls / "ca.pem")

    def _answer_s(self) -> float:
        """Ask a server for the signed key record, past the proxy; returns the seconds until it is there."""
        import http.client

        started, port = time.perf_counter(), self.draw.choice(self.proxy.targets)
        one = http.client.HTTPSConnection("127.0.0.1", port, context=self._context, timeout=30)
        try:
            one.request("GET", "/v1/keys")
            assert one.getresponse().read()
        finally:
            one.close()
        return time.perf_counter() - started

    def settle(self) -> None:
        """With a good network, let every outbox empty itself; then stop."""
        self.proxy.good = True
        for process in self.crowd:
            self._end(process, signal.SIGKILL)
        last = [self._members(place, drain=True) for place in range(0, len(self.names), OF_A_PROCESS)]
        for process in last:
            assert process.wait(DRAIN_S) == 0, (self.root / "errors").read_text()[-2000:]
            assert process.stdout is not None
            process.stdout.close()
        self._end_servers()

    def store(self) -> "Store":
        """Open the store, while nobody serves."""
        from edgefl_coordinator.store.store import open_store

        return open_store(self.home, wait_s=10.0, url=self.database)

    def reckon(self) -> dict[str, Any]:
        """Compare the books."""
        from sqlalchemy import select

        from edgefl_coordinator.store import audit
        from edgefl_coordinator.store.tables import replies, rounds, states
        from edgefl_protocol import Payload

        books = Counter(line for name in self.names for line in (self.root / name / "book").read_text().splitlines())
        put, told = ({line.split()[1] for line in books if line.startswith(f"{what} ")} for what in ("put", "accepted"))
        others = {line.split()[0] for line in books} - {"put", "accepted"}
        store = self.store()
        with store.transaction() as connection:
            rows = connection.execute(select(replies.c.number, replies.c.sha256)).all()
            done = set(connection.scalars(select(rounds.c.number).where(rounds.c.state == "done")))
            newest = connection.execute(select(states).order_by(states.c.number.desc())).first()
            opened = [int(row.subject) for row in audit.kept_rows(connection) if row.event == "round_opened"]
        assert newest is not None
        state = Payload.from_bytes(store.get_blob(newest.blob))
        store.close()
        stored, chain = Counter(row.sha256 for row in rows), ""
        for number in sorted(done):
            chain = following(chain, [row.sha256 for row in rows if row.number == number])
        aggregated = sum(row.number in done for row in rows)
        return {
            "put": len(put), "told_accepted": len(told), "stored": len(rows), "aggregated": aggregated,
            "rounds": len(done), "refused": sorted(others - {"kept", "late"}),
            "lost": len((put | told) - stored.keys()), "twice": sum(count - 1 for count in stored.values()),
            "chain_holds": (chain, aggregated) == (state.scalars["chain"], state.scalars["total"]),
            "rounds_forward": opened == list(range(1, len(opened) + 1)), "log_unbroken": self._audited(),
        }  # fmt: skip

    def _audited(self) -> bool:
        words = [sys.executable, "-m", "edgefl_coordinator.cli", "audit", "--home", str(self.home.root)]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def measured(self) -> dict[str, Any]:
        """Slopes of what was measured while the servers were left alone, after the first fifth of that."""
        kept = self.samples[len(self.samples) // 5 :]
        if len(kept) < 4:
            return {}  # it was never run
        seconds, mib, files, answers = (np.array(column) for column in zip(*kept, strict=True))
        half = len(kept) // 2
        early, late = (float(np.percentile(part, 95)) for part in (answers[:half], answers[half:]))
        return {
            "measured_s": round(float(seconds[-1] - seconds[0])),
            "mib": [round(float(mib[0]), 1), round(float(mib[-1]), 1)],
            "mib_per_hour": round(float(np.polyfit(seconds / 3600, mib, 1)[0]), 1),
            "files": [int(files.min()), int(files.max())],
            "answer_p95_ms": [round(1000 * one, 1) for one in (early, late)],
        }  # fmt: skip


def memory_mib(process: int) -> float:
    """Resident memory of a process now."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextlib.contextmanager
def soaking(count: int, seed: int, pause_s: float, database: str = "sqlite", processes: int = 1) -> Iterator[Soak]:
    """Give a soak in a folder that is gone afterwards, with its processes; PostgreSQL is one of our own."""
    with contextlib.ExitStack() as ends:
        cluster = None
        if database == "postgresql":
            from benchmarks.coordinator import postgresql_cluster

            cluster = ends.enter_context(postgresql_cluster.running())
        root = ends.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-soak-"))
        soak = Soak(Path(root), count, seed, pause_s, cluster, processes)
        try:
            yield soak
        finally:
            for process in (*soak.servers, *soak.crowd):
                process.kill()


def sound(facts: dict[str, Any]) -> bool:
    """Whether nothing was lost or came twice, and the books agree."""
    return not facts["lost"] and not facts["twice"] and not facts["refused"] and all(
        facts[name] for name in ("chain_holds", "rounds_forward", "log_unbroken", "aggregated")
    )  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.option("--database", type=click.Choice(["sqlite", "postgresql"]), default="sqlite", help="Where the store lies.")
@click.option("--processes", metavar="N", default=1, help="Servers on PostgreSQL; SQLite has one.")
@click.option("--minutes", metavar="N", default=30.0, help="How long members send; 480 for eight hours.")
@click.option("--members", "count", metavar="N", default=20, help="Members, five to a process.")
@click.option("--kill-server", metavar="S", default=45.0, help="Seconds between kills of a server, on average.")
@click.option("--kill-members", metavar="S", default=20.0, help="Seconds between kills of a process of members.")
@click.option("--kill-database", metavar="S", default=120.0, help="Seconds between kills of PostgreSQL.")
@click.option("--pause", metavar="S", default=1.0, help="Longest pause of a member's process between two turns.")
@click.option("--seed", metavar="N", default=68, help="Of kills and the network.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(
    database: str, processes: int, minutes: float, count: int, kill_server: float, kill_members: float,
    kill_database: float, pause: float, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Soak a coordinator and its members; status 1 where something was lost, or came twice."""
    kills = {"server": kill_server, "members": kill_members}
    if database == "postgresql":
        kills["database"] = kill_database
    elif processes > 1:
        raise click.UsageError("SQLite has one server: leave --processes out, or add --database postgresql")
    with soaking(count, seed, pause, database, processes) as soak:
        soak.run(60 * minutes, **kills)
        soak.settle()
        facts = {**soak.reckon(), "kills": dict(soak.kills), "network": dict(soak.proxy.fates), **soak.measured()}
    print(json.dumps(facts) if as_json else "\n".join(f"{name:16} {value}" for name, value in facts.items()))
    sys.exit(0 if sound(facts) else 1)


if __name__ == "__main__":
    main()

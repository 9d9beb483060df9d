"""A soak: twenty members, a coordinator, kills at random and a bad network between them, and then a reckoning.

The coordinator is `serve` in a process of its own; its jobs are done by a worker of ten lines, which chains the digests
of the replies that it is given, so the last state tells every reply that was ever aggregated. Members are the real
`edgefl_exchange` with real outboxes, five to a process. They speak through a proxy that delays, cuts, swallows and
refuses connections. Server and member processes are killed (SIGKILL) at random moments; in the last two fifths of the
time the server is left alone, and its memory, open files and answers are measured.

In the end the network is good, the outboxes empty themselves, and the books are compared: what a member put and what it
was told was accepted, the rows of the store, the chain of digests, the rounds in the audit log. Source:
docs/security.md checks 62 and 68.

    python benchmarks/soak.py [--minutes N] [--members N] [--kill-server S] [--kill-members S] [--json]
"""

import contextlib
import functools
import hashlib
import json
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from bad_network import Proxy

OF_A_PROCESS = 5  # members
VALUES = 1000  # float32 of a reply
ALONE = 0.6  # of the time, after which the server is not killed
DRAIN_S = 180.0
CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip


# ---- the coordinator


def serve(home: Path) -> None:
    """The server's process."""
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import service

    coordinator = open_coordinator(CoordinatorHome(home), wait_s=10.0)
    service.serve(coordinator, lambda port: print(port, flush=True), chaining_worker)


def chaining_worker(folder: Path, timeout_s: float) -> None:
    """Chain the digests of the round's replies to those before, and count them."""
    from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
    from edgefl_protocol import Payload

    job = read_job(folder)
    state = Payload.from_bytes(Path(job.state).read_bytes()) if job.state else Payload({}, {"chain": "", "total": 0})
    chain, total = str(state.scalars["chain"]), int(state.scalars["total"])
    if job.kind == "aggregate":
        found = [hashlib.sha256(Path(job.replies[name]).read_bytes()).hexdigest() for name in sorted(job.replies)]
        chain, total = following(chain, found), total + len(found)
    made = Payload({}, {"chain": chain, "total": total}).to_bytes()
    sent = Payload({}, {"phase": "train", "round": job.number + 1, "rounds": 10**6}).to_bytes()
    new = b"" if job.kind == "broadcast" else made
    write_result(folder, JobResult(new, ("train",) * 10**5, dict.fromkeys(job.sites, sent)))


def following(chain: str, digests: list[str]) -> str:
    return hashlib.sha256(" ".join([chain, *sorted(digests)]).encode()).hexdigest()


# ---- a process of members


def members(folders: list[Path], seed: int, pause_s: float, *, drain: bool) -> None:
    """Put, fetch and deliver in turn; with `drain` until every outbox is empty."""
    from edgefl_protocol.errors import EdgeflError

    draw, waiting = random.Random(seed), [Site(folder, seed) for folder in folders]
    while waiting:
        for site in list(waiting):
            with contextlib.suppress(EdgeflError):  # a bad network, a server that was killed: the next turn tries again
                if site.turn(drain=drain) and drain:
                    waiting.remove(site)
            time.sleep(draw.uniform(0, pause_s))


class Site:
    """One member: its folder, its books."""

    def __init__(self, folder: Path, seed: int) -> None:
        from edgefl_exchange.https import Deadlines, HttpsTransport
        from edgefl_exchange.member import Member
        from edgefl_exchange.outbox import Outbox

        self.folder, self.fetched = folder, 0
        deadlines = Deadlines(connect_s=2.0, read_s=3.0, total_s=6.0)
        self.member = Member(
            folder, lambda found: HttpsTransport(found.url, folder / "ca.pem", deadlines=deadlines),
            sleep=lambda seconds: time.sleep(min(seconds, 0.5)), rng=random.Random(seed),
        )  # fmt: skip
        self.outbox = Outbox(folder / "outbox.sqlite3", self.member.identity.outbox_key)

    def turn(self, *, drain: bool) -> bool:
        """Do what is due; True where nothing waits."""
        from edgefl_protocol import Payload

        if not drain and self.outbox.count() == 0:
            noise = np.frombuffer(os.urandom(VALUES), np.uint8).astype(np.float32)
            data = Payload({"weights": noise}, {"site_sha256": "0" * 64, "n_train": 100}).to_bytes()
            self.outbox.put("soak", "reply", data, self.member.now_ms())
            self._note("put", data)
        task = self.member.task()
        if task.state == "open" and self.fetched != task.round:
            self.member.broadcast(task.round)
            self.fetched = task.round

        def settled(item: Any, delivery: Any) -> None:
            self._note(delivery.outcome, item.payload)

        self.member.deliver(self.outbox, task, settled=settled)
        return self.outbox.count() == 0

    def _note(self, what: str, data: bytes) -> None:
        """Write it down durably: a kill forgets nothing that was noted."""
        line = f"{what} {hashlib.sha256(data).hexdigest()}\n".encode()
        with (self.folder / "book").open("ab", buffering=0) as book:
            book.write(line)
            os.fsync(book.fileno())


# ---- the soak


class Soak:
    """A federation's folders and its processes."""

    def __init__(self, root: Path, count: int, seed: int, pause_s: float) -> None:
        self.root, self.draw, self.pause_s = root, random.Random(seed), pause_s
        self.proxy = Proxy(seed)
        self.names = [f"site-{number:02}" for number in range(count)]
        self.kills: Counter[str] = Counter()
        self.samples: list[tuple[float, float, int, float]] = []  # seconds, MiB, open files, seconds of an answer
        self._make()
        self.server = self._serve()
        self.crowd = [self._members(place) for place in range(0, count, OF_A_PROCESS)]

    def _make(self) -> None:
        from edgefl_coordinator.commands.setup import make_home
        from edgefl_coordinator.settings import CoordinatorHome

        self.home, count = CoordinatorHome(self.root / "home"), len(self.names)
        make_home(self.home, {
            "federation": "soak", "public_url": f"https://127.0.0.1:{self.proxy.port}", "port": 0,
            "task": {"method": "fedclf", "name": "pixels", "classes": ["a", "b"], "shares_maps": False,
                     "backbone": CNN},
            "rounds": {"count": 10**5, "quorum_min": 3, "quorum_target": max(3, count * 3 // 4),
                       "deadline_s": 10, "min_cohort": 2, "start": "automatic"},
            "limits": {"one_address": 1000, "open_per_minute": 10**6},
        })  # fmt: skip
        self.server = self._serve()
        self.proxy.good = True
        for name in self.names:
            self._enrol(self.root / name)
        self.proxy.good = False
        self._end(self.server, signal.SIGTERM)

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
        command = [sys.executable, __file__, "--role", *map(str, words)]
        with (self.root / "errors").open("ab") as errors:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

    def _serve(self) -> "subprocess.Popen[str]":
        server = self._start("serve", self.home.root)
        assert server.stdout is not None
        self.proxy.target = int(server.stdout.readline())
        return server

    def _members(self, place: int, *, drain: bool = False) -> "subprocess.Popen[str]":
        folders = [self.root / name for name in self.names[place : place + OF_A_PROCESS]]
        return self._start("drain" if drain else "members", self.draw.getrandbits(30), self.pause_s, *folders)

    @staticmethod
    def _end(process: "subprocess.Popen[str]", how: int) -> None:
        process.send_signal(how)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()

    def run(self, seconds: float, kill_server_s: float, kill_members_s: float) -> None:
        """Kill at random moments, so often on average; measure once a second."""
        begun = now = time.monotonic()
        due = {"server": now + self._pause(kill_server_s), "members": now + self._pause(kill_members_s)}
        while (now := time.monotonic()) < begun + seconds:
            alone = now > begun + ALONE * seconds
            if now > due["server"] and not alone:
                self._end(self.server, signal.SIGKILL)
                self.server, self.kills["server"] = self._serve(), self.kills["server"] + 1
                due["server"] = time.monotonic() + self._pause(kill_server_s)
            if now > due["members"]:
                place = self.draw.randrange(len(self.crowd))
                self._end(self.crowd[place], signal.SIGKILL)
                self.crowd[place] = self._members(place * OF_A_PROCESS)
                self.kills["members"] += 1
                due["members"] = time.monotonic() + self._pause(kill_members_s)
            if alone:
                answered = self._answer_s()
                files = len(list(Path(f"/proc/{self.server.pid}/fd").iterdir()))
                self.samples.append((now - begun, memory_mib(self.server.pid), files, answered))
            time.sleep(max(0.0, 1 - (time.monotonic() - now)))

    def _pause(self, usual_s: float) -> float:
        return self.draw.uniform(0.25, 1.75) * usual_s

    @functools.cached_property
    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.home.tls / "ca.pem")

    def _answer_s(self) -> float:
        """Ask for the signed key record, past the proxy; returns the seconds until it is there."""
        import http.client

        started, port = time.perf_counter(), self.proxy.target
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
        self._end(self.server, signal.SIGTERM)

    def reckon(self) -> dict[str, Any]:
        """Compare the books."""
        from sqlalchemy import select

        from edgefl_coordinator.store import audit
        from edgefl_coordinator.store.store import open_store
        from edgefl_coordinator.store.tables import replies, rounds, states
        from edgefl_protocol import Payload

        books = Counter(line for name in self.names for line in (self.root / name / "book").read_text().splitlines())
        put, told = ({line.split()[1] for line in books if line.startswith(f"{what} ")} for what in ("put", "accepted"))
        others = {line.split()[0] for line in books} - {"put", "accepted"}
        store = open_store(self.home)
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
        """Slopes of what was measured while the server was left alone, after the first fifth of that."""
        kept = self.samples[len(self.samples) // 5 :]
        if len(kept) < 4:
            return {}
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
def soaking(count: int, seed: int, pause_s: float) -> Iterator[Soak]:
    """Give a soak in a folder that is gone afterwards, with its processes."""
    with tempfile.TemporaryDirectory(prefix="edgefl-soak-") as root:
        soak = Soak(Path(root), count, seed, pause_s)
        try:
            yield soak
        finally:
            for process in (soak.server, *soak.crowd):
                process.kill()


def sound(facts: dict[str, Any]) -> bool:
    """Whether nothing was lost or came twice, and the books agree."""
    return not facts["lost"] and not facts["twice"] and not facts["refused"] and all(
        facts[name] for name in ("chain_holds", "rounds_forward", "log_unbroken", "aggregated")
    )  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.option("--minutes", metavar="N", default=30.0, help="How long members send; 480 for eight hours.")
@click.option("--members", "count", metavar="N", default=20, help="Members, five to a process.")
@click.option("--kill-server", metavar="S", default=45.0, help="Seconds between kills of the server, on average.")
@click.option("--kill-members", metavar="S", default=20.0, help="Seconds between kills of a process of members.")
@click.option("--pause", metavar="S", default=1.0, help="Longest pause of a member's process between two turns.")
@click.option("--seed", metavar="N", default=68, help="Of kills and the network.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--role", nargs=1, hidden=True)
@click.argument("words", nargs=-1, metavar="")
def main(
    minutes: float, count: int, kill_server: float, kill_members: float, pause: float, seed: int, as_json: bool,
    role: str | None, words: tuple[str, ...],
) -> None:  # fmt: skip
    """Soak a coordinator and its members; status 1 where something was lost, or came twice."""
    if role is not None:
        roles: dict[str, Callable[[], None]] = {
            "serve": lambda: serve(Path(words[0])),
            "members": lambda: members([*map(Path, words[2:])], int(words[0]), float(words[1]), drain=False),
            "drain": lambda: members([*map(Path, words[2:])], int(words[0]), float(words[1]), drain=True),
        }
        roles[role]()
        return
    with soaking(count, seed, pause) as soak:
        soak.run(60 * minutes, kill_server, kill_members)
        soak.settle()
        facts = {**soak.reckon(), "kills": dict(soak.kills), "network": dict(soak.proxy.fates), **soak.measured()}
    print(json.dumps(facts) if as_json else "\n".join(f"{name:16} {value}" for name, value in facts.items()))
    sys.exit(0 if sound(facts) else 1)


if __name__ == "__main__":
    main()

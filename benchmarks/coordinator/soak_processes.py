"""The processes of a soak (`soak.py`): a server whose worker chains digests, and members that put and send replies.

python -m benchmarks.coordinator.soak_processes serve HOME
python -m benchmarks.coordinator.soak_processes members|drain SEED PAUSE_S FOLDER...
"""

import contextlib
import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

VALUES = 1000  # float32 of a reply


def serve(home: Path) -> None:
    """A server's process."""
    from edgefl_coordinator.settings import CoordinatorHome
    from edgefl_coordinator.store.coordinator import open_coordinator
    from edgefl_coordinator.web import service

    coordinator = open_coordinator(CoordinatorHome(home), wait_s=10.0, joins=True)
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


def main(role: str, *words: str) -> None:
    """Be one of them."""
    if role == "serve":
        serve(Path(words[0]))
    else:
        members([*map(Path, words[2:])], int(words[0]), float(words[1]), drain=role == "drain")


if __name__ == "__main__":
    main(*sys.argv[1:])

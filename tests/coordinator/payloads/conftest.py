"""A federation of a small network whose payloads travel as blobs: they are a little above 1 MiB."""

import functools
import gc
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select
from tests.coordinator.kept_blobs import blob_names

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobResult, read_job, write_result
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import open_coordinator, wall_clock_ms
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.service import serve
from edgefl_exchange.enrolment import enrol, trust_certificate
from edgefl_exchange.https import HttpsTransport
from edgefl_exchange.member import Member
from edgefl_exchange.membership import ca_file, read_ca
from edgefl_exchange.outbox import Outbox
from edgefl_exchange.transport import Answer, Request
from edgefl_protocol import Payload
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.envelopes.blob import BlobReference, new_blob_id, new_file_key, seal_chunks
from edgefl_protocol.messages.blob_messages import BlobPut, BlobPutReply
from edgefl_protocol.messages.requests import ReplyRequest
from edgefl_protocol.records.invite import decode_invite

CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.2, 0.2, 0.2], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip
KEY = bytes(32)


def weights(seed: int, size: int = 350_000) -> dict[str, np.ndarray]:
    return {"backbone.conv": drawn(seed, size)}


@functools.cache
def drawn(seed: int, size: int) -> np.ndarray:
    found = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    found.flags.writeable = False
    return found


def reply_of(seed: int, size: int = 350_000) -> Payload:
    digest = hashlib.sha256(str(seed).encode()).hexdigest()
    return Payload(weights(seed, size), {"site_sha256": digest, "n_train": 10})


def averaging_worker(folder: Path, timeout_s: float, rounds: int = 3, values: int = 350_000) -> None:
    """Federated averaging in six lines: the state is the mean of the replies, and everybody gets it."""
    job = read_job(folder)
    state = Payload.from_bytes(read_bounded(job.state, 2**30)) if job.state else Payload(weights(0, values))
    if job.kind == "aggregate":
        sent = [Payload.from_bytes(read_bounded(path, 2**30), 2**30) for _, path in sorted(job.replies.items())]
        mean = np.mean([one.arrays["backbone.conv"] for one in sent], axis=0, dtype=np.float64)
        state = Payload({"backbone.conv": mean.astype(np.float32)}, {})
    made = Payload(state.arrays, {"phase": "train", "round": 1, "rounds": rounds}).to_bytes()
    left = b"" if job.kind == "broadcast" else state.to_bytes()
    write_result(folder, JobResult(left, ("train",) * rounds, dict.fromkeys(job.sites, made)))


@pytest.fixture
def federation(make_coordinator) -> Any:
    return make_coordinator(
        task={"method": "fedclf", "shares_maps": False, "backbone": CNN},
        rounds={"quorum_target": 2, "quorum_min": 2, "min_cohort": 1, "allow_small_cohort": True},
        limits={"reply_bytes": 8 * 2**20},
    )


class Wire:
    """A member's transport into the ASGI application; `faults` misbehave once each, in order."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.faults: list[Callable[[Request, Callable[[Request], Answer]], Answer] | None] = []
        self.sent: list[Request] = []

    def send(self, request: Request) -> Answer:
        self.sent.append(request)
        fault = self.faults.pop(0) if self.faults else None
        return self._pass(request) if fault is None else fault(request, self._pass)

    def _pass(self, request: Request) -> Answer:
        target = request.path + (f"?{request.query}" if request.query else "")
        answer = self.client.request(request.method, target, request.body)
        return Answer(status=answer.status, body=answer.body)

    @property
    def pieces(self) -> int:
        return sum(request.path == "/v1/blob" for request in self.sent)


def joined(coordinator: Any, folder: Path, name: str, wire: Wire) -> Path:
    """The folder of an approved member."""
    folder.mkdir(mode=0o700)
    invite = decode_invite(
        OPERATIONS["invite"](coordinator, {"name": name, "role": "site", "hours": 1})["invite"], coordinator.clock()
    )
    found = enrol(folder, invite, wire, suite=1, clock_ms=coordinator.clock, sleep=lambda _: None)
    OPERATIONS["approve"](coordinator, {"name": name, "fingerprint": found.fingerprint})
    return folder


@pytest.fixture
def sites(federation, asgi, tmp_path) -> Iterator[list[Any]]:
    """Two members in the first round; `open()` opens one anew, as after a restart."""
    client, found = asgi(federation), []
    for name in ("clinic-a", "clinic-b"):
        wire = Wire(client)
        found.append(Site(federation, joined(federation, tmp_path / name, name, wire), wire))
    OPERATIONS["start"](federation, {})
    assert step(federation, averaging_worker)
    yield found
    for site in found:
        site.close()


class Site:
    def __init__(self, coordinator: Any, folder: Path, wire: Wire) -> None:
        self.coordinator, self.folder, self.wire = coordinator, folder, wire
        self.member: Member | None = None

    def open(self) -> Member:
        self.close()
        self.member = Member(
            self.folder, lambda _: self.wire, clock_ms=self.coordinator.clock, sleep=lambda _: None, lock_wait_s=1
        )
        return self.member

    def close(self) -> None:
        if self.member is not None:
            self.member.identity.close()
            self.member = None

    def outbox(self) -> Outbox:
        return Outbox(self.folder / "outbox.sqlite3", KEY)

    def deliver(self) -> list[Any]:
        member = self.open()
        with self.outbox() as outbox:
            return member.deliver(outbox, member.task())


def files(coordinator: Any) -> set[str]:
    return blob_names(coordinator.store)


def rows(coordinator: Any, table: Any) -> list[Any]:
    with coordinator.store.transaction() as connection:
        return list(connection.execute(select(table)))


class Blob:
    """A payload sealed as a member would, for tests that speak the protocol themselves."""

    def __init__(self, data: bytes) -> None:
        key = new_file_key()
        self.sealed = b"".join(seal_chunks([data], key))
        sha256 = hashlib.sha256(self.sealed).hexdigest()
        self.reference = BlobReference(blob=new_blob_id(), size=len(self.sealed), sha256=sha256, key=key)

    def put(self, member: Any, offset: int, end: int) -> Any:
        """Send the piece from `offset` to `end`: what is there then, or the refusal."""
        one = self.reference
        piece = BlobPut(blob=one.blob, size=one.size, sha256=one.sha256, offset=offset, data=self.sealed[offset:end])
        answer = member.call("blob", piece.to_payload())
        return BlobPutReply.from_payload(answer).have if isinstance(answer, Payload) else answer

    def put_all(self, member: Any, piece: int = 2**20) -> None:
        """Send what is missing."""
        have = self.put(member, 0, 0)
        while have < len(self.sealed):
            have = self.put(member, have, have + piece)

    def reply(self, member: Any, number: int = 1, idem: str = "work-item-00000001", **changes: Any) -> Any:
        reference = BlobReference(**{**vars(self.reference), **changes})
        return member.call("reply", ReplyRequest(idem=idem, reply=reference).to_payload(), rnd=number)


@pytest.fixture
def pair(federation, tools) -> list[Any]:
    """Two members without a network, in the first round."""
    found = [tools.quick_member(federation, name) for name in ("clinic-a", "clinic-b")]
    OPERATIONS["start"](federation, {})
    assert step(federation, averaging_worker)
    return found


@pytest.fixture
def collected() -> Iterator[None]:
    """What cut connections leave is collected when all of a test is gone, and not in a later one."""
    yield
    gc.collect()


@pytest.fixture
def served(collected, folder, tools, monkeypatch) -> Iterator[Any]:
    """A coordinator on a port of 127.0.0.1, on the real clock, in the first round."""
    home, ready = CoordinatorHome(folder / "served"), threading.Event()
    table = tools.settings_table(
        task={"method": "fedclf", "shares_maps": False, "backbone": CNN}, limits={"reply_bytes": 8 * 2**20}, port=0,
        rounds={"deadline_s": 3600},
    )  # fmt: skip
    make_home(home, table)
    coordinator = open_coordinator(home, clock=wall_clock_ms)
    port: list[int] = []
    stop: list[Any] = []

    def opened(number: int) -> None:
        port.append(number)
        ready.set()

    monkeypatch.setattr("edgefl_coordinator.web.service._Server", remembering(stop))
    thread = threading.Thread(target=serve, args=(coordinator, opened, averaging_worker), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield coordinator, port[0]
    stop[0].should_exit = stop[0].force_exit = True  # connections that a test cut are not waited for
    thread.join(30)
    coordinator.store.close()


def remembering(made: list[Any]) -> Any:
    """Keep the server that is made, to stop it."""
    from edgefl_coordinator.web.service import _Server

    def make(*arguments: Any) -> Any:
        made.append(_Server(*arguments))
        return made[0]

    return make


def join(coordinator: Any, port: int, folder: Path) -> Path:
    """The folder of an approved member, enrolled over TLS."""
    folder.mkdir(mode=0o700)
    told = OPERATIONS["invite"](coordinator, {"name": "clinic-a", "role": "site", "hours": 1})
    invite = decode_invite(told["invite"], wall_clock_ms())
    url = f"https://127.0.0.1:{port}"
    own_ca = trust_certificate(folder, invite, read_ca(coordinator.store.home.tls / "ca.pem"))
    at_port = type(invite)(**{**vars(invite), "url": url})
    found = enrol(folder, at_port, HttpsTransport(url, folder / "ca.pem"), own_ca=own_ca)
    OPERATIONS["approve"](coordinator, {"name": "clinic-a", "fingerprint": found.fingerprint})
    assert ca_file(folder, found) is not None
    return folder


@pytest.fixture
def lab() -> SimpleNamespace:
    return SimpleNamespace(
        Blob=Blob, Wire=Wire, Site=Site, CNN=CNN, KEY=KEY, weights=weights, reply_of=reply_of, files=files, rows=rows,
        averaging_worker=averaging_worker, joined=joined, join=join,
    )  # fmt: skip

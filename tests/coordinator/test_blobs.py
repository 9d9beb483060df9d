"""Payloads above one envelope's cap, between a real member and a real coordinator in one process."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from edgefl_client.exchange import Answer, Member, Outbox, Request, Unavailable, enrol
from edgefl_client.exchange import blobs as member_blobs
from edgefl_client.exchange import member as member_module
from edgefl_coordinator import blobs, routes, uploads
from edgefl_coordinator.aggregation import next_job, step
from edgefl_coordinator.jobs import JobResult, read_job, write_result
from edgefl_coordinator.operations import OPERATIONS
from edgefl_coordinator.schema import audit, offers, replies
from edgefl_coordinator.schema import uploads as upload_table
from edgefl_protocol import Payload
from edgefl_protocol.blob import BlobReference, new_blob_id, new_file_key, seal_chunks, sealed_size
from edgefl_protocol.blob_messages import BlobGet, BlobGetReply, BlobPut, BlobPutReply
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.errors import BlobError, StorageError
from edgefl_protocol.invite import decode_invite
from edgefl_protocol.messages import BroadcastRequest, Refusal, ReplyRequest

CNN = {
    "name": "timm:resnet18", "architecture": "resnet18", "image_px": 72, "width": 512, "mean": [0.5, 0.5, 0.5],
    "std": [0.2, 0.2, 0.2], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip
SMALL = 2**20  # in place of 32 MiB, so that a test of every fault takes seconds
KEY = bytes(32)


def weights(seed: int, size: int = 600_000) -> dict[str, np.ndarray]:
    return {"backbone.conv": np.random.default_rng(seed).normal(size=size).astype(np.float32)}


def reply_of(seed: int, size: int = 600_000) -> Payload:
    digest = hashlib.sha256(str(seed).encode()).hexdigest()
    return Payload(weights(seed, size), {"site_sha256": digest, "n_train": 10})


def averaging_worker(folder: Path, timeout_s: float) -> None:
    """Federated averaging in six lines: the state is the mean of the replies, and everybody gets it."""
    job = read_job(folder)
    state = Payload.from_bytes(read_bounded(job.state, 2**30)) if job.state else Payload(weights(0))
    if job.kind == "aggregate":
        sent = [Payload.from_bytes(read_bounded(path, 2**30), 2**30) for _, path in sorted(job.replies.items())]
        mean = np.mean([one.arrays["backbone.conv"] for one in sent], axis=0, dtype=np.float64)
        state = Payload({"backbone.conv": mean.astype(np.float32)}, {})
    made = Payload(state.arrays, {"phase": "train", "round": 1, "rounds": 3}).to_bytes()
    left = b"" if job.kind == "broadcast" else state.to_bytes()
    write_result(folder, JobResult(left, ("train", "train", "train"), dict.fromkeys(job.sites, made)))


@pytest.fixture
def small_envelopes(monkeypatch) -> None:
    monkeypatch.setattr(routes, "MAX_INLINE_BYTES", SMALL)
    monkeypatch.setattr(member_module, "MAX_INLINE_BYTES", SMALL)


@pytest.fixture
def federation(make_coordinator, small_envelopes) -> Any:
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
    return {path.name for path in coordinator.store.home.blobs.iterdir()}


def rows(coordinator: Any, table: Any) -> list[Any]:
    with coordinator.store.transaction() as connection:
        return list(connection.execute(select(table)))


def test_a_round_of_large_payloads(federation, sites) -> None:
    """docs/security.md 2.2: above the cap both ways go as blobs, and nobody above the exchange knows."""
    for seed, site in enumerate(sites):
        broadcast = site.open().broadcast(1)
        assert broadcast.arrays["backbone.conv"].tobytes() == weights(0)["backbone.conv"].tobytes()
        with site.outbox() as outbox:
            outbox.put("skin", "reply", reply_of(seed).to_bytes(), 0)
        (done,) = site.deliver()
        assert (done.outcome, done.bytes) == ("accepted", len(reply_of(seed).to_bytes()))
        assert not list((site.folder / "parts").iterdir())
        assert not list((site.folder / "outbox.sqlite3.files").iterdir())
        assert not rows(federation, upload_table)
    stored = [Payload.from_bytes(federation.store.get_blob(row.blob), 2**23) for row in rows(federation, replies)]
    assert {one.to_bytes() for one in stored} == {reply_of(0).to_bytes(), reply_of(1).to_bytes()}
    assert step(federation, averaging_worker)
    expected = np.mean([weights(0)["backbone.conv"], weights(1)["backbone.conv"]], axis=0, dtype=np.float64)
    for site in sites:
        got = site.open().broadcast(2).arrays["backbone.conv"]
        assert got.tobytes() == expected.astype(np.float32).tobytes()
        site.open().broadcast(2)
    # the past is gone: a state, a broadcast of each, nothing else
    assert len(files(federation)) == 3
    assert {row.blob for row in rows(federation, offers)} <= files(federation)

"""One real coordinator and one real device, without a network between them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.sealed_requests import handle
from edgefl_exchange.enrolment import enrol
from edgefl_exchange.member import Member
from edgefl_exchange.transport import Answer, Request
from edgefl_protocol import SigningKey
from edgefl_protocol.envelopes.key_files import signing_key_from_pem
from edgefl_protocol.messages.requests import ROUTES
from edgefl_protocol.records.coordinator_records import make_time
from edgefl_protocol.records.invite import decode_invite
from edgefl_protocol.records.root import Root, make_root

NOW_MS = 1_790_000_000_000
DAY_MS = 24 * 3600 * 1000
PATHS = {route.path: route for route in ROUTES.values()}
TABLE = {
    "federation": "skin", "public_url": "https://127.0.0.1:8443", "suite": 1,
    "task": {"method": "fedevprompt", "name": "nevus", "classes": ["nevus", "other"], "maps_per_class": 2,
             "backbone": {"image_px": 24, "patch": 12}},
    "rounds": {"count": 2, "quorum_min": 1, "quorum_target": 4, "deadline_s": 3600, "start": "manual"},
}  # fmt: skip


class World:
    """One coordinator and one device, without a network between them. `fault` may stand in the way."""

    def __init__(self, folder: Path) -> None:
        self.now_ms = NOW_MS
        self.home = CoordinatorHome(folder / "coordinator")
        make_home(self.home, TABLE, now_ms=NOW_MS)
        self.coordinator: Coordinator = open_coordinator(self.home, clock=lambda: self.now_ms)
        self.device = folder / "device"
        self.device.mkdir(mode=0o700)
        self.fault: Callable[[Request], Answer | None] | None = None
        self.answers = 0

    def send(self, request: Request) -> Answer:
        found = self.fault(request) if self.fault is not None else None
        return found if found is not None else self.answer(request)

    def answer(self, request: Request) -> Answer:
        coordinator = self.coordinator
        if request.path == "/v1/keys" and request.method == "GET":
            return Answer(status=200, body=coordinator.key_record())
        if request.path == "/v1/root":
            chain = coordinator.root_chain()
            return Answer(status=200 if chain else 404, body=chain)
        if request.path == "/v1/time":
            nonce = request.query.removeprefix("nonce=")
            return Answer(status=200, body=make_time(coordinator.keys.signing, nonce, self.now_ms))
        found = handle(coordinator, PATHS[request.path], request.body)
        self.answers += found.status == 200
        return Answer(status=found.status, body=found.body)

    def member(self, folder: Path | None = None) -> Member:
        return Member(folder or self.device, lambda _: self, clock_ms=lambda: self.now_ms, sleep=lambda _: None)

    def join(self, folder: Path | None = None, name: str = "device-1") -> None:
        facts = OPERATIONS["invite"](self.coordinator, {"name": name, "role": "device", "hours": 1})
        invite = decode_invite(facts["invite"], self.now_ms)
        found = enrol(folder or self.device, invite, self, clock_ms=lambda: self.now_ms, suite=1)
        OPERATIONS["approve"](self.coordinator, {"name": name, "fingerprint": found.fingerprint})

    def root_key(self) -> SigningKey:
        return signing_key_from_pem((self.home.keys / "root.key").read_bytes())

    def publish_root(self, version: int, **changes: Any) -> Root:
        key = self.root_key()
        fields = {
            "federation": "skin", "version": version, "issued_ms": self.now_ms,
            "expires_ms": self.now_ms + 365 * DAY_MS, "root_keys": (key.public_key,),
            "coordinators": (self.coordinator.keys.signing.public_key,), **changes,
        }  # fmt: skip
        root = Root(**fields)
        (self.home.root / "set").write_bytes(make_root(root, [key]))
        OPERATIONS["publish_root"](self.coordinator, {"path": str(self.home.root / "set")})
        return root


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    found.join()
    yield found
    found.coordinator.store.close()

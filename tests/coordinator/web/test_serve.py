"""The served coordinator, a process of its own over TLS on 127.0.0.1: checks 14, 39, 43 and 55."""

import base64
import contextlib
import gc
import http.client
import json
import socket
import sqlite3
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select
from tests.coordinator.conftest import settings_table
from tests.coordinator.kept_blobs import blob_names
from tests.coordinator.web.served import Served, cpu_s, memory_kib

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.founding.folder import make_home
from edgefl_coordinator.settings import CoordinatorHome
from edgefl_coordinator.store import audit
from edgefl_coordinator.store.audit_chain import read_head
from edgefl_coordinator.store.coordinator import open_coordinator
from edgefl_coordinator.store.tables import replies
from edgefl_coordinator.web import service, tls
from edgefl_coordinator.web.door import Door
from edgefl_coordinator.web.sealed_requests import UNAUTHENTICATED
from edgefl_protocol import Payload, generate_signing_key
from edgefl_protocol.messages.requests import Refusal, ReplyReply, ReplyRequest, TaskReply


@pytest.fixture
def serve(make_coordinator: Callable[..., Any], clock: Any) -> Iterator[Callable[..., Served]]:
    """Start a server on an existing home; `clock` then runs with the wall clock."""
    running: list[Served] = []

    def start(home: CoordinatorHome, *more: str) -> Served:
        running.append(Served(home, *more))
        return running[-1]

    yield start
    for served in running:
        if served.process.poll() is None:
            served.close()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server without members, for tests that never get as far as the store."""
    home = CoordinatorHome(tmp_path_factory.mktemp("standing") / "home")
    make_home(home, settings_table(port=0))
    served = Served(home)
    yield served
    served.close()


@pytest.fixture
def prepared(make_coordinator: Callable[..., Any], clock: Any, tools: Any) -> Callable[..., tuple[Any, list[Any]]]:
    """A home with approved members and an open round, closed again so that `serve` can have it."""

    def prepare(members: int, **changes: Any) -> tuple[Any, list[Any]]:
        clock.now_ms = time.time_ns() // 1_000_000
        rounds = {"quorum_target": 1000, "deadline_s": 3600, **changes.pop("rounds", {})}
        coordinator = make_coordinator(port=0, rounds=rounds, **changes)
        crowd = [tools.quick_member(coordinator, f"clinic-{number:03}") for number in range(members)]
        tools.start_rounds(coordinator)
        coordinator.store.close()
        return coordinator, crowd

    return prepare


def send(served: Served, member: Any, cty: str, body: bytes) -> Any:
    from edgefl_protocol.messages.requests import ROUTES

    status, answer = served.post(ROUTES[cty].path, body)
    signed, payload = member.open(body, answer)
    assert signed == status
    return Refusal.from_payload(payload) or payload


def test_a_round_trip_over_tls(prepared, serve, tools) -> None:
    """A member asks for the task and replies over real TLS; the operator sees it; SIGTERM ends the server."""
    coordinator, (member,) = prepared(1)
    served = serve(coordinator.store.home)
    assert TaskReply.from_payload(send(served, member, "task", member.envelope("task", Payload()))).state == "open"
    message = ReplyRequest(idem="work-item-00000001", reply=tools.maps_payload()).to_payload()
    answer = send(served, member, "reply", member.envelope("reply", message, rnd=1))
    assert ReplyReply.from_payload(answer).accepted
    times = [line.split()[0] for line in served.lines if "the server started" in line or "listening on" in line]
    assert len(times) == 2 and times == sorted(times)
    started_at, listens_at = (next(i for i, line in enumerate(served.lines) if words in line)
                              for words in ("the server started", "listening on"))  # fmt: skip
    assert started_at < listens_at
    assert served.home.socket.stat().st_mode & 0o777 == 0o600
    status = served.operate("status")
    assert (status["round"], status["replies"], status["members"][0]["replied"]) == (1, 1, True)
    started = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", served.port), timeout=10) as plain,
        served.context().wrap_socket(plain, server_hostname="localhost") as idle,
    ):
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in idle.recv(100)
        served.close()  # an idle member does not hold it up
    assert served.process.returncode == 0
    assert time.monotonic() - started < 8
    assert "Cancel" not in "".join(served.lines)
    assert "INFO the server stops; the federation goes on when it is served again" in "".join(served.lines)
    assert not served.home.socket.exists()
    with contextlib.closing(open_coordinator(coordinator.store.home).store) as store, store.transaction() as connection:
        last, rows = audit.last(connection), audit.count(connection)
    assert last is not None and last["event"] == "stop"  # `status` tells since when no server runs
    signed = [read_head(line).rows for line in served.home.heads.read_bytes().splitlines()]
    assert len(signed) >= 2 and signed[-1] == rows  # one when it starts, one that covers its last row


def test_what_was_changed_by_hand_is_not_served(coordinator, tools) -> None:
    """Another signing key, or a setting that never changes: before anything is signed or a member is answered."""
    service._Leader(coordinator, tools.toy_worker).begin()  # it was served once
    settings, own = coordinator.settings, coordinator.keys.signing
    coordinator.keys.signing = generate_signing_key()
    with pytest.raises(OperatorError, match="is not the key"):
        service.serve(coordinator, pytest.fail)
    coordinator.keys.signing = own
    coordinator.settings = msgspec.structs.replace(settings, task=msgspec.structs.replace(settings.task, epochs=3))
    with pytest.raises(OperatorError, match=r"task\.epochs is 3, but the federation began with 1"):
        service.serve(coordinator, pytest.fail)


def test_only_processes_of_one_folder_share_a_port(make_coordinator, monkeypatch) -> None:
    """docs/guides/postgresql.md 3: on a shared database. Neither another federation nor a copy of this one gets any of
    its connections, which the system would deal to it."""
    ours, stranger = make_coordinator("ours", port=0), make_coordinator("stranger", port=0)
    for one in (ours, stranger):
        monkeypatch.setattr(one.store.database, "shared", True)
    with service._listening(ours, Door(9, 9)) as first:
        where = first.getsockname()
        for one in (ours, stranger):
            one.settings = msgspec.structs.replace(one.settings, port=where[1])
        with service._listening(ours, Door(9, 9)) as second:
            assert second.getsockname() == where
        told = "already in use; stop each serve .* that runs an older version; if another program has the port: "
        with pytest.raises(OperatorError, match=told), service._listening(stranger, Door(9, 9)):
            pass  # an older version holds no folder, so it looks like a stranger
    with service._listening(stranger, Door(9, 9)) as later:
        assert later.getsockname() == where


class LaxSsl:
    """The module `ssl` of a system whose contexts would still speak TLS 1.0."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ssl, name)

    @staticmethod
    def SSLContext(protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
        return context


def test_the_servers_context_states_its_oldest_version(coordinator, monkeypatch) -> None:
    """Check 43, server side: TLS 1.2 whatever the interpreter's default is, in the context that serves."""
    home = coordinator.store.home
    monkeypatch.setattr(tls, "ssl", LaxSsl())
    assert tls.ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).minimum_version == ssl.TLSVersion.TLSv1  # the test can fail
    for context in (
        tls.server_context(home.tls / "server.pem", home.tls / "server.key"),
        service._config(coordinator).ssl,
    ):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.maximum_version in (ssl.TLSVersion.MAXIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_3)


def test_tls(standing) -> None:
    """Check 43, server side: TLS 1.2 and 1.3 only; no plain HTTP; the name is checked by whoever connects."""
    served = standing
    address = ("127.0.0.1", served.port)
    versions = {"TLSv1": False, "TLSv1_1": False, "TLSv1_2": True, "TLSv1_3": True}
    for name, welcome in versions.items():
        context = served.context()
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # so that it is the server who refuses
        with pytest.warns() if not welcome else _nothing():
            context.minimum_version = context.maximum_version = ssl.TLSVersion[name]
        with socket.create_connection(address, timeout=10) as plain:
            if welcome:
                with context.wrap_socket(plain, server_hostname="localhost") as wrapped:
                    assert wrapped.version() == name.replace("_", ".")
            else:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    context.wrap_socket(plain, server_hostname="localhost")
    with socket.create_connection(address, timeout=10) as plain, pytest.raises(ssl.SSLCertVerificationError):
        served.context().wrap_socket(plain, server_hostname="example.org")
    with socket.create_connection(address, timeout=10) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            answer = plain.recv(100)
        except ConnectionError:
            answer = b""
        assert not answer.startswith(b"HTTP")
    assert served.post("/v1/task", b"hello") == (401, UNAUTHENTICATED)


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("chunk", [b"10000\r\n" + bytes(0x10000) + b"\r\n", b"1\r\nx\r\n" * 4096])
def test_floods_cost_nothing(standing, chunk) -> None:
    """Check 39: chunked floods (large chunks, 1-byte chunks) and announced giants: closed within 8 MB sent, RSS growth
    below 8 MB, below 0.5 s of CPU."""
    served = standing
    served.post("/v1/task", b"hello")
    memory, cpu = memory_kib(served.process.pid), cpu_s(served.process.pid)
    for head in (b"Transfer-Encoding: chunked", b"Content-Length: 629145600"):
        with (
            socket.create_connection(("127.0.0.1", served.port), timeout=20) as plain,
            served.context().wrap_socket(plain, server_hostname="localhost") as one,
        ):
            one.sendall(b"POST /v1/task HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
            sent = 0
            try:
                while sent < 64 * 2**20:
                    one.sendall(chunk)
                    sent += len(chunk)
            except OSError:
                pass
            assert sent < 8 * 2**20
    assert cpu_s(served.process.pid) - cpu < 0.5
    assert memory_kib(served.process.pid) - memory < 8 * 1024


# A server killed between accept and handshake leaves http.client with a socket that it dropped without closing.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.smaller), pytest.param(20, marks=pytest.mark.slow)]
)
def test_kills_in_a_round(prepared, serve, tools, kills) -> None:
    """Check 55: kill −9 while members upload, 2 times and 20 times: no acknowledged upload lost or counted twice,
    nothing stale is left, and it listens again after less than 5 s of the processor (other work would lengthen others).
    """
    coordinator, crowd = prepared(members := 5 * kills)
    home, payloads = coordinator.store.home, {m.name: tools.maps_payload(i) for i, m in enumerate(crowd)}
    waiting, acknowledged = list(crowd), {}
    for turn in range(kills):
        served = serve(home)
        assert served.start_s < 5
        timer = threading.Timer(0.004 * (turn % 7), served.process.kill)
        before = len(acknowledged)
        while waiting:
            if len(acknowledged) == before + turn % 3:
                timer.start()  # strikes while the next upload is under way
                before = -1000
            member = waiting[0]
            message = ReplyRequest(idem=f"item-of-{member.name}-1", reply=payloads[member.name]).to_payload()
            body = member.envelope("reply", message, rnd=1)  # a retry is a new envelope with the same idem
            try:
                answer = send(served, member, "reply", body)
            except (OSError, http.client.HTTPException):
                break
            assert isinstance(answer, Payload), answer
            acknowledged[member.name] = ReplyReply.from_payload(answer)
            waiting.pop(0)
        timer.join()
        served.kill()
    gc.collect()  # such a socket is collected here and not in another test
    assert len(acknowledged) >= kills - 1
    with contextlib.closing(open_coordinator(home).store) as store:
        with store.transaction() as connection:
            rows = connection.execute(select(replies)).all()
        found = {row.skid: row for row in rows}
        assert len(found) == len(rows)
        for member in crowd:
            if member.name in acknowledged:
                row = found[member.signing.key_id]
                assert row.accepted_ms == acknowledged[member.name].first_answer_ms
                assert Payload.from_bytes(store.get_blob(row.blob)) == payloads[member.name]
        assert len(rows) - len(acknowledged) in (0, 1)  # at most one stored whose answer was cut
        assert len(blob_names(store)) == len(rows) + members + 1  # replies, broadcasts, state: no orphans


def test_canaries(make_coordinator, clock, serve, tools, folder) -> None:
    """Check 14: token, private keys, nonce, payload and a patient's name: 0 hits in log and text columns."""
    clock.now_ms = time.time_ns() // 1_000_000
    coordinator = make_coordinator(port=0, rounds={"quorum_target": 1000, "deadline_s": 3600})
    token = tools.token_of(coordinator, "clinic-a")
    coordinator.store.close()
    home = coordinator.store.home
    served = serve(home)
    member = tools.Member(coordinator, "clinic-a")
    enrol = member.enrolment(token)
    answer = send(served, member, "enrol", member.envelope("enrol", enrol.to_payload()))
    nonce = answer.scalars["nonce"]
    proof = Payload({}, {"idem": "p" * 16, "nonce": nonce})
    fingerprint = send(served, member, "enrol-proof", member.envelope("enrol-proof", proof)).scalars["fingerprint"]
    served.operate("approve", name="clinic-a", fingerprint=str(fingerprint))
    served.close()
    again = make_coordinator()
    tools.start_rounds(again)
    again.store.close()
    lines = served.lines
    served = serve(home, "--log-format", "json")
    patient = "Erika-Mustermann-1964"
    canary = tools.maps_payload()
    for bad in (
        Payload({patient: canary.arrays["maps.0"]}, canary.scalars),
        Payload(canary.arrays, {**canary.scalars, "patient": patient}),
    ):
        message = ReplyRequest(idem="work-item-00000001", reply=bad).to_payload()
        refused = send(served, member, "reply", member.envelope("reply", message, rnd=1))
        assert isinstance(refused, Refusal) and refused.code == "bad_contribution"
    message = ReplyRequest(idem="work-item-00000001", reply=canary).to_payload()
    assert isinstance(send(served, member, "reply", member.envelope("reply", message, rnd=1)), Payload)
    enrol_again = member.envelope("enrol", enrol.to_payload(), pth="/v1/reply")
    assert served.post("/v1/enrol", enrol_again)[0] == 401
    served.post("/v1/task", patient.encode())
    served.post(f"/v1/{patient}", b"")
    process_list = Path(f"/proc/{served.process.pid}/cmdline").read_bytes()
    served.close()
    in_the_invite = base64.urlsafe_b64encode(token).rstrip(b"=")
    secrets = [
        token, in_the_invite, coordinator.keys.signing.seed, coordinator.keys.sealing.secret, coordinator.keys.secret,
        bytes.fromhex(str(nonce)), canary.arrays["maps.0"].tobytes(), patient.encode(),
    ]  # fmt: skip
    columns = b"".join(text_columns(home.database))
    for place in ("".join([*lines, *served.lines]).encode(), process_list, columns):
        assert place
        for secret in secrets:
            assert secret not in place and secret.hex().encode() not in place
    assert b"refused before the signature" in "".join(served.lines).encode()  # the log is on
    assert "clinic-a was approved\n" in "".join(lines)
    told = [json.loads(line) for line in served.lines]
    assert {"event": "refused", "subject": "clinic-a", "code": "bad_contribution", "level": "warning"}.items() <= (
        next(one for one in told if one.get("event") == "refused").items()
    )


def text_columns(path: Path) -> Iterator[bytes]:
    """Every text value of every table."""
    connection = sqlite3.connect(path)
    try:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            for row in connection.execute(f"SELECT * FROM {table}"):
                yield from (value.encode() for value in row if isinstance(value, str))
    finally:
        connection.close()

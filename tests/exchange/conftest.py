"""A member of a coordinator in memory, and the wire between them."""

import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.exchange.in_memory import HOUR_MS, NOW_MS, FakeCoordinator, Wire, cut_answer, lost_request, reply_of
from tests.exchange.tls_server import Handler, Server, certificate, good

from edgefl_exchange.caller import Caller
from edgefl_exchange.enrolment import enrol
from edgefl_exchange.member import Member
from edgefl_exchange.membership import Membership


@pytest.fixture(scope="session")
def net() -> SimpleNamespace:
    return SimpleNamespace(
        NOW_MS=NOW_MS, HOUR_MS=HOUR_MS, Wire=Wire, cut_answer=cut_answer, lost_request=lost_request,
        FakeCoordinator=FakeCoordinator, reply_of=reply_of,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts nothing is waited for; a test of the waits gives a `sleep` of its own."""
    for asks in (Member.__init__, enrol, Caller.__init__):
        monkeypatch.setitem(asks.__kwdefaults__, "sleep", lambda _: None)


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "member"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def wire(coordinator: FakeCoordinator) -> Wire:
    return Wire(coordinator)


@pytest.fixture
def joined(coordinator: FakeCoordinator, folder: Path) -> Membership:
    """An enrolled and approved device."""
    membership = enrol(folder, coordinator.invite(), coordinator, clock_ms=lambda: NOW_MS, sleep=lambda _: None)
    coordinator.approve()
    return membership


@pytest.fixture
def member(joined: Membership, folder: Path, wire: Wire) -> Iterator[Member]:
    with Member(folder, lambda _: wire, clock_ms=lambda: NOW_MS, sleep=lambda _: None, lock_wait_s=0.2) as one:
        yield one


@pytest.fixture
def serve():
    running = []

    def start(pem=None, key=None, behave=good, newest=None):
        server = Server(("127.0.0.1", 0), Handler)
        server.seen, server.behave = [], behave
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem, key)
            if newest is not None:
                context.set_ciphers("ALL:@SECLEVEL=0")
                with pytest.warns(DeprecationWarning):
                    context.minimum_version = ssl.TLSVersion.TLSv1_1
                    context.maximum_version = newest
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        return server

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca_pem, _, ca, ca_pin = certificate(folder, "authority", ca=True)
    pem, key, _, pin = certificate(folder, "server", issuer=ca)
    return {"folder": folder, "ca": ca_pem, "issuer": ca, "ca_pin": ca_pin, "pem": pem, "key": key, "pin": pin}

"""A TCP proxy that does what bad networks do, between a device and a coordinator over TLS on the loopback interface.

Source: docs/security.md, reliability table (the faults are those of toxiproxy), check 63.
"""

import contextlib
import gc
import http.server
import socket
import ssl
import struct
import threading
import time

import pytest
from tests.exchange.tls_server import certificate

from edgefl_exchange.caller import Caller
from edgefl_exchange.enrolment import enrol
from edgefl_exchange.errors import Unavailable
from edgefl_exchange.https import Deadlines, HttpsTransport
from edgefl_exchange.member import Member
from edgefl_exchange.transport import Request
from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import BroadcastRequest, BundleRequest, EmptyRequest, ReplyRequest

# Connections that the proxy cut are closed by the garbage collector, here and not in a later test.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SHORT = Deadlines(connect_s=0.15, read_s=0.075, total_s=0.15)
LONG = Deadlines(connect_s=30.0, read_s=30.0, total_s=60.0)
SLACK_S = 15.0  # a loaded machine is no fault; a hang is


class Proxy:
    """Forwards bytes between a device and the coordinator; `fault` says what goes wrong with a connection."""

    def __init__(self, port):
        self.target, self.fault, self.open = ("127.0.0.1", port), "none", True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sockets, self.lock = [], threading.Lock()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while self.open:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.keep(client)
            if self.fault == "reset at once":
                self.reset(client)
                continue
            server = socket.create_connection(self.target)
            self.keep(server)
            if self.fault == "drop all":
                continue  # accepted, and never a byte
            fault = self.fault
            threading.Thread(target=self.up, args=(client, server, fault), daemon=True).start()
            threading.Thread(target=self.down, args=(client, server, fault), daemon=True).start()

    def keep(self, one):
        with self.lock:
            self.sockets.append(one)

    def up(self, client, server, fault):
        """From the device to the coordinator."""
        passed = 0
        while data := self.read(client):
            passed += len(data)
            if fault == "corrupt request" and passed > 1500:
                data = data[:-1] + bytes([data[-1] ^ 1])
            if fault == "half-close request" and passed > 1500:
                self.quiet(lambda: server.shutdown(socket.SHUT_WR))
                return
            if not self.write(server, data):
                return

    def down(self, client, server, fault):
        """From the coordinator to the device; the first 1,200 bytes or so are the TLS handshake's."""
        passed = 0
        while data := self.read(server):
            passed += len(data)
            answering = passed > 1200
            if fault == "delay":
                time.sleep(SHORT.read_s / 5)
            if fault == "long delay" and answering:
                time.sleep(3 * SHORT.total_s)
            if fault == "drop answer" and answering:
                continue
            if fault == "reset before the answer" and answering:
                return self.reset(client)
            if fault == "corrupt answer" and answering:
                data = data[:-1] + bytes([data[-1] ^ 1])
            if fault in ("truncate", "reset in the answer", "half-close answer") and answering:
                self.write(client, data[: len(data) // 2])
                if fault == "truncate":
                    return self.quiet(client.close)
                if fault == "half-close answer":
                    return self.quiet(lambda: client.shutdown(socket.SHUT_WR))
                return self.reset(client)
            if fault == "throttle" and answering:
                for start in range(0, len(data), 100):
                    time.sleep(SHORT.read_s / 4)
                    if not self.write(client, data[start : start + 100]):
                        return None
                continue
            if not self.write(client, data):
                return None
        self.quiet(lambda: client.shutdown(socket.SHUT_WR))
        return None

    def read(self, one):
        try:
            return one.recv(65536)
        except OSError:
            return b""

    def write(self, one, data):
        try:
            one.sendall(data)
        except OSError:
            return False
        return True

    def reset(self, one):
        """Close with RST."""
        self.quiet(lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)))
        self.quiet(one.close)

    def quiet(self, action):
        with contextlib.suppress(OSError):
            action()

    def cut(self):
        """Close every connection."""
        with self.lock:
            for one in self.sockets:
                self.quiet(one.close)
            self.sockets.clear()

    def close(self):
        self.open = False
        self.quiet(lambda: self.listener.shutdown(socket.SHUT_RDWR))
        self.listener.close()
        self.cut()


FAULTS = [
    "reset at once", "reset before the answer", "reset in the answer", "drop all", "drop answer", "delay",
    "long delay", "half-close request", "half-close answer", "truncate", "throttle", "corrupt answer",
]  # fmt: skip
SOON = ("reset in the answer", "drop answer", "corrupt answer")  # of these routes the quick tests try


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca, _, issuer, _ = certificate(folder, "authority", ca=True)
    pem, key, _, _ = certificate(folder, "server", issuer=issuer)
    return ca, pem, key


@pytest.fixture(scope="module")
def network(pki):
    """A server that speaks TLS, and a proxy before it; its `coordinator` answers."""
    one_at_a_time = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, query = self.path.partition("?")
            with one_at_a_time:
                found = proxy.coordinator.send(Request(method=self.command, path=path, query=query, body=body))
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(found.body)))
            self.end_headers()
            self.wfile.write(found.body)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # cut connections are what this is about

    ca, pem, key = pki
    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    proxy = Proxy(server.server_address[1])
    proxy.ca = ca
    yield proxy
    proxy.close()
    server.shutdown()
    server.server_close()
    thread.join()
    gc.collect()


@pytest.fixture
def bad_network(network, coordinator):
    """The coordinator in memory behind TLS and a proxy."""
    network.coordinator, network.fault = coordinator, "none"
    yield network
    network.cut()


def reply_call(net):
    return "reply", ReplyRequest(idem="f" * 32, reply=net.reply_of(1)).to_payload(), 1


CALLS = {
    "task": lambda net: ("task", EmptyRequest().to_payload(), 0),
    "broadcast": lambda net: ("broadcast", BroadcastRequest(round=1).to_payload(), 1),
    "reply": reply_call,
    "index": lambda net: ("index", EmptyRequest().to_payload(), 0),
    "bundle": lambda net: ("bundle", BundleRequest(line="main", task="all", version=1).to_payload(), 0),
}


def transport(proxy, deadlines):
    return HttpsTransport(f"https://127.0.0.1:{proxy.port}", proxy.ca, deadlines=deadlines)


def caller(member, proxy, deadlines):
    return Caller(
        transport=transport(proxy, deadlines), identity=member.identity, federation="skin",
        coordinator=member._coordinator, attempts=1, sleep=lambda _: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    "fault", [fault if fault in SOON else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_five_routes_of_a_member(bad_network, coordinator, joined, folder, net, fault):
    """docs/security.md check 63: 12 faults on task, broadcast, reply, index, bundle: success or `Unavailable` in time.

    With the network good again, the same question under the same key is answered, and the reply counted once.
    """
    coordinator.broadcasts[1] = Payload({}, {"phase": "warm", "round": 1, "rounds": 5})
    coordinator.bundles["main", "all", 1] = bytes(3000)
    outcomes = {}
    with Member(folder, lambda _: coordinator, clock_ms=lambda: net.NOW_MS, sleep=lambda _: None) as member:
        for route, call in CALLS.items():
            cty, payload, number = call(net)
            bad_network.fault = fault
            started = time.monotonic()
            try:
                caller(member, bad_network, SHORT).call(cty, payload, rnd=number)
                outcomes[route] = "success"
            except Unavailable as error:
                assert len(str(error).splitlines()) == 1
                outcomes[route] = error.code
            assert time.monotonic() - started < SHORT.total_s + SLACK_S
            bad_network.fault = "none"
            assert caller(member, bad_network, LONG).call(cty, payload, rnd=number)
    assert len(coordinator.effects) == 1
    if fault == "reset at once":
        assert set(outcomes.values()) == {"unreachable"}  # the proxy stands in the way: the test can fail


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_route_of_a_newcomer(bad_network, coordinator, folder, net, fault):
    """docs/security.md check 63: 12 faults on enrol: success or `Unavailable` in time; then the same invite goes on."""
    invite = coordinator.invite()
    bad_network.fault = fault
    started = time.monotonic()
    try:
        enrol(folder, invite, transport(bad_network, SHORT), clock_ms=lambda: net.NOW_MS, sleep=lambda _: None)
    except Unavailable as error:
        assert len(str(error).splitlines()) == 1
    assert time.monotonic() - started < 12 * SHORT.total_s + SLACK_S  # at most 12 requests, each in its deadline
    bad_network.fault = "none"
    found = enrol(folder, invite, transport(bad_network, LONG), clock_ms=lambda: net.NOW_MS, sleep=lambda _: None)
    assert found.state == "pending" and len(coordinator.members) == 1

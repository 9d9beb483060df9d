"""Servers that are silent, slow, cut off or talk rubbish: a typed error in time. Source: docs/security.md, check 63."""

import socket
import ssl
import threading
import time

import pytest
from tests.exchange.tls_server import QUICK, post, url

from edgefl_exchange.errors import Unavailable
from edgefl_exchange.https import Deadlines, HttpsTransport
from edgefl_exchange.transport import Request


def silent(handler):
    time.sleep(4)


def trickled_head(handler):
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.2)


def trickled_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "900")
    handler.end_headers()
    for _ in range(900):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.2)


def cut_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "900")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)
    handler.close_connection = True


def too_long(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "2000000")
    handler.end_headers()
    handler.wfile.write(b"x" * 2_000_000)


def endless(handler):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")


def bomb(handler):
    import gzip

    data = gzip.compress(bytes(10_000_000))
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def rubbish(handler):
    handler.wfile.write(b"\x00\x01 nothing of HTTP\r\n\r\n")
    handler.close_connection = True


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def huge_head(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"b" * 100_000 + b"\r\n\r\n")


@pytest.mark.parametrize(
    "fault",
    [silent, trickled_head, trickled_body, cut_body, too_long, endless, bomb, rubbish, hang_up, huge_head],
)
def test_every_network_fault_ends_typed_and_in_time(serve, pki, fault):
    """docs/security.md, check 63: a typed retriable error within the deadline; 0 hangs."""
    server = serve(pki["pem"], pki["key"], behave=fault)
    started = time.monotonic()
    with pytest.raises(Unavailable) as error:
        post(HttpsTransport(url(server), pki["ca"], deadlines=Deadlines(connect_s=1, read_s=0.25, total_s=0.5)))
    assert time.monotonic() - started < 2.5
    assert len(str(error.value).splitlines()) == 1


def test_nobody_listens(pki):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unavailable, match="cannot reach") as error:
        post(HttpsTransport(f"https://127.0.0.1:{port}", pki["ca"], deadlines=QUICK))
    assert error.value.code == "unreachable"


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("99999", 300.0), ("-1", None), ("soon", None), ("", None)])
def test_retry_after_is_bounded(serve, pki, text, seconds):
    def busy(handler):
        handler.send_response(503)
        handler.send_header("Retry-After", text)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server = serve(pki["pem"], pki["key"], behave=busy)
    answer = post(HttpsTransport(url(server), pki["ca"], deadlines=QUICK))
    assert (answer.status, answer.retry_after_s) == (503, seconds)


@pytest.fixture
def answered():
    """Give the address of a socket that is not a web server: `how` is given each connection."""
    listening = []

    def start(how):
        socket_ = socket.socket()
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # a line holds little
        socket_.bind(("127.0.0.1", 0))
        socket_.listen()
        listening.append(socket_)
        threading.Thread(target=lambda: how(socket_.accept()[0]), daemon=True).start()
        return f"127.0.0.1:{socket_.getsockname()[1]}"

    yield start
    for socket_ in listening:
        socket_.close()


def test_a_slow_line_carries_a_body_for_longer_than_a_connection_may_take(answered, pki):
    """docs/security.md, check 63: the limit is one of silence. 10 MB at 5 MB/s, twice as long."""
    size, rate, connect_s = 10_000_000, 5e6, 1.0

    def slowly(connection):
        context, got, since = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), 0, time.monotonic()
        context.load_cert_chain(pki["pem"], pki["key"])
        with context.wrap_socket(connection, server_side=True) as line:
            while got < size and (piece := line.recv(2**14)):
                got += len(piece)
                time.sleep(max(0.0, got / rate - (time.monotonic() - since)))
            line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")

    deadlines = Deadlines(connect_s=connect_s, read_s=10, total_s=30)
    request = Request(method="POST", path="/v1/reply", body=bytes(size))
    assert HttpsTransport(f"https://{answered(slowly)}", pki["ca"], deadlines=deadlines).send(request).body == b"good"


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(50)]
)
def test_what_speaks_no_tls_is_no_refusal_of_trust(answered, pki, said):
    """docs/security.md, order of checks: anybody on the way can send it, so it only means "try again later"."""

    def plainly(connection):
        with connection:
            connection.recv(4096)
            connection.sendall(said)

    with pytest.raises(Unavailable, match="is not TLS; check the coordinator's address and port") as error:
        post(HttpsTransport(f"https://{answered(plainly)}", pki["ca"], deadlines=QUICK))
    assert error.value.code == "not_tls"


def test_a_proxy_that_wants_a_password_is_told(answered, pki):
    """RFC 9110 15.5.8: it is of no use to try again; what is asked for is never shown."""

    def asking(connection):
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

    proxy = answered(asking)
    with pytest.raises(Unavailable, match=f"the proxy {proxy} asks for a user and a password; give them ") as error:
        post(HttpsTransport("https://a.example", pki["ca"], proxy=f"http://me:secret@{proxy}", deadlines=QUICK))
    assert error.value.code == "proxy" and "secret" not in str(error.value)

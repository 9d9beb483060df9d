"""Servers that are silent, slow, cut off or talk rubbish: a typed error in time. Source: docs/security.md, check 63."""

import socket
import time

import pytest
from tests.exchange.tls_server import QUICK, post, url

from edgefl_exchange.errors import Unavailable
from edgefl_exchange.https import Deadlines, HttpsTransport


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
        post(HttpsTransport(url(server), pki["ca"], deadlines=Deadlines(connect_s=1, read_s=0.5, total_s=1)))
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

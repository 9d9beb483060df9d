"""What HTTP lines mean, and what comes before, beside or in the place of a request: checks 39, 40 and 44."""

import contextlib

import pytest
from tests.coordinator.web.running import Running, seconds_until_closed

from edgefl_protocol import Payload


def test_an_idle_connection_may_not_drip(coordinator) -> None:
    """Empty lines are no request: who sends them has the deadline of a header, on a kept connection, too."""
    with Running(coordinator, 0.3, 5) as running, running.connect() as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.recv(4096).startswith(b"HTTP/1.1 200")
        assert seconds_until_closed(one, b"\r\n") < 2.5


def test_one_request_at_a_time(coordinator) -> None:
    """RFC 9112 9.3.2: a server may close where requests are pipelined: 1,000 of them would each take memory."""
    with Running(coordinator, 5, 5) as running, running.connect() as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        one.settimeout(3)
        answer = b""
        while part := one.recv(4096):
            answer += part
        assert answer.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answer


def test_a_header_has_an_end(coordinator) -> None:
    """A header above 64 KiB gets 400 and a closed connection, in one field or in many, also one that is whole."""
    long = (b"X: " + b"a" * 2**17, b"X: aaaa\r\n" * 2**14)
    for field in (*long, long[0] + b"\r\n\r\n", long[1] + b"\r\n"):
        with Running(coordinator, 5, 5) as running, running.connect() as one, contextlib.suppress(ConnectionError):
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + field)
            assert one.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length: 5\n",
        b" Content-Length: 5\r\n",
    ],
)
def test_a_length_means_one_thing(coordinator, lines) -> None:
    """Attack list 16: what another server may read otherwise is refused, and the connection closes (RFC 9112 6.3)."""
    with Running(coordinator, 5, 5) as running, running.connect() as one:
        one.sendall(b"POST /v1/task HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\nhello")
        one.settimeout(5)
        answer = b""
        while part := one.recv(4096):
            answer += part
        assert answer[9:12] in (b"400", b"411") and b"connection: close" in answer.lower()


SENT = {"Host": "x", "Content-Type": "application/octet-stream", "User-Agent": "edgefl", "Accept-Encoding": "identity",
        "Connection": "close"}  # fmt: skip


@pytest.mark.parametrize("dropped", ["", *SENT, "Content-Length", "all"])
def test_a_dropped_header_changes_nothing(coordinator, tools, dropped) -> None:
    """Check 44: without its length nothing of a request is read; what else a proxy drops means nothing: the answer is
    sealed to the same request, whose content the envelope proves."""
    member = tools.approved_member(coordinator, "clinic-a")
    body = member.envelope("task", Payload())
    headers = {**SENT, "Content-Length": str(len(body))}
    kept = {name: value for name, value in headers.items() if dropped not in (name, "all")}
    with Running(coordinator, 5, 5) as running, running.connect() as one:
        lines = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
        one.sendall(f"POST /v1/task HTTP/1.1\r\n{lines}\r\n".encode() + body)
        one.settimeout(10)
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := one.recv(2**16):
                answer += part
                if b"\r\n\r\n" in answer and dropped == "Connection":
                    break
    head, _, sealed = answer.partition(b"\r\n\r\n")
    if dropped in ("Content-Length", "all"):
        assert head.startswith(b"HTTP/1.1 411")
        assert isinstance(member.send("task", body), Payload)  # it was not taken: the same envelope still counts
    else:
        assert head.startswith(b"HTTP/1.1 200") and member.open(body, sealed)[0] == 200
        assert member.send("task", body).code == "replayed"

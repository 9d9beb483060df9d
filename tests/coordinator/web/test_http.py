"""The HTTP side over an in-process transport and over real sockets: checks 11, 39, 40 and the plain routes."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tests.coordinator.web.running import Running, seconds_until_closed

from edgefl_coordinator.web import app
from edgefl_coordinator.web.bodies import SMALL_BYTES
from edgefl_coordinator.web.sealed_requests import known_sender
from edgefl_protocol import Payload
from edgefl_protocol.errors import RecordError, StorageError
from edgefl_protocol.messages.requests import ROUTES, RecordReply
from edgefl_protocol.records.coordinator_records import verify_key_record, verify_time

NONCE = "0123456789abcdefABCDEF_-"


@pytest.fixture
def client(asgi, coordinator):
    return asgi(coordinator)


def test_a_sealed_request_over_http(client, coordinator, tools) -> None:
    """The HTTP status is the signed `sts`, whatever the answer."""
    member = tools.approved_member(coordinator, "clinic-a")
    for payload, status in ((Payload(), 200), (Payload({}, {"extra": 1}), 400)):
        request = member.envelope("task", payload)
        answer = client.request("POST", "/v1/task", request)
        assert answer.status == status
        assert answer.headers[b"content-type"] == b"application/octet-stream"
        assert member.open(request, answer.body)[0] == status


def test_in_pieces(client, coordinator, tools) -> None:
    member = tools.approved_member(coordinator, "clinic-a")
    request = member.envelope("task", Payload())
    assert client.request("POST", "/v1/task", [request[:10], request[10:11], b"", request[11:]]).status == 200


# fmt: off
REFUSED = [
    ("GET",    "/",                     {},                                               404),
    ("GET",    "/v1/task",              {},                                               404),
    ("POST",   "/healthz",              {"content-length": "0"},                          404),
    ("POST",   "/v1/nothing",           {"content-length": "0"},                          404),
    ("POST",   "/v1/task?x=1",          {"content-length": "0"},                          404),
    ("GET",    "/healthz?x=1",          {},                                               404),
    ("PUT",    "/v1/task",              {"content-length": "0"},                          404),
    ("POST",   "/v1/task/",             {"content-length": "0"},                          404),
    ("POST",   "/v1/task",              {},                                               411),
    ("POST",   "/v1/task",              {"transfer-encoding": "chunked"},                 411),
    ("POST",   "/v1/task",              {"transfer-encoding": "chunked", "content-length": "5"}, 411),
    ("POST",   "/v1/task",              {"content-length": "33554433"},                   413),
    ("POST",   "/v1/reply",             {"content-length": "33554433"},                   413),
    ("POST",   "/v1/reply",             {"content-length": "33554432"},                   400),
    ("POST",   "/v1/task",              {"content-length": "1048577"},                    413),
    ("POST",   "/v1/enrol",             {"content-length": "65537"},                      413),
    ("POST",   "/v1/task",              {"content-length": "99999999999999999999"},       400),
    ("POST",   "/v1/task",              {"content-length": "-5"},                         400),
    ("POST",   "/v1/task",              {"content-length": "5", "content-encoding": "gzip"}, 415),
    ("POST",   "/v1/task",              {"content-length": "5", "content-encoding": "identity, gzip"}, 415),
    ("GET",    "/healthz",              {"content-length": "5"},                          413),
    ("GET",    "/v1/time",              {},                                               400),
    ("GET",    "/v1/time?nonce=short",  {},                                               400),
    ("GET",    f"/v1/time?nonce={NONCE}&nonce={NONCE}", {},                               400),
]
# fmt: on


@pytest.mark.parametrize(("method", "target", "headers", "status"), REFUSED)
def test_what_does_not_pass(client, method, target, headers, status) -> None:
    """Check 39 and docs/security.md, envelope: lengths, codings, paths and query strings."""
    assert client.request(method, target, b"hello", headers).status == status


@pytest.mark.parametrize("body", [b"short", b"longer than stated"])
def test_lying_length(client, body) -> None:
    """Check 39: a length that lies is a 400."""
    assert client.request("POST", "/v1/task", body, {"content-length": "9"}).status == 400


def test_uniform_refusal(client, coordinator, clock, tools) -> None:
    """Check 11: ten causes before the signature give byte-equal status, headers and body."""
    member = tools.approved_member(coordinator, "clinic-a")
    stranger = tools.Member(coordinator, "nobody")
    good = member.envelope("task", Payload())
    flipped = bytearray(good)
    flipped[-1] ^= 1
    ring = replace(coordinator.keys.ring, current=stranger.sealing)
    elsewhere = replace(coordinator, keys=replace(coordinator.keys, ring=ring))
    causes = {
        "no envelope": b"hello",
        "bad ciphertext": bytes(flipped),
        "unknown sender": stranger.envelope("task", Payload()),
        "other federation": member.envelope("task", Payload(), fed="bone"),
        "made for another route": member.envelope("index", Payload()),
        "too old": member.envelope("task", Payload(), iat=clock() - 300_001, exp=clock() + 1),
        "sealed for another": replace(member, coordinator=elsewhere).envelope("task", Payload()),
        "header cut": good[:40],
        "unknown sender, large": stranger.envelope("task", Payload()) + bytes(SMALL_BYTES),
        "bad ciphertext, large": good + bytes(SMALL_BYTES),
    }
    answers = {name: client.request("POST", "/v1/task", body) for name, body in causes.items()}
    assert len({(a.status, tuple(sorted(a.headers.items())), a.body) for a in answers.values()}) == 1
    assert answers["no envelope"].status == 401


def test_every_envelope_fits_one_route(coordinator, client, tools) -> None:
    """Check 8: an envelope made for endpoint i is accepted only at i, for all pairs."""
    member = tools.approved_member(coordinator, "clinic-a")
    for made in ROUTES:
        for sent in ROUTES:
            if made != sent:
                body = member.envelope(made, Payload({}, {"signing_public": member.signing.public.hex()}))
                assert client.request("POST", ROUTES[sent].path, body).status == 401, (made, sent)


def test_plain_routes(client, coordinator, clock) -> None:
    """docs/security.md, signed time and key record: signed by the pinned key, over the caller's nonce."""
    assert client.request("GET", "/healthz").body == b"ok\n"
    key = coordinator.keys.signing.public_key
    record = client.request("GET", f"/v1/time?nonce={NONCE}").body
    assert verify_time(record, key, NONCE).now_ms == clock.now_ms
    with pytest.raises(RecordError):
        verify_time(record, key, NONCE[::-1])
    keys = verify_key_record(client.request("GET", "/v1/keys").body, key.key_id, "skin", clock.now_ms)
    assert keys.sealing == coordinator.keys.sealing.public_key


def test_sealed_records(coordinator, clock, tools) -> None:
    member = tools.approved_member(coordinator, "clinic-a")
    record = RecordReply.from_payload(member.call("keys", Payload())).record
    assert verify_key_record(record, coordinator.keys.signing.key_id, "skin", clock.now_ms).number == 1


def test_sixty_a_minute(client) -> None:
    """docs/security.md, signed time: 60 requests a minute an address; others are not affected."""
    target = f"/v1/time?nonce={NONCE}"
    statuses = [client.request("GET", target).status for _ in range(61)]
    assert statuses == [200] * 60 + [503]
    assert client.request("GET", target, address="192.0.2.2").status == 200
    assert client.request("GET", "/healthz").status == 200


def test_memory_for_large_bodies_is_bounded(asgi, make_coordinator, tools) -> None:
    """Check 45: a large body without room gets 503 with Retry-After, unread; a small one needs no room."""
    coordinator = make_coordinator(limits={"waiting_bytes": 100_000, "body_bytes": 2**20, "reply_bytes": 1000})
    client, member = asgi(coordinator), tools.approved_member(coordinator, "clinic-a")
    start = member.envelope("task", Payload())
    too_large, fits, small = (start + bytes(length - len(start)) for length in (100_001, 100_000, SMALL_BYTES))
    answer = client.request("POST", "/v1/task", too_large)
    assert (answer.status, answer.headers[b"retry-after"], answer.headers[b"connection"]) == (503, b"2", b"close")
    for body in (fits, small, fits):  # each gives its room back
        assert client.request("POST", "/v1/task", body).status == 401


@pytest.mark.parametrize(
    ("first", "drip"),
    [
        (b"", b""),  # connects and says nothing
        (b"POST /v1/task HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"a"),  # slow header
        (b"POST /v1/task HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b"a"),  # slow body
        (b"POST /v1/task HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", b""),  # silent body
    ],
)
def test_slow_senders_are_closed(coordinator, first, drip) -> None:
    """Check 40: closed within the deadline + 2 s, however the bytes trickle."""
    with Running(coordinator, 0.2, 0.2) as running, running.connect() as one:
        one.sendall(first)
        assert seconds_until_closed(one, drip) < 2.5


def sent_at(one: socket.socket, bytes_per_s: float, length: int) -> int:
    """Send a body at a rate, ten times a second, until it is whole or the other side closes; return what was sent."""
    sent, started = 0, time.monotonic()
    with contextlib.suppress(ConnectionError, TimeoutError):
        one.setblocking(False)
        while sent < length:
            time.sleep(0.1)
            due = min(int(bytes_per_s * (time.monotonic() - started)), length)
            one.sendall(bytes(due - sent))
            sent = due
            with contextlib.suppress(BlockingIOError):
                if not one.recv(1, socket.MSG_PEEK):  # the answer, if there is one, stays to be read
                    break
    one.settimeout(20)
    return sent


@pytest.mark.parametrize(("bytes_per_s", "burst", "whole"), [(3000, 0, True), (500, 0, False), (500, 20_000, False)])
def test_the_least_rate_of_a_body(coordinator, bytes_per_s, burst, whole) -> None:
    """Twice the least rate outlives the deadline of 0.4 s by far; half of it is cut, also behind a burst."""
    length = 5000 + burst
    with Running(coordinator, 5, 0.4, 1500) as running, running.connect() as one:
        head = f"POST /v1/task HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        one.sendall(head + bytes(burst))
        sent = sent_at(one, bytes_per_s, length - burst)
        assert (sent == 5000) == whole
        if whole:
            assert one.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(("late_s", "answered"), [(0.2, True), (0.85, False)])
def test_the_clock_stands_still_while_we_do_not_read(coordinator, tools, monkeypatch, late_s, answered) -> None:
    """Of 1.2 s a sender uses 0.7 before it is looked up, which takes 2 s in which nobody reads. Then it has the time
    that it had left, and no more; bytes earn nothing here."""
    member, asked = tools.approved_member(coordinator, "clinic-a"), threading.Event()

    def slowly(*given: Any) -> str | None:
        time.sleep(2)
        asked.set()
        return known_sender(*given)

    monkeypatch.setattr(app, "known_sender", slowly)
    body = member.envelope("task", Payload()) + bytes(2**18)
    with Running(coordinator, 5, 1.2, 2**40) as running, running.connect() as one:
        one.sendall(f"POST /v1/task HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.7)
        one.sendall(body[:-1])
        assert asked.wait(10)
        time.sleep(late_s)
        answer = b""
        with contextlib.suppress(ConnectionError):
            one.sendall(body[-1:])
            answer = one.recv(100)
        assert answer.startswith(b"HTTP/1.1 401") if answered else not answer


@pytest.mark.parametrize(("senders", "deadline_s"), [(60, 0.8), pytest.param(500, 4.0, marks=pytest.mark.slow)])
def test_many_slow_senders(coordinator, senders, deadline_s) -> None:
    """Check 40: with 60 and with 500 slow sockets a good request is still answered, p95 below 500 ms; then all are
    closed."""
    with Running(coordinator, deadline_s, deadline_s) as running:
        slow = [running.connect() for _ in range(senders)]
        for index, one in enumerate(slow):
            head = b"POST /v1/task HTTP/1.1\r\nHost: x\r\n"
            one.sendall(head + (b"Content-Length: 9999\r\n\r\nx" if index % 2 else b"X-Slow: "))
        waits = sorted(running.healthy() for _ in range(20))
        assert waits[18] < 0.5
        started = time.monotonic()
        for one in slow:
            one.settimeout(10)
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
            one.close()
        assert time.monotonic() - started < deadline_s + 2.0


def test_an_idle_connection_may_send_again(coordinator) -> None:
    """The deadline is a request's, not a connection's: two requests with a pause longer than none of them."""
    with Running(coordinator, 0.4, 0.4) as running, running.connect() as one:
        for pause_s in (0.6, 0.0):
            one.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"ok\n"):
                part = one.recv(4096)
                assert part, "the server closed an idle connection"
                answer += part
            time.sleep(pause_s)


def test_a_chunked_flood_is_cut(coordinator) -> None:
    """Check 39: 411 for a chunked body without reading it; the connection closes long before 8 MB."""
    with Running(coordinator, 5, 5) as running, running.connect() as one:
        one.sendall(b"POST /v1/task HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent, chunk = 0, b"10000\r\n" + bytes(0x10000) + b"\r\n"
        try:
            while sent < 64 * 2**20:
                one.sendall(chunk)
                sent += len(chunk)
        except OSError:
            pass
        assert sent < 8 * 2**20


def test_many_bodies_at_once(coordinator, tools) -> None:
    """Check 45 in small: 64 parallel senders of valid requests are all answered."""
    members = [tools.quick_member(coordinator, f"clinic-{number:02}") for number in range(16)]
    sealed = [member.envelope("task", Payload()) for member in members for _ in range(4)]
    with Running(coordinator, 10, 10) as running:

        def ask(body: bytes) -> bytes:
            with running.connect() as one:
                head = f"POST /v1/task HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                one.sendall(head.encode() + body)
                answer = b""
                while piece := one.recv(65536):
                    answer += piece
            return answer.split(b"\r\n", 1)[0]

        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(ask, sealed)) == {b"HTTP/1.1 200 OK"}


def test_only_who_may_call_now_is_worth_reading(coordinator, tools, clock) -> None:
    """docs/decisions/0054: neither who is not approved yet nor a request of another time has its body read."""
    approved, waiting = tools.quick_member(coordinator, "clinic-a"), tools.Member(coordinator, "clinic-b")
    waiting.enrol(tools.token_of(coordinator, "clinic-b"))
    route, now_ms = ROUTES["reply"], clock.now_ms

    def known(member: Any, **header: Any) -> bool:
        return known_sender(coordinator, route, member.envelope("reply", Payload(), rnd=1, **header)[:4096]) is not None

    assert known(approved) and not known(waiting)
    long_ago = now_ms - 10**9
    assert not known(approved, iat=long_ago, exp=long_ago + 300_000)


def test_a_store_that_fails_before_the_sender_is_known_says_try_again(client, coordinator, tools, monkeypatch) -> None:
    """docs/security.md 2.3: nobody to seal an answer to, and no refusal, so 503, of small requests and of large ones;
    the message was not used up."""
    member = tools.approved_member(coordinator, "clinic-a")
    small, large = member.envelope("task", Payload()), member.envelope("reply", Payload({}, {"x": "y" * SMALL_BYTES}))
    asked = [("POST", "/v1/task", small), ("POST", "/v1/reply", large), ("GET", "/v1/root", b"")]

    def fails() -> Any:
        raise StorageError("the disk cannot be read", "storage")

    with monkeypatch.context() as broken:
        broken.setattr(coordinator.store, "look", fails)
        broken.setattr(coordinator.store, "transaction", fails)
        answers = [client.request(*one) for one in asked]
    for answer in answers:
        assert (answer.status, answer.body, answer.headers[b"retry-after"]) == (503, b"busy\n", b"2")
    assert [client.request(*one).status for one in asked] == [200, 400, 404]

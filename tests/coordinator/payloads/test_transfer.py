"""Whole rounds of large payloads: a real member, a real coordinator, a bad network between."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgefl_coordinator.rounds.aggregation import step
from edgefl_coordinator.store import counts, publishing
from edgefl_coordinator.store.tables import offers, replies, uploads
from edgefl_exchange import blobs as transfer
from edgefl_exchange.blobs import FIRST_PIECE_BYTES, MAX_SETBACKS, Pace
from edgefl_exchange.errors import OutboxError, Unavailable
from edgefl_exchange.transport import Answer, Request
from edgefl_protocol import Payload
from edgefl_protocol.errors import BlobError, StorageError
from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES

Send = Callable[[Request], Answer]


def lost_request(request: Request, send: Send) -> Answer:
    raise Unavailable("no connection", "unreachable")


def cut_answer(request: Request, send: Send) -> Answer:
    send(request)
    raise Unavailable("the answer was cut off", "cut_off")


def twice(request: Request, send: Send) -> Answer:
    send(request)
    return send(request)


def no_answer_of_ours(request: Request, send: Send) -> Answer:
    return Answer(status=502, body=b"<html>Bad gateway</html>")


def late_and_then_forged(request: Request, send: Send) -> Answer:
    send(request)
    return Answer(status=200, body=b"")


def truncated(request: Request, send: Send) -> Answer:
    answer = send(request)
    return Answer(status=answer.status, body=answer.body[:-1])


def damaged_request(request: Request, send: Send) -> Answer:
    return send(Request(method=request.method, path=request.path, body=request.body[:-1] + b"\0"))


def busy(request: Request, send: Send) -> Answer:
    return Answer(status=503, body=b"busy", retry_after_s=2.0)


FAULTS = [lost_request, cut_answer, twice, no_answer_of_ours, late_and_then_forged, truncated, damaged_request, busy]


@pytest.mark.both_places
def test_a_round_of_large_payloads(federation, sites, lab) -> None:
    """docs/security.md 2.2: above 1 MiB both ways go as blobs, and nobody above the exchange knows."""
    for seed, site in enumerate(sites):
        broadcast = site.open().broadcast(1)
        assert broadcast.arrays["backbone.conv"].tobytes() == lab.weights(0)["backbone.conv"].tobytes()
        with site.outbox() as outbox:
            outbox.put("skin", "reply", lab.reply_of(seed).to_bytes(), 0)
        (done,) = site.deliver()
        assert (done.outcome, done.bytes) == ("accepted", len(lab.reply_of(seed).to_bytes()))
        assert not list((site.folder / "parts").iterdir())
        assert not list((site.folder / "outbox.sqlite3.files").iterdir())
        assert not lab.rows(federation, uploads)
    stored = [Payload.from_bytes(federation.store.get_blob(row.blob), 2**23) for row in lab.rows(federation, replies)]
    assert {one.to_bytes() for one in stored} == {lab.reply_of(0).to_bytes(), lab.reply_of(1).to_bytes()}
    assert step(federation, lab.averaging_worker)
    expected = np.mean([lab.weights(0)["backbone.conv"], lab.weights(1)["backbone.conv"]], axis=0, dtype=np.float64)
    for site in sites:
        got = site.open().broadcast(2).arrays["backbone.conv"]
        assert got.tobytes() == expected.astype(np.float32).tobytes()
        site.open().broadcast(2)
    # the past is gone: a state, a broadcast of each, nothing else
    assert len(lab.files(federation)) == 3
    assert {row.blob for row in lab.rows(federation, offers)} <= lab.files(federation)


@pytest.fixture
def waiting(sites, lab) -> Any:
    """The first site with a reply of three pieces in its outbox."""
    with sites[0].outbox() as outbox:
        outbox.put("skin", "reply", lab.reply_of(1).to_bytes(), 0)
    return sites[0]


def blob_requests(site: Any) -> int:
    return sum(request.path == "/v1/blob" for request in site.wire.sent)


def cases(requests: int) -> list[Any]:
    """Each fault once, at one request after the other; the slow tests put each fault at each request."""
    once = [(fault, at % requests) for at, fault in enumerate(FAULTS)]
    each = [[(fault, at) for at in range(requests)] for fault in FAULTS]
    return [
        pytest.param(once, id="each once"),
        *(pytest.param(one, id=one[0][0].__name__, marks=pytest.mark.slow) for one in each),
    ]


@pytest.mark.both_places
@pytest.mark.parametrize("faults", cases(7))  # task, reply, question, three pieces, reply
def test_a_fault_at_every_request_of_sending(federation, sites, lab, faults) -> None:
    """Check 63, the blob route: each fault at each request ends in success at once, and the reply counts once."""
    site, member = sites[0], sites[0].open()
    for seed, (fault, at) in enumerate(faults):
        with site.outbox() as outbox:
            outbox.put("skin", "reply", lab.reply_of(seed).to_bytes(), 0)
            site.wire.faults = [None] * at + [fault]
            (done,) = member.deliver(outbox, member.task())
        assert done.outcome == "accepted" and not site.wire.faults
        (row,) = lab.rows(federation, replies)
        assert federation.store.get_blob(row.blob) == lab.reply_of(seed).to_bytes()
        with federation.store.transaction() as connection:  # as if it had not replied yet
            connection.execute(replies.delete())
            counts.drop(connection)
            counts.drop(connection)


@pytest.mark.parametrize("at", range(2, 7))
def test_a_line_that_stays_cut_is_gone_on_with_later(federation, waiting, lab, at) -> None:
    """docs/security.md, reliability: a typed retriable error; after it only what is missing is sent."""
    waiting.wire.faults = [None] * at + [cut_answer] * 4
    with pytest.raises(Unavailable):
        waiting.deliver()
    (upload,) = lab.rows(federation, uploads) or [None]
    have = 0 if upload is None else upload.have
    before = sum(len(request.body) for request in waiting.wire.sent)
    waiting.wire.faults = []
    (done,) = waiting.deliver()
    assert done.outcome == "accepted"
    sent = sum(len(request.body) for request in waiting.wire.sent) - before
    whole = len(lab.reply_of(1).to_bytes())
    assert sent < whole - have + 50_000
    (row,) = lab.rows(federation, replies)
    assert federation.store.get_blob(row.blob) == lab.reply_of(1).to_bytes()


@pytest.mark.parametrize("faults", cases(5))
def test_a_fault_at_every_request_of_fetching(sites, lab, faults) -> None:
    """Check 63, the blob route: the broadcast comes whole, whatever happens once to one request."""
    for fault, at in faults:
        sites[0].open().task()
        sites[0].wire.faults = [None] * at + [fault]
        got = sites[0].member.broadcast(1).arrays["backbone.conv"]
        assert got.tobytes() == lab.weights(0)["backbone.conv"].tobytes()


def test_fetching_goes_on_after_a_restart(sites, lab) -> None:
    """docs/security.md, reliability: what came stays, encrypted and private, and only the rest is fetched."""
    site = sites[0]
    site.wire.faults = [None] * 3 + [lost_request] * 4
    with pytest.raises(Unavailable):
        site.open().broadcast(1)
    (part,) = (site.folder / "parts").iterdir()
    assert part.stat().st_mode & 0o777 == 0o600
    assert part.parent.stat().st_mode & 0o777 == 0o700
    assert part.stat().st_size >= FIRST_PIECE_BYTES * 2
    plain = lab.weights(0)["backbone.conv"].tobytes()
    assert plain[:100] not in part.read_bytes() and plain[1000:1100] not in part.read_bytes()
    asked = blob_requests(site)
    site.wire.faults = []
    assert site.open().broadcast(1).arrays["backbone.conv"].tobytes() == plain
    assert blob_requests(site) - asked <= 4
    assert not list((site.folder / "parts").iterdir())


def test_a_partial_file_that_nobody_goes_on_with(sites) -> None:
    """Swept: a week after it last grew, when the member is opened."""
    folder = sites[0].folder / "parts"
    folder.mkdir()
    old, young = folder / f"{'0' * 32}.part", folder / f"{'1' * 32}.part"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    sites[0].open()
    assert not old.exists() and young.exists()


@pytest.mark.parametrize("damage", ["flip", "longer", "empty", "cut"])
def test_a_partial_file_that_was_damaged(sites, lab, damage) -> None:
    """Check 60: what lies here is no proof of itself; it is thrown away and fetched anew."""
    site = sites[0]
    site.wire.faults = [None] * 3 + [lost_request] * 4
    with pytest.raises(Unavailable):
        site.open().broadcast(1)
    (part,) = (site.folder / "parts").iterdir()
    data = bytearray(part.read_bytes())
    data[1000] ^= damage == "flip"
    data = {"longer": data + bytes(10**7), "empty": b"", "cut": data[:100]}.get(damage, data)
    part.write_bytes(data)
    (part.parent / f"{'0' * 32}.part").write_bytes(b"of a round that is over")
    site.wire.faults = []
    got = site.open().broadcast(1).arrays["backbone.conv"]
    assert got.tobytes() == lab.weights(0)["backbone.conv"].tobytes()
    assert not list(part.parent.iterdir())


def test_a_coordinator_that_sends_another_blob(federation, sites, lab) -> None:
    """docs/security.md 2.2: nothing is used that does not verify, and nothing of it stays."""
    sites[0].open().broadcast(1)
    (row,) = lab.rows(federation, offers)
    path = federation.store.home.blobs / row.blob
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BlobError) as caught:
        sites[0].open().broadcast(1)
    assert caught.value.code == "wrong_digest"
    assert not list((sites[0].folder / "parts").iterdir())


def test_a_broadcast_beyond_what_is_taken(sites, monkeypatch) -> None:
    monkeypatch.setattr("edgefl_exchange.member.MAX_BLOB_BYTES", 1000)
    with pytest.raises(BlobError) as caught:
        sites[0].open().broadcast(1)
    assert caught.value.code == "too_large"


def test_a_full_disk_while_fetching(sites, lab, monkeypatch) -> None:
    """Check 59: a sentence, and it goes on when there is room."""

    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    sites[0].open()
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "write_at", lambda *_: full())
        with pytest.raises(OSError):
            sites[0].member.broadcast(1)
    assert sites[0].member.broadcast(1).arrays["backbone.conv"].shape == lab.weights(0)["backbone.conv"].shape


def test_a_reply_that_came_too_late_is_not_sent_twice(federation, waiting, lab, tools) -> None:
    """The round closed without it: the next one takes it, and the pieces stay where they are."""
    waiting.wire.faults = [None] * 6 + [lost_request] * 4  # every piece arrived, the reply did not
    with pytest.raises(Unavailable):
        waiting.deliver()
    for number in range(2):
        other = tools.quick_member(federation, f"other-{number}")
        small = Payload({"backbone.conv": np.zeros(9, np.float32)}, {"site_sha256": "0" * 64})
        assert isinstance(other.reply(1, payload=small), Payload)
    assert step(federation, lab.averaging_worker)
    asked, waiting.wire.faults = blob_requests(waiting), []
    kept, done = waiting.deliver()
    assert (kept.outcome, done.outcome, done.round) == ("kept", "accepted", 2)
    assert blob_requests(waiting) == asked


def test_what_the_coordinator_lost_is_sent_again(federation, waiting, lab) -> None:
    """A blob that was swept or damaged there: retriable, never deleted here, and then sent from the beginning."""
    member = waiting.open()
    with waiting.outbox() as outbox:
        (item,) = outbox.items("skin")
        transfer.send_blob(member._caller, item.blob, outbox.file_of(item.blob), Pace())
    (row,) = lab.rows(federation, uploads)
    path = federation.store.home.blobs / row.blob
    path.write_bytes(bytes(row.size))
    with pytest.raises(Unavailable) as caught:
        waiting.deliver()
    assert caught.value.code == "bad_blob"
    (done,) = waiting.deliver()
    assert done.outcome == "accepted"


def test_an_item_that_is_damaged_here_is_said(federation, waiting, lab) -> None:
    with waiting.outbox() as outbox:
        (item,) = outbox.items("skin")
        path = outbox.file_of(item.blob)
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    with pytest.raises(OutboxError) as caught:
        waiting.deliver()
    assert caught.value.code == "outbox_damaged"
    path.write_bytes(data[:1000])
    with pytest.raises(StorageError):
        waiting.deliver()


def test_a_refusal_of_its_size_is_final(federation, sites, lab) -> None:
    """The cap of the task holds before a byte is sent."""
    with sites[0].outbox() as outbox:
        outbox.put("skin", "reply", lab.reply_of(1, 2_200_000).to_bytes(), 0)
    (done,) = sites[0].deliver()
    assert (done.outcome, done.code) == ("refused", "too_large")
    assert blob_requests(sites[0]) == 0
    assert not list((sites[0].folder / "outbox.sqlite3.files").iterdir())


@pytest.mark.both_places
def test_a_large_bundle(federation, sites) -> None:
    """Fetching a large bundle: whole, and nothing is left of its pieces."""
    data = os.urandom(3 * 2**20)
    kept = federation.store.put_blob(data)
    with federation.store.transaction() as connection:
        publishing.publish(
            connection, federation.clock(), line="main", task="nevus", version=1, bundle_id="main", blob=kept
        )
    assert sites[0].open().bundle("main", "nevus", 1) == data
    assert not list((sites[0].folder / "bundle-parts").iterdir())


def test_pieces_follow_the_line() -> None:
    """Pieces grow while they are quick and shrink when they are slow, within the protocol's bound."""
    now = [0.0]
    pace = Pace(lambda: now[0])
    sizes = []
    for took_s in [0.1, 1.0] + [0.1] * 6 + [60.0] * 9 + [5.0]:
        sizes.append(pace.begin(2**30))
        now[0] += took_s
        pace.done()
    assert sizes[:5] == [2**18, 2**20, 2**21, 2**22, 2**22]
    assert max(sizes) == MAX_PIECE_BYTES
    assert sizes[-1] == pace.begin(2**30) == 2**16
    assert pace.begin(10) == 10


def test_a_coordinator_that_keeps_nothing(waiting, monkeypatch) -> None:
    """No endless loop: after some pieces without progress it is retriable."""
    calls = []

    def forgetful(*arguments: Any) -> tuple[int, int]:
        calls.append(arguments)
        return 0, 1000

    monkeypatch.setattr(transfer, "_put", forgetful)
    with pytest.raises(Unavailable) as caught:
        waiting.deliver()
    assert caught.value.code == "no_progress"
    assert len(calls) == MAX_SETBACKS + 2

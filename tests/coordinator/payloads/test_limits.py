"""What the coordinator takes, keeps and gives of blobs: pieces, bounds, owners, full disks, crashes."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edgefl_coordinator.members import uploads
from edgefl_coordinator.payloads.disk import DiskPayloads
from edgefl_coordinator.rounds.aggregation import step, sweep_uploads
from edgefl_coordinator.store import publishing
from edgefl_coordinator.store.store import Store
from edgefl_coordinator.store.tables import audit, offers, replies
from edgefl_coordinator.store.tables import uploads as upload_table
from edgefl_coordinator.web import blob_route, reply_route
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_protocol import Payload
from edgefl_protocol.envelopes.blob import BlobReference, open_blob, sealed_size
from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES, BlobGet, BlobGetReply, BlobPut
from edgefl_protocol.messages.requests import BroadcastRequest, BundleRequest, Refusal, ReplyRequest

TABLES = (upload_table, replies)


@pytest.fixture
def blob(lab) -> Any:
    return lab.Blob(lab.reply_of(1).to_bytes())


def test_pieces_are_counted_once_and_in_order(federation, pair, blob, lab) -> None:
    """docs/security.md 2.2, resumable and idempotent: twice, early, late or overlapping pieces change nothing."""
    member, whole = pair[0], len(blob.sealed)
    assert blob.put(member, 0, 0) == 0
    assert blob.put(member, 0, 1000) == 1000
    assert blob.put(member, 0, 1000) == 1000
    assert blob.put(member, 500, 2000) == 1000
    assert blob.put(member, 5000, 6000) == 1000
    assert blob.put(member, 1000, 2**20) == 2**20
    assert blob.put(member, 0, 0) == 2**20
    assert blob.put(member, 2**20, whole) == whole
    (row,) = lab.rows(federation, upload_table)
    assert (federation.store.home.blobs / row.blob).read_bytes() == blob.sealed
    assert isinstance(blob.reply(member), Payload)
    assert lab.rows(federation, upload_table) == []
    assert row.blob not in lab.files(federation)


def test_pieces_at_once(federation, pair, blob, lab) -> None:
    """Eight of the same piece at once: one counts, the file is what it should be."""
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: blob.put(pair[0], 0, 70_000), range(8))) == {70_000}
    assert len(lab.rows(federation, upload_table)) == 1
    blob.put_all(pair[0])
    assert isinstance(blob.reply(pair[0]), Payload)


def test_a_reply_before_its_blob_and_twice_after(federation, pair, blob, lab) -> None:
    """docs/security.md, idempotency (check 19): the second time gets the first answer and needs no blob."""
    member = pair[0]
    assert blob.reply(member).code == "no_blob"
    blob.put(member, 0, 100_000)
    assert blob.reply(member).code == "no_blob"
    blob.put_all(member, 300_000)
    first = blob.reply(member)
    assert isinstance(first, Payload)
    assert blob.reply(member) == first
    assert blob.reply(member, idem="work-item-00000002").code == "already_replied"
    assert blob.reply(member, key=bytes(32)).code == "idem_conflict"
    assert len(lab.rows(federation, replies)) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [({"key": bytes(32)}, "bad_blob"), ({"sha256": "0" * 64}, "bad_blob"), ({"size": sealed_size(9)}, "bad_blob"),
     ({"blob": "0" * 32}, "no_blob"), ({"size": sealed_size(9 * 2**20)}, "too_large")],
)  # fmt: skip
def test_a_reference_that_does_not_fit(federation, pair, blob, lab, change, code) -> None:
    """docs/security.md 2.2: all of it is verified before use; what does not verify is dropped and never stored."""
    blob.put_all(pair[0])
    before = lab.files(federation)
    assert blob.reply(pair[0], **change).code == code
    assert lab.rows(federation, replies) == []
    assert len(before - lab.files(federation)) == (code == "bad_blob")


def bad_payloads(lab: Any) -> dict[str, bytes]:
    nan = bytearray(lab.reply_of(1).to_bytes())
    nan[-4:] = np.float32(np.nan).tobytes()
    greedy = Payload(lab.weights(1), {"site_sha256": "0" * 64, "n_train": 10**12})
    return {"NaN": bytes(nan), "n_train": greedy.to_bytes(), "digest": Payload(lab.weights(1), {}).to_bytes(),
            "no payload": bytes(2 * 2**20)}  # fmt: skip


@pytest.mark.parametrize("name", ["NaN", "n_train", "digest", "no payload"])
def test_what_a_blob_holds_is_judged_like_any_reply(federation, pair, lab, name) -> None:
    """Check 46: NaN, 10^12 samples, a missing digest: refused by name before anything is stored; the blob goes."""
    sent = lab.Blob(bad_payloads(lab)[name])
    before = lab.files(federation)
    sent.put_all(pair[0])
    assert sent.reply(pair[0]).code == "bad_contribution"
    assert lab.files(federation) == before
    assert lab.rows(federation, replies) == lab.rows(federation, upload_table) == []
    assert [row.event for row in lab.rows(federation, audit)][-1] == "refused"


def test_another_blob_under_the_same_id(pair, blob, lab) -> None:
    blob.put(pair[0], 0, 1000)
    other = lab.Blob(bytes(100_000))
    named = BlobPut(blob=blob.reference.blob, size=other.reference.size, sha256="0" * 64, offset=0, data=b"")
    assert pair[0].call("blob", named.to_payload()).code == "idem_conflict"


def test_the_cap_of_the_signed_task(federation, pair, lab) -> None:
    """docs/security.md 2.2: the signed task states the total cap; a byte more is refused at the first piece."""
    most = sealed_size(federation.settings.limits.reply_bytes)
    task = pair[0].call("task", Payload())
    assert task.scalars["max_reply_bytes"] == federation.settings.limits.reply_bytes
    before = lab.files(federation)
    for size, fits in ((most, True), (most + 1, False)):
        answer = pair[0].call(
            "blob", BlobPut(blob="0" * 32, size=size, sha256="0" * 64, offset=0, data=b"").to_payload()
        )
        assert isinstance(answer, Payload) if fits else answer.code == "idem_conflict"
    one = BlobPut(blob="1" * 32, size=most + 1, sha256="0" * 64, offset=0, data=b"")
    assert pair[0].call("blob", one.to_payload()).code == "too_large"
    assert len(lab.files(federation) - before) == 1


def test_open_blobs_of_one_member(federation, pair, clock, lab) -> None:
    """Quota: a third open blob pushes out the one that rested longest, told in the audit log; others' stay."""
    other = lab.Blob(bytes(100_000))
    other.put(pair[1], 0, 10)
    sent = [lab.Blob(bytes(100_000)) for _ in range(3)]
    for one in sent[:2]:
        clock.now_ms += 1000
        assert one.put(pair[0], 0, 10) == 10
    clock.now_ms += 1000
    assert sent[0].put(pair[0], 10, 20) == 20  # now the second has rested longest
    clock.now_ms += 1000
    assert sent[2].put(pair[0], 0, 10) == 10
    kept = {row.id for row in lab.rows(federation, upload_table)}
    assert kept == {one.reference.blob for one in (other, sent[0], sent[2])}
    assert "blob_pushed_out" in [row.event for row in lab.rows(federation, audit)]
    assert {row.blob for row in lab.rows(federation, upload_table)} <= lab.files(federation)
    assert sent[1].put(pair[0], 0, 0) == 0


def test_blobs_that_rest_are_swept(federation, pair, clock, lab) -> None:
    """Quota: a blob without a piece for a day goes, one from a clock that was ahead rests from now."""
    before = lab.files(federation)
    old, young = lab.Blob(bytes(100_000)), lab.Blob(bytes(100_000))
    old.put(pair[0], 0, 10)
    clock.now_ms += 3600 * 1000
    young.put(pair[0], 0, 10)
    clock.now_ms += 23 * 3600 * 1000
    sweep_uploads(federation)
    assert len(lab.rows(federation, upload_table)) == 2
    clock.now_ms += 1
    sweep_uploads(federation)
    assert [row.id for row in lab.rows(federation, upload_table)] == [young.reference.blob]
    assert len(lab.files(federation) - before) == 1
    clock.now_ms -= 400 * 24 * 3600 * 1000
    sweep_uploads(federation)
    clock.now_ms += 24 * 3600 * 1000 + 1
    sweep_uploads(federation)
    assert lab.files(federation) == before


def test_nobody_else(federation, pair, blob, lab, tools) -> None:
    """Check 25, object ids: what one member sends or is given, another neither reads nor uses nor disturbs."""
    one, two = pair
    blob.put_all(one)
    assert blob.reply(two).code == "no_blob"
    assert blob.put(two, 0, 1000) == 1000  # a blob of its own, under the same id
    assert isinstance(blob.reply(one), Payload)
    assert blob.put(two, 0, 0) == 1000
    offered = BlobReference.from_payload(one.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=1))
    wanted = BlobGet(blob=offered.blob, offset=0, length=1000).to_payload()
    assert isinstance(one.call("blob", wanted), Payload)
    assert two.call("blob", wanted).code == "not_found"
    assert one.call("blob", BlobGet(blob="0" * 32, offset=0, length=1).to_payload()).code == "not_found"
    stranger = tools.Member(federation, "nobody")
    assert stranger.call("blob", wanted) == 401
    OPERATIONS["revoke"](federation, {"name": "clinic-b"})
    assert {row.skid for row in lab.rows(federation, upload_table)} == set()
    assert two.call("blob", wanted) == 401


@pytest.mark.parametrize("moment", ["piece", "reply"])
def test_who_is_revoked_meanwhile_finishes_nothing(federation, pair, blob, lab, monkeypatch, moment) -> None:
    """Check 24: shut out between the signature and the effect, an upload is not counted and a reply not taken."""
    before, place = lab.files(federation), {"piece": "put_piece", "reply": "put"}[moment]
    blob.put_all(pair[0]) if moment == "reply" else blob.put(pair[0], 0, 1000)
    whole = getattr(DiskPayloads, place)

    def revoked_after(*arguments: Any) -> Any:
        done = whole(*arguments)
        OPERATIONS["revoke"](federation, {"name": "clinic-a"})
        return done

    monkeypatch.setattr(DiskPayloads, place, revoked_after)
    answer = blob.reply(pair[0]) if moment == "reply" else blob.put(pair[0], 1000, 2000)
    assert answer.code == "not_approved"
    assert lab.rows(federation, upload_table) == lab.rows(federation, replies) == []
    assert lab.files(federation) == before


def test_a_broadcast_in_any_pieces(federation, pair, lab) -> None:
    """docs/security.md 2.2: sealed for one recipient under a key of its own, the same bytes each time."""
    found = []
    for member in pair:
        answers = [member.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=1) for _ in range(2)]
        assert answers[0] == answers[1]
        reference = BlobReference.from_payload(answers[0])
        sealed = b""
        while len(sealed) < reference.size:
            wanted = BlobGet(blob=reference.blob, offset=len(sealed), length=123_457)
            sealed += BlobGetReply.from_payload(member.call("blob", wanted.to_payload())).data
        behind = BlobGet(blob=reference.blob, offset=reference.size, length=10).to_payload()
        assert BlobGetReply.from_payload(member.call("blob", behind)).data == b""
        plain = open_blob([sealed], reference)
        got = Payload.from_bytes(plain).arrays["backbone.conv"]
        assert got.tobytes() == lab.weights(0)["backbone.conv"].tobytes()
        found.append((reference.blob, reference.key, reference.sha256))
    assert all(a != b for a, b in zip(*found, strict=True))
    assert len(lab.rows(federation, offers)) == 2


def test_a_broadcast_of_the_past_is_gone(federation, pair, lab) -> None:
    """Past rounds' blobs are deleted when nothing needs them; who still fetches one is told."""
    wanted = []
    for number, member in enumerate(pair):
        answer = member.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=1)
        wanted.append(BlobGet(blob=BlobReference.from_payload(answer).blob, offset=0, length=10).to_payload())
        sent = lab.Blob(lab.reply_of(number).to_bytes())
        sent.put_all(member)
        assert isinstance(sent.reply(member), Payload)
    assert step(federation, lab.averaging_worker)
    assert lab.rows(federation, offers) == []
    assert len(lab.files(federation)) == 3  # the state, and a broadcast of each
    for member, request in zip(pair, wanted, strict=True):
        assert member.call("blob", request).code == "not_found"


def test_a_late_reply_keeps_its_blob_for_the_next_round(federation, pair, blob, clock, lab) -> None:
    """docs/security.md, order of checks: too late is typed; what was sent is not sent again."""
    blob.put_all(pair[0])
    assert blob.reply(pair[0], number=2).code == "no_round"
    assert len(lab.rows(federation, upload_table)) == 1
    assert isinstance(blob.reply(pair[0], number=1), Payload)


def test_a_full_disk(federation, pair, blob, lab, monkeypatch) -> None:
    """Check 59: refused while there is no room, nothing counted that is not there, and it goes on afterwards."""
    before = lab.files(federation)
    with monkeypatch.context() as patch:
        patch.setattr(DiskPayloads, "free_bytes", lambda _: 2 * blob.reference.size - 1)
        assert blob.put(pair[0], 0, 1000).code == "storage_full"
    assert lab.files(federation) == before
    assert blob.put(pair[0], 0, 1000) == 1000

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("pwrite", "fdatasync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            assert blob.put(pair[0], 1000, 2000).code == "storage_full"
        assert blob.put(pair[0], 0, 0) == 1000
    blob.put(pair[0], 1000, 2000)
    blob.put_all(pair[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert blob.reply(pair[0]).code == "storage_full"
    assert isinstance(blob.reply(pair[0]), Payload)


def test_room_that_was_promised_to_others(federation, pair, blob, lab, monkeypatch) -> None:
    """Check 59, quota: what another member has begun counts as taken, its pieces that came do not count twice."""
    other, size = lab.Blob(bytes(100_000)), blob.reference.size
    assert blob.put(pair[0], 0, 1000) == 1000
    free = 2 * other.reference.size + size - 1000
    monkeypatch.setattr(DiskPayloads, "free_bytes", lambda _: free)
    free -= 1
    assert other.put(pair[1], 0, 10).code == "storage_full"
    free += 1
    assert other.put(pair[1], 0, 10) == 10
    free = 2 * other.reference.size + other.reference.size - 10  # one's own can be pushed out: it does not count
    assert lab.Blob(bytes(100_000)).put(pair[0], 0, 10) == 10


class Killed(BaseException):
    """The process ends here."""


def die(*_: object, **__: object) -> None:
    raise Killed


# fmt: off
KILLS = [
    # where it dies (module, name), what it was doing, pieces acknowledged before and still there after
    (uploads, "begin",          "put",   0),
    (None,    "put_piece",      "put",   0),  # of the place where payloads lie
    (uploads, "count",          "put",   0),
    (reply_route, "check_reply",   "reply", None),
    (reply_route.stored_rounds, "accept_reply", "reply", None),
    (Store,   "drop_blobs",     "reply", "done"),
    (blob_route._KEEP_OFFER, "run", "fetch", 0),
]
# fmt: on


@pytest.mark.both_places
@pytest.mark.parametrize(("where", "name", "doing", "left"), KILLS, ids=[f"{k[2]}-{k[1]}" for k in KILLS])
def test_a_kill_at_every_step(
    federation, make_coordinator, pair, blob, lab, monkeypatch, where, name, doing, left
) -> None:
    """Check 55: what was acknowledged is there after a restart, what was not is gone, and no file is left over."""
    member, size = pair[0], len(blob.sealed)
    if doing == "reply":
        blob.put_all(member)
    before = lab.files(federation)
    with monkeypatch.context() as patch:
        patch.setattr(where or type(federation.store.payloads), name, die)
        with pytest.raises(Killed):
            if doing == "put":
                blob.put(member, 0, 1000)
            elif doing == "reply":
                blob.reply(member)
            else:
                member.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=1)
    federation.store.close()
    again = make_coordinator()
    if again.store.payloads.shared:  # there `serve` sweeps, what is an hour old
        with monkeypatch.context() as patch:
            patch.setattr("edgefl_coordinator.store.store._OLD_S", -60)
            again.store.sweep()
    for one in pair:
        one.coordinator = again
    begun = {row.blob for row in lab.rows(again, upload_table) if row.have}
    stored = begun | {row.blob for row in lab.rows(again, replies)}
    assert stored <= lab.files(again)
    if left == "done":
        assert len(lab.rows(again, replies)) == 1 and lab.rows(again, upload_table) == []
    elif doing == "reply":
        assert lab.files(again) == before
        assert blob.put(member, 0, 0) == size
    blob.put_all(member) if doing == "put" else None
    if doing != "fetch":
        assert isinstance(blob.reply(member), Payload)
        assert len(lab.rows(again, replies)) == 1
        assert len(lab.files(again)) == 4  # the state, two broadcasts, the reply
    else:
        assert BlobReference.from_payload(member.call("broadcast", BroadcastRequest(round=1).to_payload(), rnd=1))


def test_what_a_crash_left_is_swept_at_start(federation, make_coordinator, pair, blob, lab) -> None:
    """Reliability: a file that no row names goes; an upload under way stays and goes on."""
    blob.put(pair[0], 0, 1000)
    (federation.store.home.blobs / "orphan").write_bytes(b"x")
    federation.store.close()
    again = make_coordinator()
    assert "orphan" not in lab.files(again)
    pair[0].coordinator = again
    assert blob.put(pair[0], 0, 0) == 1000


def test_pieces_fit_a_body(federation, pair, blob) -> None:
    """The longest piece and its envelope fit the route's cap; a body of one byte more is refused by the guard."""
    answer = pair[0].call("blob", BlobPut(blob="0" * 32, size=16, sha256="0" * 64, offset=0, data=b"").to_payload())
    assert answer.scalars["piece_bytes"] == MAX_PIECE_BYTES
    piece = BlobPut(blob="0" * 32, size=2**23, sha256="0" * 64, offset=0, data=bytes(MAX_PIECE_BYTES))
    assert len(pair[0].envelope("blob", piece.to_payload())) <= MAX_PIECE_BYTES + 64 * 2**10


def test_a_large_bundle(federation, pair, lab) -> None:
    """A bundle with its training graph is large too; a member of its own fetches it the same way."""
    data = bytes(range(256)) * 8000
    kept = federation.store.put_blob(data)
    with federation.store.transaction() as connection:
        publishing.publish(
            connection, federation.clock(), line="main", task="nevus", version=1, bundle_id="main", blob=kept
        )
    wanted = BundleRequest(line="main", task="nevus", version=1).to_payload()
    reference = BlobReference.from_payload(pair[0].call("bundle", wanted))
    piece = BlobGet(blob=reference.blob, offset=0, length=MAX_PIECE_BYTES).to_payload()
    sealed = BlobGetReply.from_payload(pair[0].call("blob", piece)).data
    assert open_blob([sealed], reference) == data
    assert pair[1].call("blob", piece).code == "not_found"


def test_an_inline_reply_may_still_come(federation, pair, lab) -> None:
    small = Payload({"backbone.conv": np.zeros(9, np.float32)}, {"site_sha256": "0" * 64, "n_train": 1})
    answer = pair[0].call("reply", ReplyRequest(idem="i" * 16, reply=small).to_payload(), rnd=1)
    assert isinstance(answer, Payload) and not isinstance(answer, Refusal)

"""The route `reply`: a work item is checked, stored and acknowledged once, whether it came inline or as a blob.

Guarantees: a duplicate gets the first answer and costs neither a check nor a file; a reply is durable before it is
acknowledged, a small one by the commit that takes it; a blob goes when its payload is stored, and when it can never be
taken. Where the reply only came too late, its blob stays for the next round until its age sweeps it, so that nothing is
sent twice. Source: docs/security.md, replay window and idempotency, 2.2, reliability.
"""

import hashlib
from functools import partial

from sqlalchemy import Connection

from edgefl_coordinator.commits.crowd import apart
from edgefl_coordinator.commits.shared_commit import may_be_kept
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import uploads
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import newest_replies, stored_rounds
from edgefl_coordinator.rounds.reply_forms import check_reply
from edgefl_coordinator.store import inbox
from edgefl_coordinator.store.store import SMALL_BYTES
from edgefl_coordinator.web.admission import Call, read, refuse, transact
from edgefl_coordinator.web.blob_route import drop_upload, take_blob
from edgefl_protocol import Payload, PayloadError
from edgefl_protocol.envelopes.blob import BlobReference
from edgefl_protocol.errors import StorageError
from edgefl_protocol.messages.requests import ReplyReply, ReplyRequest


def reply_route(call: Call) -> bytes:
    """Take a member's reply of a round; returns the payload of the answer as it was stored."""
    request = read(call, ReplyRequest.from_payload)
    if not isinstance(request.reply, BlobReference):
        return _take(call, request)
    store = call.coordinator.store
    if not store.waiting_large.acquire(blocking=False):  # the threads of small requests would all wait here
        refuse(call, RefusedError("busy", "other large replies are being read; send this one again in a moment"))
    try:
        return apart(partial(_take_large, call, request))
    finally:
        store.waiting_large.release()


def _take_large(call: Call, request: ReplyRequest) -> bytes:
    with call.coordinator.store.large:
        return _take(call, request)


def _take(call: Call, request: ReplyRequest) -> bytes:
    store, settings, header = call.coordinator.store, call.coordinator.settings, call.opened.header
    sha256 = hashlib.sha256(call.opened.payload).hexdigest()
    found: stored_rounds.Accepted | None = None
    spare: list[str] = []  # files that no row names

    def first(connection: Connection, member: MemberRow) -> bytes | None:
        return inbox.first_answer(connection, member.skid, request.idem, sha256)

    if not _is_small(call, request):
        answered = transact(call, first)
        if answered is not None:
            return answered
        found = _store(call, request)
        spare = [found.blob.name]

    def effect(connection: Connection, member: MemberRow) -> tuple[bytes, list[str]]:
        twin = first(connection, member)  # a small one, or sent twice at once
        if twin is not None:
            return twin, spare
        reply = found
        if not isinstance(request.reply, BlobReference):
            reply = reply or _keep(call, connection, request.reply, request.idem)
        assert reply is not None
        replaced = stored_rounds.accept_reply(connection, settings, call.now_ms, member, header.rnd, reply)
        _check_handed_on(connection, settings.task.most_arrays)
        answer = ReplyReply(accepted=True, first_answer_ms=call.now_ms).to_payload().to_bytes()
        inbox.keep_answer(connection, call.now_ms, member.skid, request.idem, sha256, answer)
        if not isinstance(request.reply, BlobReference):
            return answer, replaced
        return answer, [*replaced, *uploads.remove(connection, member.skid, request.reply.blob)]

    try:
        answer, spare = transact(call, effect)
        return answer
    except StorageError as error:
        if may_be_kept(error):
            spare = []
        raise
    finally:
        if spare:  # files, or objects of a store that may answer late
            apart(partial(store.drop_blobs, spare))


def _check_handed_on(connection: Connection, most: int | None) -> None:
    """Refuse, as `too_large`, a reply, just stored, where all maps together would be too many to be handed on."""
    if most is not None and (held := newest_replies.held_arrays(connection)) > most:
        raise RefusedError(
            "too_large",
            f"with this reply the members' maps take {held} arrays, and at most {most} travel together: the "
            "federation is full; tell its operator",
        )


def _is_small(call: Call, request: ReplyRequest) -> bool:
    """Tell whether a reply becomes durable with the transaction that names it, and not as a file before."""
    return not isinstance(request.reply, BlobReference) and len(call.opened.payload) <= SMALL_BYTES


def _keep(call: Call, connection: Connection, reply: Payload, idem: str) -> stored_rounds.Accepted:
    """Check a small reply and write it within the caller's transaction; a `RefusedError` as of `_store`."""
    data = reply.to_bytes()
    _check_size(call, data)
    site_sha256 = check_reply(reply, call.coordinator.settings.task)
    blob = call.coordinator.store.put_small(connection, data)
    return stored_rounds.Accepted(blob, idem, tuple(reply.arrays), site_sha256)


def _check_size(call: Call, data: bytes) -> None:
    limit = call.coordinator.settings.limits.reply_bytes
    if len(data) > limit:
        raise RefusedError("too_large", f"the reply has {len(data)} bytes; at most {limit} are allowed")


def _store(call: Call, request: ReplyRequest) -> stored_rounds.Accepted:
    """Check a reply and write its file, before the transaction that will name it.

    Raises:
        RefusedError: the round takes none, a blob is missing or damaged, `bad_contribution` or `too_large`; nothing
            was stored.
        StorageError: the disk is full.
    """
    data = take_blob(call, request.reply) if isinstance(request.reply, BlobReference) else request.reply.to_bytes()
    try:
        _check_size(call, data)
        reply = Payload.from_bytes(data, len(data)) if isinstance(request.reply, BlobReference) else request.reply
        site_sha256 = check_reply(reply, call.coordinator.settings.task)
    except (RefusedError, PayloadError) as error:
        if isinstance(request.reply, BlobReference):
            drop_upload(call, request.reply)
        refused = error if isinstance(error, RefusedError) else RefusedError("bad_contribution", str(error)[:500])
        refuse(call, refused)
    blob = call.coordinator.store.put_blob(data)
    return stored_rounds.Accepted(blob, request.idem, tuple(reply.arrays), site_sha256)

"""What each sealed route does with a request that was opened and, from a member, admitted.

Guarantees: a handler reads the payload, has its effect in one transaction and returns the answer's payload, or raises
the refusal. Newcomers are no members yet: their message is admitted with the enrolment itself.
Source: docs/security.md, routes, enrolment, replay window and idempotency.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping

from sqlalchemy import Connection

from edgefl_coordinator import audit, inbox, members, progress, publishing, task_status
from edgefl_coordinator.calls import Call, check_round, keep_window, read, refuse, transact
from edgefl_coordinator.contributions import check_reply
from edgefl_coordinator.coordinator import INDEX_VALID_MS, Coordinator
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import Member
from edgefl_protocol import Payload
from edgefl_protocol.messages import (
    BroadcastRequest,
    BundleReply,
    BundleRequest,
    EmptyRequest,
    EnrolProofReply,
    EnrolProofRequest,
    EnrolReply,
    EnrolRequest,
    RecordReply,
    ReplyReply,
    ReplyRequest,
)
from edgefl_protocol.records import make_index

MAX_BROADCAST_BYTES = 32 * 2**20 - 64 * 2**10  # one envelope less its overhead; larger ones need blobs


def _enrol(call: Call) -> Payload:
    request = read(call, EnrolRequest.from_payload)
    refused: RefusedError | None = None
    with call.coordinator.store.transaction() as connection:
        try:
            with connection.begin_nested():
                check_round(call)
                member = members.enrol(connection, call.now_ms, request, call.sealing)
                # The window is kept for members only: a newcomer with a wrong token leaves nothing but an audit row.
                keep_window(connection, call)
        except RefusedError as error:
            refused = error
            audit.append(connection, call.now_ms, "enrol_refused", request.name, {"code": error.code})
    if refused is not None:
        raise refused
    return EnrolReply(state="pending", nonce=_nonce(call.coordinator, member.skid)).to_payload()


def _enrol_proof(call: Call) -> Payload:
    request = read(call, EnrolProofRequest.from_payload)

    def effect(connection: Connection, member: Member) -> Payload:
        if not hmac.compare_digest(request.nonce, _nonce(call.coordinator, member.skid)):
            raise RefusedError("bad_proof", "this is not the nonce that was sealed to the new key; enrol again")
        state = members.prove(connection, call.now_ms, member)
        print_ = member.fingerprint(call.coordinator.settings.federation)
        return EnrolProofReply(state=state, fingerprint=print_).to_payload()

    return transact(call, effect)


def _nonce(coordinator: Coordinator, skid: str) -> bytes:
    """The same nonce for the same newcomer: a retry gets the same answer, and no secret lies in the store."""
    return coordinator.derive("enrol-nonce", skid)


def _task(call: Call) -> Payload:
    read(call, EmptyRequest.from_payload)
    return transact(
        call, lambda connection, member: task_status.task_reply(call.coordinator, connection, member, call.now_ms)
    )


def _broadcast(call: Call) -> Payload:
    request = read(call, BroadcastRequest.from_payload)
    rounds = call.coordinator.settings.rounds

    def effect(connection: Connection, member: Member) -> str:
        if request.round != call.opened.header.rnd:
            raise RefusedError("bad_message", "the header's rnd and the payload's round differ")
        name = progress.release_broadcast(connection, rounds, member, request.round)
        audit.append(connection, call.now_ms, "broadcast_released", member.name, {"round": request.round})
        return name

    data = call.coordinator.store.get_blob(transact(call, effect))
    if len(data) > MAX_BROADCAST_BYTES:
        sentence = f"the broadcast has {len(data)} bytes, {MAX_BROADCAST_BYTES} fit one envelope"
        refuse(call, RefusedError("too_large", sentence))
    return Payload.from_bytes(data)


def _reply(call: Call) -> Payload:
    store, policy, header = call.coordinator.store, call.coordinator.settings.rounds.policy, call.opened.header
    request = read(call, ReplyRequest.from_payload)
    sha256 = hashlib.sha256(call.opened.payload).hexdigest()

    def first(connection: Connection, member: Member) -> Payload | None:
        stored = inbox.first_answer(connection, member.skid, request.idem, sha256)
        return None if stored is None else Payload.from_bytes(stored)

    answered = transact(call, first)  # a duplicate costs neither a check nor a blob
    if answered is not None:
        return answered
    reply = _store_reply(call, request)
    kept: list[bool] = []

    def effect(connection: Connection, member: Member) -> Payload:
        twin = first(connection, member)  # sent twice at once
        if twin is not None:
            return twin
        progress.accept_reply(connection, policy, call.now_ms, member, header.rnd, reply)
        answer = ReplyReply(accepted=True, first_answer_ms=call.now_ms).to_payload()
        inbox.keep_answer(connection, call.now_ms, member.skid, request.idem, sha256, answer.to_bytes())
        kept.append(True)
        return answer

    committed = False
    try:
        answer = transact(call, effect)
        committed = bool(kept)
        return answer
    finally:
        if not committed:
            store.drop_blobs([reply.blob.name])


def _store_reply(call: Call, request: ReplyRequest) -> progress.Accepted:
    """Check a reply and write its blob, before the transaction that will name it.

    Raises:
        RefusedError: `bad_contribution` or `too_large`; nothing was stored.
        StorageError: the disk is full.
    """
    settings = call.coordinator.settings
    try:
        site_sha256 = check_reply(request.reply, settings.task)
    except RefusedError as error:
        refuse(call, error)
    data, limit = request.reply.to_bytes(), settings.limits.reply_bytes
    if len(data) > limit:
        refuse(call, RefusedError("too_large", f"the reply has {len(data)} bytes, at most {limit} are accepted"))
    blob = call.coordinator.store.put_blob(data)
    return progress.Accepted(blob, request.idem, len(request.reply.arrays), site_sha256)


def _index(call: Call) -> Payload:
    read(call, EmptyRequest.from_payload)
    coordinator = call.coordinator

    def effect(connection: Connection, _: Member) -> Payload:
        record = make_index(
            coordinator.keys.signing,
            coordinator.settings.federation,
            publishing.entries(connection),
            call.now_ms,
            call.now_ms + INDEX_VALID_MS,
        )
        return RecordReply(record=record).to_payload()

    return transact(call, effect)


def _bundle(call: Call) -> Payload:
    request = read(call, BundleRequest.from_payload)

    def effect(connection: Connection, member: Member) -> str:
        name = publishing.bundle_blob(connection, request.line, request.task, request.version)
        subject = f"{request.line}/{request.task}"
        detail = {"version": request.version, "member": member.name}
        audit.append(connection, call.now_ms, "bundle_fetched", subject, detail)
        return name

    return BundleReply(bundle=call.coordinator.store.get_blob(transact(call, effect))).to_payload()


def _keys(call: Call) -> Payload:
    read(call, EmptyRequest.from_payload)
    return transact(call, lambda *_: RecordReply(record=call.coordinator.key_record()).to_payload())


HANDLERS: Mapping[str, Callable[[Call], Payload]] = {
    "enrol": _enrol,
    "enrol-proof": _enrol_proof,
    "task": _task,
    "broadcast": _broadcast,
    "reply": _reply,
    "index": _index,
    "bundle": _bundle,
    "keys": _keys,
}

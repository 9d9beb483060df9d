"""What each sealed route does with a request that was opened and, from a member, admitted.

Guarantees: a handler reads the payload, has its effect in one transaction and returns the answer's payload, or raises
the refusal. Newcomers are no members yet: their message is admitted with the enrolment itself.
Source: docs/security.md, routes, enrolment, replay window and idempotency.
"""

import hmac
import logging
from collections.abc import Callable, Mapping
from typing import NoReturn

from sqlalchemy import Connection

from edgefl_coordinator.commits.shared_commit import done_again
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.rounds import stored_broadcasts, stored_rounds, task_status
from edgefl_coordinator.store import audit, publishing, revocations
from edgefl_coordinator.store.coordinator import INDEX_VALID_MS, Coordinator
from edgefl_coordinator.web.admission import Call, check_round, keep_window, read, refuse, transact
from edgefl_coordinator.web.blob_route import blob_route, offer
from edgefl_coordinator.web.reply_route import reply_route
from edgefl_protocol import Payload
from edgefl_protocol.envelopes.blob import BLOB_ABOVE_BYTES
from edgefl_protocol.errors import RecordError, StorageError
from edgefl_protocol.messages.key_messages import IndexReply, RotateReply, RotateRequest
from edgefl_protocol.messages.requests import (
    BroadcastRequest,
    BundleReply,
    BundleRequest,
    EmptyRequest,
    EnrolProofReply,
    EnrolProofRequest,
    EnrolReply,
    EnrolRequest,
    RecordReply,
)
from edgefl_protocol.records.coordinator_records import make_index
from edgefl_protocol.records.revocation import make_revoked
from edgefl_protocol.records.rotation import verify_rotation

log = logging.getLogger("edgefl_coordinator")


def _enrol(call: Call) -> Payload:
    request = read(call, EnrolRequest.from_payload)

    def enrolled() -> MemberRow | RefusedError:
        with call.coordinator.store.transaction() as connection:
            try:
                with connection.begin_nested():
                    check_round(call)
                    member = membership.enrol(connection, call.now_ms, request, call.sealing)
                    # The window is kept for members only: one with a wrong token leaves nothing but an audit row.
                    keep_window(connection, call)
                    return member
            except RefusedError as error:
                audit.append(connection, call.now_ms, "enrol_refused", request.name, {"code": error.code})
                return error

    member = done_again(enrolled)
    if isinstance(member, RefusedError):
        raise member
    return EnrolReply(state="pending", nonce=_nonce(call.coordinator, member.skid)).to_payload()


def _enrol_proof(call: Call) -> Payload:
    request = read(call, EnrolProofRequest.from_payload)

    def effect(connection: Connection, member: MemberRow) -> Payload:
        if not hmac.compare_digest(request.nonce, _nonce(call.coordinator, member.skid)):
            raise RefusedError("bad_proof", "this is not the nonce that was sealed to the new key; enrol again")
        state = membership.prove(connection, call.now_ms, member)
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

    def effect(connection: Connection, member: MemberRow) -> str:
        if request.round != call.opened.header.rnd:
            raise RefusedError("bad_message", "the header's rnd and the payload's round differ")
        name = stored_broadcasts.release_broadcast(connection, rounds, member, request.round)
        event = "end_released" if task_status.round_state(connection) == "done" else "broadcast_released"
        audit.append(connection, call.now_ms, event, member.name, {"round": request.round})
        return name

    store, name = call.coordinator.store, transact(call, effect)
    try:
        if store.payloads.size(name) > BLOB_ABOVE_BYTES:
            return offer(call, name).to_payload()
        return Payload.from_bytes(store.get_blob(name))
    except StorageError as error:
        if error.code not in ("damaged", "missing"):
            raise
        _make_anew(call, request.round, name, error)


def _make_anew(call: Call, number: int, blob: str, error: StorageError) -> NoReturn:
    """Let a broadcast that is lost be made anew, and refuse it until then as one that is not ready.

    A `StorageError` where the server's state, of which it is made, is lost, too: as with a disk that is not mounted.
    """
    store = call.coordinator.store
    if newest := transact(call, lambda connection, _: stored_rounds.latest_state(connection)):
        store.payloads.size(newest[1])
    if transact(call, lambda connection, member: stored_broadcasts.make_anew(connection, member, number, blob)):
        log.error("a broadcast of round %d is lost and is made anew: %s", number, error)
        store.drop_blobs([blob])
    refuse(call, stored_broadcasts.not_ready(number), error)


def _index(call: Call) -> Payload:
    read(call, EmptyRequest.from_payload)
    coordinator = call.coordinator

    key, federation, until_ms = coordinator.keys.signing, coordinator.settings.federation, call.now_ms + INDEX_VALID_MS

    def effect(connection: Connection, _: MemberRow) -> Payload:
        index = make_index(key, federation, publishing.entries(connection), call.now_ms, until_ms)
        version, key_ids = revocations.listed(connection)
        revoked = make_revoked(key, federation, version, key_ids, call.now_ms, until_ms)
        return IndexReply(index=index, revoked=revoked).to_payload()

    return transact(call, effect)


def _bundle(call: Call) -> Payload:
    request = read(call, BundleRequest.from_payload)

    def effect(connection: Connection, member: MemberRow) -> str:
        name = publishing.bundle_blob(connection, request.line, request.task, request.version)
        subject = f"{request.line}/{request.task}"
        detail = {"version": request.version, "member": member.name}
        audit.append(connection, call.now_ms, "bundle_fetched", subject, detail)
        return name

    store, name = call.coordinator.store, transact(call, effect)
    if store.payloads.size(name) > BLOB_ABOVE_BYTES:
        return offer(call, name).to_payload()
    return BundleReply(bundle=store.get_blob(name)).to_payload()


def _keys(call: Call) -> Payload:
    read(call, EmptyRequest.from_payload)
    return transact(call, lambda *_: RecordReply(record=call.coordinator.key_record()).to_payload())


def _rotate(call: Call) -> Payload:
    request = read(call, RotateRequest.from_payload)
    federation = call.coordinator.settings.federation
    try:
        rotation = verify_rotation(request.record, federation)
    except RecordError as error:
        refuse(call, RefusedError("bad_proof", f"the change of keys is refused: {error}"[:500]), error)
    if call.opened.sender not in (rotation.old, rotation.new):
        refuse(call, RefusedError("bad_proof", "the change of keys is of another member"))

    def effect(connection: Connection, member: MemberRow) -> Payload:
        until_ms = membership.rotate(connection, call.now_ms, member, rotation, request.record)
        changed = membership.by_skid(connection, rotation.new.key_id) or member
        return RotateReply(old_until_ms=until_ms, fingerprint=changed.fingerprint(federation)).to_payload()

    return transact(call, effect)


HANDLERS: Mapping[str, Callable[[Call], Payload | bytes]] = {
    "enrol": _enrol,
    "enrol-proof": _enrol_proof,
    "task": _task,
    "broadcast": _broadcast,
    "reply": reply_route,
    "blob": blob_route,
    "index": _index,
    "bundle": _bundle,
    "keys": _keys,
    "rotate": _rotate,
}

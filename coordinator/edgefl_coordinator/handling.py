"""What happens to a sealed request: open, one transaction, seal the answer.

Guarantees: until the signature is verified every failure gives the same 401, byte for byte, and leaves no trace in
the store; after it, every answer is sealed to the sender and bound to its request. The order is that of
docs/security.md 2.3:
    (1) envelope: size to signature (edgefl_protocol.envelope)
    (2) one transaction: replay window and message id, member's state, idempotency, round, effect, audit row
    (3) the sealed answer, or a sealed `Refusal`
A refusal in (2) undoes the effect and keeps the window, so a refused message cannot be sent a second time either.
"""

import hashlib
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection

from edgefl_coordinator import audit, inbox, members, progress, publishing, task_status
from edgefl_coordinator.contributions import check_reply
from edgefl_coordinator.coordinator import INDEX_VALID_MS, Coordinator
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import Member
from edgefl_coordinator.store import Blob
from edgefl_protocol import EnvelopeError, Expected, JudgedByCaller, Opened, Payload, PayloadError, PublicSealingKey
from edgefl_protocol.envelope import Tolerance, open_enrolment, open_envelope, seal
from edgefl_protocol.errors import KeyMaterialError, StorageError
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
    Refusal,
    ReplyReply,
    ReplyRequest,
    Route,
)
from edgefl_protocol.records import make_index
from edgefl_protocol.replies import reply_fields

MAX_BROADCAST_BYTES = 32 * 2**20 - 64 * 2**10  # one envelope less its overhead; larger ones need blobs
UNAUTHENTICATED = b'{"error":"refused"}\n'  # the one body of a 401

log = logging.getLogger("edgefl_coordinator")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    body: bytes
    sealed: bool


@dataclass(frozen=True)
class Call:
    """An authenticated request on its way through the store.

    Attributes:
        coordinator: whose store.
        route: the route.
        opened: the verified envelope.
        sealing: the key to seal the answer to.
        now_ms: one reading of the clock for the whole request.
    """

    coordinator: Coordinator
    route: Route
    opened: Opened
    sealing: PublicSealingKey
    now_ms: int

    def payload(self) -> Payload:
        """Decode the payload.

        Raises:
            PayloadError: it breaks its format.
        """
        return Payload.from_bytes(self.opened.payload)


Effect = Callable[[Connection, Member], Payload]


def handle(coordinator: Coordinator, route: Route, body: bytes) -> Answer:
    """Answer one sealed request.

    Args:
        coordinator: settings, store, keys, clock.
        route: what the server routed.
        body: the envelope as received.
    """
    now_ms = coordinator.clock()
    try:
        call = _open(coordinator, route, body, now_ms)
    except EnvelopeError as error:
        log.info("refused before the signature: %s %s", route.cty, error.code)
        return Answer(401, UNAUTHENTICATED, sealed=False)
    try:
        payload = _HANDLERS[route.cty](call)
    except RefusedError as error:
        return _seal(call, error.refusal)
    except PayloadError as error:
        return _seal(call, Refusal(code="bad_message", message=str(error)[:500]))
    except StorageError as error:
        log.error("storage: %s", error)
        full = error.code == "disk_full"
        message = "the coordinator's disk is full; keep the work and send it again later"
        return _seal(call, Refusal(code="storage_full", message=message) if full else _INTERNAL)
    return _seal(call, payload)


_INTERNAL = Refusal(code="internal", message="the coordinator failed; keep the work and send it again later")


def _open(coordinator: Coordinator, route: Route, body: bytes, now_ms: int) -> Call:
    """Run step (1).

    Raises:
        EnvelopeError: whatever it is, the caller answers the same.
    """
    settings = coordinator.settings
    expected = Expected(pth=route.path, fed=settings.federation, typ="request", cty=route.cty)
    tolerance = Tolerance(skew_ms=settings.limits.skew_ms, lifetime_ms=settings.limits.lifetime_ms)
    key = coordinator.keys.sealing
    if route.cty == "enrol":
        opened = open_enrolment(body, key, expected, now_ms, JudgedByCaller(), tolerance=tolerance)
        try:
            request = EnrolRequest.from_payload(Payload.from_bytes(opened.payload))
            sealing = PublicSealingKey(request.sealing_suite, request.sealing_public)
        except (PayloadError, KeyMaterialError) as error:
            # There is no key to seal an answer to, so this is refused like a broken envelope.
            raise EnvelopeError("the enrolment's payload does not fit the route") from error
        return Call(coordinator, route, opened, sealing, now_ms)
    found: dict[str, Member] = {}

    def sender(skid: str) -> bytes | None:
        with coordinator.store.transaction() as connection:
            member = members.by_skid(connection, skid)
        if member is None or member.state == "revoked" or (route.roles and member.role not in route.roles):
            return None
        found[skid] = member
        return member.signing.public

    opened = open_envelope(
        body,
        key,
        sender,
        expected,
        now_ms,
        JudgedByCaller(),
        max_bytes=settings.limits.body_bytes,
        tolerance=tolerance,
    )
    return Call(coordinator, route, opened, found[opened.header.skid].sealing, now_ms)


def _transact(call: Call, effect: Effect) -> Payload:
    """Run step (2) for a member.

    Raises:
        RefusedError: the effect did not happen; the window and an audit row were kept.
        StorageError: nothing was kept.
    """
    header = call.opened.header
    refused: RefusedError | None = None
    with call.coordinator.store.transaction() as connection:
        member = members.by_skid(connection, header.skid)
        name = member.name if member else header.skid
        try:
            with connection.begin_nested():
                inbox.admit(connection, header, call.now_ms, _forget_ms(call))
        except RefusedError as error:
            refused = error
        if refused is None:
            try:
                with connection.begin_nested():
                    _check_round(call)
                    return effect(connection, _entitled(member, call.route))
            except RefusedError as error:
                refused = error
        detail = {"route": call.route.cty, "code": refused.code, "round": header.rnd}
        audit.append(connection, call.now_ms, "refused", name, detail)
    raise refused


def _entitled(member: Member | None, route: Route) -> Member:
    """Return the member if its state lets it use the route.

    Raises:
        RefusedError: `pending` or `not_approved`.
    """
    if member is None or member.state == "revoked":
        raise RefusedError("not_approved", "this key was revoked")
    if not route.roles or member.state == "approved":
        return member
    if member.state == "pending":
        raise RefusedError("pending", "the operator has not approved this enrolment yet; compare the fingerprint")
    raise RefusedError("not_approved", "this enrolment has not proved its keys; run `edgefl enrol` again")


def _check_round(call: Call) -> None:
    """Refuse a round on a route that knows none: it would be signed and mean nothing."""
    if call.opened.header.rnd != 0 and not call.route.in_round:
        raise RefusedError("bad_message", f"the header's rnd is 0 on the route {call.route.cty}")


def _forget_ms(call: Call) -> int:
    return call.opened.header.exp + call.coordinator.settings.limits.skew_ms


def _seal(call: Call, answer: Payload | Refusal) -> Answer:
    """Run step (3)."""
    status = answer.status if isinstance(answer, Refusal) else 200
    payload = answer.to_payload() if isinstance(answer, Refusal) else answer
    fields = reply_fields(call.opened, sts=status, now_ms=call.now_ms)
    return Answer(status, seal(payload.to_bytes(), fields, call.coordinator.keys.signing, call.sealing), sealed=True)


def _enrol(call: Call) -> Payload:
    request = EnrolRequest.from_payload(call.payload())
    header = call.opened.header
    refused: RefusedError | None = None
    with call.coordinator.store.transaction() as connection:
        try:
            with connection.begin_nested():
                _check_round(call)
                member = members.enrol(connection, call.now_ms, request, call.sealing)
                # The window is kept for members only: a newcomer with a wrong token leaves nothing but an audit row.
                inbox.admit(connection, header, call.now_ms, _forget_ms(call))
        except RefusedError as error:
            refused = error
            audit.append(connection, call.now_ms, "enrol_refused", request.name, {"code": error.code})
    if refused is not None:
        raise refused
    return EnrolReply(state="pending", nonce=_nonce(call.coordinator, member.skid)).to_payload()


def _enrol_proof(call: Call) -> Payload:
    request = EnrolProofRequest.from_payload(call.payload())

    def effect(connection: Connection, member: Member) -> Payload:
        if not hmac.compare_digest(request.nonce, _nonce(call.coordinator, member.skid)):
            raise RefusedError("bad_proof", "this is not the nonce that was sealed to the new key; enrol again")
        state = members.prove(connection, call.now_ms, member)
        print_ = member.fingerprint(call.coordinator.settings.federation)
        return EnrolProofReply(state=state, fingerprint=print_).to_payload()

    return _transact(call, effect)


def _nonce(coordinator: Coordinator, skid: str) -> bytes:
    """The same nonce for the same newcomer: a retry gets the same answer, and no secret lies in the store."""
    return coordinator.derive("enrol-nonce", skid)


def _task(call: Call) -> Payload:
    EmptyRequest.from_payload(call.payload())
    return _transact(
        call, lambda connection, member: task_status.task_reply(call.coordinator, connection, member, call.now_ms)
    )


def _broadcast(call: Call) -> Payload:
    request = BroadcastRequest.from_payload(call.payload())
    rounds = call.coordinator.settings.rounds
    named: list[str] = []

    def effect(connection: Connection, member: Member) -> Payload:
        if request.round != call.opened.header.rnd:
            raise RefusedError("bad_message", "the header's rnd and the payload's round differ")
        named.append(progress.release_broadcast(connection, rounds, member, request.round))
        audit.append(connection, call.now_ms, "broadcast_released", member.name, {"round": request.round})
        return Payload()

    _transact(call, effect)
    data = call.coordinator.store.get_blob(named[0])
    if len(data) > MAX_BROADCAST_BYTES:
        raise RefusedError("too_large", f"the broadcast has {len(data)} bytes, {MAX_BROADCAST_BYTES} fit one envelope")
    return Payload.from_bytes(data)


def _reply(call: Call) -> Payload:
    store, settings, header = call.coordinator.store, call.coordinator.settings, call.opened.header
    request = ReplyRequest.from_payload(call.payload())
    sha256 = hashlib.sha256(call.opened.payload).hexdigest()
    reply, refused = _stored_reply(call, request, sha256)

    def effect(connection: Connection, member: Member) -> Payload:
        stored = inbox.first_answer(connection, member.skid, request.idem, sha256)
        if stored is not None:
            return Payload.from_bytes(stored)
        if refused is not None:
            raise refused
        if reply is None:
            raise RefusedError("replayed", "this message was accepted before")
        progress.accept_reply(connection, settings.rounds.policy, call.now_ms, member, header.rnd, reply)
        answer = ReplyReply(accepted=True, first_answer_ms=call.now_ms).to_payload()
        inbox.keep_answer(connection, call.now_ms, member.skid, request.idem, sha256, answer.to_bytes())
        kept.append(True)
        return answer

    kept: list[bool] = []
    committed = False
    try:
        answer = _transact(call, effect)
        committed = bool(kept)
        return answer
    finally:
        if reply is not None and not committed:
            store.drop_blob(reply.blob)


def _stored_reply(
    call: Call, request: ReplyRequest, sha256: str
) -> tuple[progress.Accepted | None, RefusedError | None]:
    """Check the reply and write its blob before the transaction that will name it; nothing for a duplicate."""
    store, settings, header = call.coordinator.store, call.coordinator.settings, call.opened.header
    try:
        site_sha256 = check_reply(request.reply, settings.task)
        data = request.reply.to_bytes()
        if len(data) > settings.limits.reply_bytes:
            limit = settings.limits.reply_bytes
            raise RefusedError("too_large", f"the reply has {len(data)} bytes, at most {limit} are accepted")
        with store.transaction() as connection:
            member = members.by_skid(connection, header.skid)
            duplicate = inbox.seen(connection, header) or (
                inbox.first_answer(connection, header.skid, request.idem, sha256) is not None
            )
        if duplicate or member is None or member.state != "approved":
            return None, None
    except RefusedError as error:
        return None, error
    blob: Blob = store.put_blob(data)
    return progress.Accepted(blob, request.idem, len(request.reply.arrays), site_sha256), None


def _index(call: Call) -> Payload:
    EmptyRequest.from_payload(call.payload())
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

    return _transact(call, effect)


def _bundle(call: Call) -> Payload:
    request = BundleRequest.from_payload(call.payload())
    named: list[str] = []

    def effect(connection: Connection, member: Member) -> Payload:
        named.append(publishing.bundle_blob(connection, request.line, request.task, request.version))
        subject = f"{request.line}/{request.task}"
        detail = {"version": request.version, "member": member.name}
        audit.append(connection, call.now_ms, "bundle_fetched", subject, detail)
        return Payload()

    _transact(call, effect)
    return BundleReply(bundle=call.coordinator.store.get_blob(named[0])).to_payload()


def _keys(call: Call) -> Payload:
    EmptyRequest.from_payload(call.payload())
    return _transact(call, lambda *_: RecordReply(record=call.coordinator.key_record()).to_payload())


_HANDLERS: dict[str, Callable[[Call], Payload]] = {
    "enrol": _enrol,
    "enrol-proof": _enrol_proof,
    "task": _task,
    "broadcast": _broadcast,
    "reply": _reply,
    "index": _index,
    "bundle": _bundle,
    "keys": _keys,
}

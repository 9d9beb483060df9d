"""What happens to a sealed request: open, admit, carry out, seal the answer.

Guarantees: until the signature is verified every failure gives the same 401, byte for byte, and leaves no trace in
the store; after it, every answer is sealed to the sender and bound to its request. The order is that of
docs/security.md 2.3:
    (1) envelope: size to signature (edgefl_protocol.envelopes.envelope)
    (2) one transaction: replay window and message id, the member's state (admission.admit)
    (3) the payload is read; one transaction: idempotency, round, effect, audit row (routes)
    (4) the sealed answer, or a sealed `Refusal`
What (2) kept stays, whatever (3) does: a message cannot be sent a second time.
"""

import contextlib
import logging
from dataclasses import dataclass

from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.members import membership
from edgefl_coordinator.members.membership import MemberRow
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.admission import Call, admit
from edgefl_coordinator.web.routes import HANDLERS
from edgefl_protocol import (
    EnvelopeError,
    Expected,
    JudgedByCaller,
    Payload,
    PayloadError,
    PublicSealingKey,
    PublicSigningKey,
    unverified_header,
)
from edgefl_protocol.envelopes.envelope import Tolerance, open_enrolment, open_envelope, seal
from edgefl_protocol.envelopes.replies import reply_fields
from edgefl_protocol.errors import KeyMaterialError, StorageError
from edgefl_protocol.messages.requests import EnrolRequest, Refusal, Route

UNAUTHENTICATED = b'{"error":"refused"}\n'  # the one body of a 401
_INTERNAL = Refusal(code="internal", message="the coordinator failed; keep the work and send it again later")
_FULL = Refusal(code="storage_full", message="the coordinator's disk is full; keep the work and send it again later")

log = logging.getLogger("edgefl_coordinator")


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP answer."""

    status: int
    body: bytes
    sealed: bool


def handle(coordinator: Coordinator, route: Route, body: bytes) -> HttpResponse:
    """Answer one sealed request."""
    now_ms = coordinator.clock()
    try:
        call = _open(coordinator, route, body, now_ms)
    except EnvelopeError as error:
        whose = _shut_out(coordinator, body) if error.code == "unknown_sender" else ""
        log.info("refused before the signature: %s %s%s", route.cty, error.code, whose, extra={"once_a_minute": True})
        return HttpResponse(401, UNAUTHENTICATED, sealed=False)
    try:
        if route.cty != "enrol":  # a newcomer has no window yet
            admit(call)
        payload = HANDLERS[route.cty](call)
    except RefusedError as error:
        return _seal(call, error.refusal)
    except (StorageError, PayloadError) as error:  # PayloadError: something stored is damaged; a request's is refused
        log.error("storage: %s", error)
        return _seal(call, _FULL if error.code == "disk_full" else _INTERNAL)
    return _seal(call, payload)


def _open(coordinator: Coordinator, route: Route, body: bytes, now_ms: int) -> Call:
    """Run step (1); whatever the `EnvelopeError` is, the caller answers the same."""
    settings = coordinator.settings
    expected = Expected(pth=route.path, fed=settings.federation, typ="request", cty=route.cty)
    tolerance = Tolerance(skew_ms=settings.limits.skew_ms, lifetime_ms=settings.limits.lifetime_ms)
    key = coordinator.keys.ring.opening(now_ms)
    if route.cty == "enrol":
        opened = open_enrolment(body, key, expected, now_ms, JudgedByCaller(), tolerance=tolerance)
        try:
            request = EnrolRequest.from_payload(Payload.from_bytes(opened.payload))
            sealing = PublicSealingKey(request.sealing_suite, request.sealing_public)
        except (PayloadError, KeyMaterialError) as error:
            # There is no key to seal an answer to, so this is refused like a broken envelope.
            raise EnvelopeError("the enrolment's payload does not fit the route", error.code) from error
        return Call(coordinator, route, opened, sealing, now_ms)
    found: dict[str, MemberRow] = {}

    def sender(skid: str) -> PublicSigningKey | None:
        with coordinator.store.transaction() as connection:
            at_ms = unverified_header(body).iat  # its form and time were checked before the sender is asked for
            known = membership.sender(connection, skid, at_ms)
        if known is None:
            return None
        member, signing = known
        if member.state == "revoked" or (route.roles and member.role not in route.roles):
            return None
        found[skid] = member
        return signing

    most = settings.limits.body_bytes
    opened = open_envelope(body, key, sender, expected, now_ms, JudgedByCaller(), max_bytes=most, tolerance=tolerance)
    return Call(coordinator, route, opened, found[opened.header.skid].sealing, now_ms)


def _shut_out(coordinator: Coordinator, body: bytes) -> str:
    """Say whose key a request names, where that member was shut out: it may not know, and asks again and again."""
    with contextlib.suppress(StorageError), coordinator.store.transaction() as connection:
        member = membership.by_skid(connection, unverified_header(body).skid)
        if member is not None and member.state == "revoked":
            return f" (it names the key of {member.name}, who was shut out)"
    return ""


def _seal(call: Call, answer: Payload | Refusal) -> HttpResponse:
    """Run step (4)."""
    status = answer.status if isinstance(answer, Refusal) else 200
    payload = answer.to_payload() if isinstance(answer, Refusal) else answer
    fields = reply_fields(call.opened, sts=status, now_ms=call.now_ms)
    return HttpResponse(
        status, seal(payload.to_bytes(), fields, call.coordinator.keys.signing, call.sealing), sealed=True
    )

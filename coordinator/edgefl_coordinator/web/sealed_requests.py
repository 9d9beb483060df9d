"""What happens to a sealed request: open, admit, carry out, seal the answer.

Guarantees: until the signature is verified every failure gives the same 401, byte for byte, takes as long as any other
(`equal_work`), and leaves no trace in the store; after it, every answer is sealed to the sender and bound to its
request. The order is that of docs/security.md 2.3:
    (1) envelope: size to signature (edgefl_protocol.envelopes.envelope)
    (2) one transaction: replay window and message id, the member's state (admission.admit)
    (3) the payload is read; one transaction: idempotency, round, effect, audit row (routes)
    (4) the sealed answer, or a sealed `Refusal`
What (2) kept stays, whatever (3) does: a message cannot be sent a second time. Of a large request the sender is looked
up twice: by its start alone, before the rest is read (`known_sender`), and in (1).
"""

import logging
from dataclasses import dataclass
from functools import partial

from edgefl_coordinator.commits.crowd import elsewhere
from edgefl_coordinator.errors import RefusedError
from edgefl_coordinator.store.coordinator import Coordinator
from edgefl_coordinator.web.admission import Call, admit
from edgefl_coordinator.web.equal_work import SenderLookup, catch_up
from edgefl_coordinator.web.routes import HANDLERS
from edgefl_protocol import (
    EnvelopeError,
    Expected,
    JudgedByCaller,
    Opened,
    Payload,
    PayloadError,
    PublicSealingKey,
    SealingKey,
    open_envelope,
    seal,
    unverified_header,
)
from edgefl_protocol.envelopes.envelope import Tolerance, open_enrolment
from edgefl_protocol.envelopes.replies import reply_fields
from edgefl_protocol.errors import KeyMaterialError, SenderError, StorageError
from edgefl_protocol.messages.requests import EnrolRequest, Refusal, Route

UNAUTHENTICATED = b'{"error":"refused"}\n'  # the one body of a 401
_INTERNAL = Refusal(code="internal", message="the coordinator failed; keep the work and send it again later")
_FULL = Refusal(code="storage_full", message="the coordinator's disk is full; keep the work and send it again later")
_HEALS = {"wrong_recipient": " (it is sealed for an earlier key: its sender fetches the new one and sends it again)"}
_AWAY = Refusal(code="busy", message="the coordinator's store of payloads does not answer; send the same again later")
_STORAGE = {"disk_full": _FULL, "unreachable": _AWAY}

log = logging.getLogger("edgefl_coordinator")


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP answer."""

    status: int
    body: bytes
    sealed: bool


def handle(coordinator: Coordinator, route: Route, body: bytes) -> HttpResponse:
    """Answer one sealed request."""
    now_ms, senders = coordinator.clock(), SenderLookup(coordinator, route, body)
    if route.cty != "enrol":  # whose sender is unknown
        senders.look_up()
    try:
        call = _open(coordinator, route, body, now_ms, senders)
    except EnvelopeError as error:
        _log_refused(route, error, senders)
        return HttpResponse(401, UNAUTHENTICATED, sealed=False)
    try:
        if route.cty != "enrol":  # a newcomer has no window yet
            admit(call)
        payload = HANDLERS[route.cty](call)
    except RefusedError as error:
        return _seal(call, error.refusal)
    except (StorageError, PayloadError) as error:  # PayloadError: something stored is damaged; a request's is refused
        log.error("storage: %s", error)
        return _seal(call, _STORAGE.get(error.code, _INTERNAL))
    return _seal(call, payload)


def known_sender(coordinator: Coordinator, route: Route, start: bytes) -> str | None:
    """Return the first key id of the member that a request's clear header names; None where it may not call the route.

    `start` is the first bytes of the request. Nothing is verified yet: it only says whether the rest is worth reading.
    """
    senders = SenderLookup(coordinator, route, start)
    senders.look_up()
    try:
        header = unverified_header(start)
        limits, now_ms = coordinator.settings.limits, coordinator.clock()
        if abs(now_ms - header.iat) > limits.skew_ms + limits.lifetime_ms:
            raise SenderError("the request is not of now")  # a key that was replaced counts for its own time
        if senders.failed is not None:
            raise senders.failed
        if senders.signing is None or (route.roles and senders.found.state != "approved"):
            raise SenderError("the sender is unknown here, or may not call this route")
    except EnvelopeError as error:
        _log_refused(route, error, senders)
        return None
    return senders.found.skid


def _log_refused(route: Route, error: EnvelopeError, senders: SenderLookup) -> None:
    """Log a refusal, and whose key it names where that member was shut out: it may not know, and asks again."""
    whose = f" (it names the key of {senders.shut_out}, who was shut out)" if senders.shut_out else ""
    more = whose or _HEALS.get(error.code, "")
    log.info("refused before the signature: %s %s%s", route.cty, error.code, more, extra={"once_a_minute": True})


def _open(coordinator: Coordinator, route: Route, body: bytes, now_ms: int, senders: SenderLookup) -> Call:
    """Run step (1); whatever the `EnvelopeError` is, it takes as long, and the caller answers the same."""
    settings, keys = coordinator.settings, coordinator.keys
    expected = Expected(pth=route.path, fed=settings.federation, typ="request", cty=route.cty)
    tolerance = Tolerance(skew_ms=settings.limits.skew_ms, lifetime_ms=settings.limits.lifetime_ms)
    opening = keys.ring.opening(now_ms)
    if route.cty == "enrol":
        try:
            return _opened_enrolment(coordinator, route, body, opening, expected, now_ms, tolerance)
        except EnvelopeError as error:
            catch_up(error, body, opening[0], keys.signing.public_key, enrols=True)
            raise

    def opened() -> Opened:
        try:
            return open_envelope(
                body, opening, lambda _: senders.signing, expected, now_ms, JudgedByCaller(),
                max_bytes=settings.limits.body_bytes, tolerance=tolerance,
            )  # fmt: skip
        except EnvelopeError as error:
            catch_up(error, body, opening[0], keys.signing.public_key)
            raise

    try:
        return Call(coordinator, route, elsewhere(opened), senders.found.sealing, now_ms)
    except SenderError:
        if senders.failed is not None:
            raise senders.failed from None
        raise


def _opened_enrolment(
    coordinator: Coordinator,
    route: Route,
    body: bytes,
    keys: list[SealingKey],
    expected: Expected,
    now_ms: int,
    tolerance: Tolerance,
) -> Call:
    opened = open_enrolment(body, keys, expected, now_ms, JudgedByCaller(), tolerance=tolerance)
    try:
        request = EnrolRequest.from_payload(Payload.from_bytes(opened.payload))
        sealing = PublicSealingKey(request.sealing_suite, request.sealing_public)
    except (PayloadError, KeyMaterialError) as error:
        # There is no key to seal an answer to, so this is refused like a broken envelope.
        raise EnvelopeError("the enrolment's payload does not fit the route", error.code) from error
    return Call(coordinator, route, opened, sealing, now_ms)


def _seal(call: Call, answer: Payload | bytes | Refusal) -> HttpResponse:
    """Run step (4)."""
    status = answer.status if isinstance(answer, Refusal) else 200
    payload = answer.to_payload() if isinstance(answer, Refusal) else answer
    data = payload.to_bytes() if isinstance(payload, Payload) else payload
    fields = reply_fields(call.opened, sts=status, now_ms=call.now_ms)
    sealed = elsewhere(partial(seal, data, fields, call.coordinator.keys.signing, call.sealing))
    return HttpResponse(status, sealed, sealed=True)

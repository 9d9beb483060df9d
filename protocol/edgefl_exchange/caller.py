"""One sealed question, one signed answer: sealing, sending, opening, and trying again.

What `Caller.call` keeps to:

1. Every attempt is a new envelope with a new sequence number around the same payload; the payload's `idem` makes a
   repeated effect impossible, so a cut answer costs nothing.
2. An answer counts only when it opens as the coordinator's signed reply to this very envelope. Everything else,
   whatever its HTTP status, means "try again later": anybody on the way can forge it.
3. The status that counts is the signed one of the reply's header.
4. Signed refusals are typed. `seq_behind` (a device restored from an older image) is answered once by jumping above the
   coordinator's number; `busy`, `storage_full`, `internal` and `replayed` are tried again.
5. When the coordinator answers in no signed way, our clock or our copy of its sealing key may be old: once a call,
   both are renewed from signed records before the next attempt.
6. Waits between attempts are short, for the keys are held meanwhile: who is asked to come back later, which anybody on
   the way can ask, does so in a later call.

Source: docs/security.md, envelope, replay window and idempotency; checks 8, 17, 19, 44.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edgefl_exchange.errors import SignedRefusal, Unavailable
from edgefl_exchange.transport import MAX_ANSWER_BYTES, Request, Transport, retry_waits
from edgefl_protocol.envelopes.envelope import MAX_LIFETIME_MS, Opened, open_envelope, seal
from edgefl_protocol.envelopes.keys import PublicSealingKey, PublicSigningKey, SealingKey, SigningKey
from edgefl_protocol.envelopes.replies import expected_reply
from edgefl_protocol.errors import EnvelopeError, PayloadError
from edgefl_protocol.messages.refusals import Refusal
from edgefl_protocol.payload import Payload
from edgefl_protocol.routes import ROUTES

MAX_WAIT_S = 20.0
TRY_AGAIN = frozenset({"busy", "storage_full", "internal", "replayed"})
_LOG = logging.getLogger("edgefl.exchange")


class KnownCoordinator(Protocol):
    """What a caller knows of the coordinator; `renew` refreshes it from signed records."""

    @property
    def signing(self) -> PublicSigningKey:
        """The pinned key that signs every reply and record."""
        ...

    @property
    def sealing(self) -> PublicSealingKey:
        """The current key to seal for."""
        ...

    def now_ms(self) -> int:
        """Return Unix milliseconds by the corrected clock."""
        ...

    def renew(self) -> bool:
        """Fetch time and key record anew; True where one of them changed.

        Raises:
            Unavailable: the coordinator, or the process of it that answered, is older than it was seen before.
        """
        ...


class Speaker(Protocol):
    """Whose name a caller asks in: an `Identity`, or its `Successor`."""

    signing: SigningKey

    @property
    def opening(self) -> Sequence[SealingKey]:
        """Keys that an answer may be sealed for."""
        ...

    def next_sequence(self) -> int:
        """Return a sequence number that was never used."""
        ...

    def jump_above(self, highest: int) -> None:
        """Continue above a number."""
        ...


class Caller:
    """Asks one coordinator in the name of one member.

    Args:
        attempts: envelopes sent for one call at most.
        first: called once before the first question, to settle what an earlier process left open.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        identity: Speaker,
        federation: str,
        coordinator: KnownCoordinator,
        attempts: int = 4,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._federation = federation
        self._coordinator = coordinator
        self._attempts = attempts
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._first = first

    def call(self, cty: str, payload: Payload, *, rnd: int = 0) -> Payload:
        """Ask, and give the signed answer's payload.

        Args:
            payload: the request's content; with an `idem` where the route changes something.

        Raises:
            Unavailable: no signed answer came in all attempts, or the coordinator is older than it was seen before.
            SignedRefusal: the coordinator refused, signed.
            TlsRefused: the server is not the trusted one.
            EnvelopeError: the payload is too large for an envelope.
        """
        if self._first is not None:
            first, self._first = self._first, None
            first()
        content = payload.to_bytes()
        waits = retry_waits(self._attempts, 0.5, MAX_WAIT_S, self._rng)
        jumped = renewed = False
        older: Unavailable | None = None
        while True:
            try:
                return self._ask(cty, content, rnd)
            except SignedRefusal as refusal:
                if refusal.code != "seq_behind" or refusal.highest is None or jumped:
                    raise
                _LOG.warning("sequence numbers continue above %d, as the coordinator asks", refusal.highest)
                self._identity.jump_above(refusal.highest)
                jumped = True
            except Unavailable as problem:
                if problem.code == "not_signed" and not renewed:
                    renewed = True
                    try:
                        if self._coordinator.renew():
                            continue
                    except Unavailable as error:  # another process of the coordinator may know its newest keys
                        older = error
                wait_s, asked_s = next(waits, None), problem.retry_after_s or 0.0
                if wait_s is None or asked_s > MAX_WAIT_S:
                    if older is not None:
                        raise older from problem
                    raise
                self._sleep(max(wait_s, asked_s))

    def _ask(self, cty: str, content: bytes, rnd: int) -> Payload:
        now_ms = self._coordinator.now_ms()
        route = ROUTES[cty]
        header: dict[str, object] = {
            "typ": "request", "mth": "POST", "pth": route.path, "fed": self._federation, "cty": cty, "rnd": rnd,
            "iat": now_ms, "exp": now_ms + MAX_LIFETIME_MS, "seq": self._identity.next_sequence(),
        }  # fmt: skip
        envelope = seal(content, header, self._identity.signing, self._coordinator.sealing)
        request = Request(method="POST", path=route.path, body=envelope, max_answer_bytes=MAX_ANSWER_BYTES)
        answer = self._transport.send(request)
        try:
            opened = self._open(envelope, answer.body)
            reply = Payload.from_bytes(opened.payload)
            refusal = Refusal.from_payload(reply)
        except (EnvelopeError, PayloadError) as error:
            shut_out = "; if this goes on, ask the operator whether this member was shut out" * (answer.status == 401)
            raise Unavailable(
                f"the answer to {cty} (HTTP {answer.status}) is not one that the coordinator signed for this request; "
                f"nothing was changed, try again later{shut_out}",
                code="not_signed",
                retry_after_s=answer.retry_after_s,
                status=answer.status,
            ) from error
        if refusal is None:
            return reply
        if refusal.code in TRY_AGAIN:
            raise Unavailable(refusal.message, refusal.code, answer.retry_after_s)
        raise SignedRefusal(refusal.message, refusal.code, refusal.highest)

    def _open(self, envelope: bytes, data: bytes) -> Opened:
        signer = self._coordinator.signing
        return open_envelope(
            data, self._identity.opening, {signer.key_id: signer.public}, expected_reply(envelope),
            self._coordinator.now_ms(), replay=None,
        )  # fmt: skip

"""Opening a member's request and sealing the answer, as work that any thread or process can do.

Guarantees: what a piece of work needs stands in it; it touches no store and no clock. A request that is refused before
its signature was verified costs as much, whatever was wrong with it: steps that the refusal did not reach are done on
stand-ins, over as many bytes as the request has. So the time of an answer tells nobody whether a key belongs to a
member, was shut out, or whether a sealed part opened. Source: docs/security.md 2.3, attack list 18, check 11.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgefl_protocol import (
    EnvelopeError,
    Expected,
    JudgedByCaller,
    Opened,
    PublicSealingKey,
    PublicSigningKey,
    SealingKey,
    SigningKey,
    open_envelope,
    seal,
    unverified_header,
)
from edgefl_protocol.envelopes.envelope import SEAL_LABEL, SIGN_LABEL, Tolerance
from edgefl_protocol.envelopes.header import Header, encode_header, parse_header
from edgefl_protocol.envelopes.keys import SEAL_OVERHEAD, SIGNATURE_BYTES
from edgefl_protocol.errors import FrameError, OpenError, SenderError, SignatureError
from edgefl_protocol.pae import pae

_NOBODY: Final = "0" * 64  # the key id of no key
_NOBODYS: Final = encode_header({
    "v": 1, "typ": "request", "mth": "POST", "pth": "/v1/reply", "fed": "nobodys", "rnd": 1, "skid": _NOBODY,
    "rkid": _NOBODY, "iat": 0, "exp": 0, "seq": 1, "mid": "0" * 32, "cty": "reply", "len": 0,
})  # fmt: skip
_PARSED: Final = parse_header(_NOBODYS)


@dataclass(frozen=True)
class Opening:
    """Opens a request of a sender who was looked up; None: nobody who may call was found."""

    data: bytes
    keys: Sequence[SealingKey]  # that open messages now
    own: SigningKey  # the coordinator's
    sender: PublicSigningKey | None
    expected: Expected
    now_ms: int
    max_bytes: int
    tolerance: Tolerance

    def __call__(self) -> Opened:
        """Return what was opened; an `EnvelopeError` always takes as long."""
        try:
            return open_envelope(
                self.data, self.keys, lambda _: self.sender, self.expected, self.now_ms, JudgedByCaller(),
                max_bytes=self.max_bytes, tolerance=self.tolerance,
            )  # fmt: skip
        except EnvelopeError as error:
            catch_up(error, self.data, self.keys[0], self.own.public_key)
            raise


@dataclass(frozen=True)
class Sealing:
    """Seals an answer."""

    payload: bytes
    fields: Mapping[str, object]  # of the header
    own: SigningKey  # the coordinator's
    to: PublicSealingKey

    def __call__(self) -> bytes:
        """Return the envelope."""
        return seal(self.payload, self.fields, self.own, self.to)


def header_or_stand_in(data: bytes) -> Header:
    """Return the clear header of a request, or where it has none a stand-in that takes as long."""
    try:
        return unverified_header(data)
    except FrameError:
        return parse_header(_NOBODYS)
    except EnvelopeError:
        return _PARSED


def catch_up(
    error: EnvelopeError, data: bytes, key: SealingKey, own: PublicSigningKey, *, enrols: bool = False
) -> None:
    """Do what was left to do of a request when a step refused it, on stand-ins; see the module's guarantees."""
    if isinstance(error, FrameError):
        header_or_stand_in(data)
    verified = isinstance(error, SignatureError) or type(error) is EnvelopeError  # the latter: an enrolment's payload
    if not (verified or isinstance(error, OpenError) or (enrols and isinstance(error, SenderError))):
        _open(key, data)
    if not verified:
        with contextlib.suppress(SignatureError):
            own.verify(bytes(SIGNATURE_BYTES), SIGN_LABEL, data[:5], _NOBODYS, data)


def _open(key: SealingKey, data: bytes) -> None:
    """Open what nobody sealed. The filling holds no key of low order, at which the work would end early."""
    least = SEAL_OVERHEAD[key.suite] + SIGNATURE_BYTES
    sealed = data if len(data) >= least else data + b"\x09" * least
    with contextlib.suppress(OpenError):
        key.open(sealed, pae(SEAL_LABEL, data[:5], _NOBODYS))

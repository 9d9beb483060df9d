"""Envelopes: a payload signed by its sender and sealed for one recipient.

    "EFL1" | suite u8 | header length u16 LE | header | HPKE enc || ct
    plaintext = signature (64) || payload
    signature = Ed25519(sender,  PAE("efl1/sign", fixed, header, payload))        fixed = the first five bytes
    ct        = HPKE(recipient, plaintext, info = PAE("efl1/seal", fixed, header))

Guarantees: a payload that `open_envelope` returns was signed by the named sender for this recipient, route,
federation, time and (replies) request, and was not accepted before. Source: docs/security.md 2.2 to 2.5, RFC 9180,
RFC 8032; signing inside with both names bound answers Davis 2001 ("Defective Sign & Encrypt"). Differs from HPKE's Auth
mode: a stolen recipient key forges nothing.

The order of checks is fixed:
    (1) size   (2) frame   (3) header syntax   (4) recipient key and suite   (5) route   (6) time   (7) sender known
    (8) HPKE opens   (9) length   (10) signature   (11) replay
`open_enrolment` runs (7) after (9), because the sender's key is inside. Nothing is remembered before (11), so a caller
that stores the window passes `JudgedByCaller()` and judges in its own transaction. Clock and keys are arguments.
"""

import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from edgefl_protocol.envelopes.header import MAX_HEADER_BYTES, Header, encode_header, parse_header
from edgefl_protocol.envelopes.keys import (
    PUBLIC_BYTES,
    SEAL_OVERHEAD,
    SIGNATURE_BYTES,
    SUITE_X25519,
    SUITE_XWING,
    PublicSealingKey,
    PublicSigningKey,
    SealingKey,
    SigningKey,
)
from edgefl_protocol.envelopes.replay import ReplayGuard
from edgefl_protocol.errors import (
    ClockError,
    FrameError,
    HeaderError,
    KeyMaterialError,
    OpenError,
    PayloadError,
    RecipientError,
    RouteError,
    SenderError,
)
from edgefl_protocol.pae import pae
from edgefl_protocol.payload import Payload

MAGIC: Final = b"EFL1"
MAX_ENVELOPE_BYTES: Final = 32 << 20
MAX_ENROLMENT_BYTES: Final = 64 << 10
MAX_SKEW_MS: Final = 5 * 60 * 1000
MAX_LIFETIME_MS: Final = 10 * 60 * 1000
SIGN_LABEL: Final = "efl1/sign"
SEAL_LABEL: Final = b"efl1/seal"

_FIXED_BYTES: Final = 5
_PREFIX_BYTES: Final = 7

Senders = Mapping[str, bytes] | Callable[[str], "bytes | PublicSigningKey | None"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the receiver knows before it reads: the route it routed, or the request it sent."""

    mth: str = "POST"  # HTTP method
    pth: str  # path below the configured public base
    fed: str  # federation
    typ: str  # "request" or "reply"
    cty: str  # content type, the route's name
    irt: str | None = None  # in a reply, SHA-256 (hex) of the request's envelope; None demands a request
    seq: int | None = None  # in a reply, the request's sequence number; None where unknown


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far clocks may differ and how long an envelope may be valid, both in milliseconds."""

    skew_ms: int = MAX_SKEW_MS
    lifetime_ms: int = MAX_LIFETIME_MS


@dataclass(frozen=True)
class Opened:
    """An envelope that passed every check."""

    header: Header  # the authenticated header
    payload: bytes  # the payload's bytes
    sender: PublicSigningKey  # the key that signed it
    envelope_sha256: str  # hex digest of the whole envelope: `irt` of the reply to it


def seal(
    payload: bytes,
    header: Mapping[str, object],
    sender: SigningKey,
    recipient: PublicSealingKey | SealingKey | bytes,
    *,
    max_bytes: int = MAX_ENVELOPE_BYTES,
) -> bytes:
    """Sign a payload and seal it for one recipient.

    Args:
        header: the fields of `header`; `v`, `skid`, `rkid` and `len` are filled in, and `mid` drawn, where absent.
        recipient: the sealing key, or its public bytes (their length tells the suite).

    Raises:
        HeaderError: a field is missing or malformed, or contradicts the keys or the payload.
        FrameError: the envelope would be longer than allowed; send the payload as a blob.
    """
    key = _sealing_public(recipient)
    known = {"v": 1, "skid": sender.key_id, "rkid": key.key_id, "len": len(payload)}
    for name, value in known.items():
        if header.get(name, value) != value:
            raise HeaderError(f"header field {name} contradicts the keys or the payload; leave it out")
    encoded = encode_header({"mid": secrets.token_hex(16), **header, **known})
    total = _PREFIX_BYTES + len(encoded) + SEAL_OVERHEAD[key.suite] + SIGNATURE_BYTES + len(payload)
    if total > max_bytes:
        raise FrameError(
            f"an envelope of {total} bytes; at most {max_bytes} are allowed: send it as a blob", "too_large"
        )
    fixed = MAGIC + bytes([key.suite])
    sealed = key.seal(
        sender.sign(SIGN_LABEL, fixed, encoded, payload) + payload,
        pae(SEAL_LABEL, fixed, encoded),
    )
    return b"".join([fixed, struct.pack("<H", len(encoded)), encoded, sealed])


def open_envelope(
    data: bytes,
    recipient: SealingKey | Iterable[SealingKey],
    senders: Senders,
    expected: Expected,
    now_ms: int,
    replay: ReplayGuard | None,
    *,
    max_bytes: int = MAX_ENVELOPE_BYTES,
    tolerance: Tolerance | None = None,
) -> Opened:
    """Verify an envelope and return its payload.

    Args:
        recipient: our current sealing key, or all that are current.
        senders: key id to public key, or None for a sender who may not call here now.
        now_ms: the clock, Unix ms.
        replay: admits each envelope once. None only for a reply, which `irt` protects.
        tolerance: clock skew and lifetime; default 5 and 10 minutes.

    Raises:
        EnvelopeError: the subclass names the step that refused it.
        TypeError: a request is expected and `replay` is None.
    """
    if replay is None and expected.irt is None:
        raise TypeError("a request needs a replay guard; only replies may have replay=None")
    incoming = _check_outside(data, recipient, expected, now_ms, max_bytes, tolerance or Tolerance())
    # (7) sender
    found = senders.get(incoming.header.skid) if isinstance(senders, Mapping) else senders(incoming.header.skid)
    if found is None:
        raise SenderError("the sender is unknown here, or may not call this route")
    sender = _named_sender(found, incoming.header)
    signature, payload = _unseal(incoming)
    return _accept(incoming, sender, signature, payload, now_ms, replay)


def open_enrolment(
    data: bytes,
    recipient: SealingKey | Iterable[SealingKey],
    expected: Expected,
    now_ms: int,
    replay: ReplayGuard,
    *,
    tolerance: Tolerance | None = None,
) -> Opened:
    """Verify a newcomer's self-signed envelope: its key is the payload's scalar `signing_public` (hex).

    For the route `enrol` only. It proves that the newcomer holds that key, not that it may enter: the token does.

    Raises:
        EnvelopeError: the subclass names the step that refused it.
    """
    incoming = _check_outside(data, recipient, expected, now_ms, MAX_ENROLMENT_BYTES, tolerance or Tolerance())
    signature, payload = _unseal(incoming)
    # (7) sender: the key inside must be the one that the header names.
    try:
        stated = Payload.from_bytes(payload, MAX_ENROLMENT_BYTES).scalars.get("signing_public")
        public = bytes.fromhex(stated if isinstance(stated, str) else "")
    except (PayloadError, ValueError):
        raise SenderError("the enrolment holds no signing_public in hex") from None
    sender = _named_sender(public, incoming.header)
    return _accept(incoming, sender, signature, payload, now_ms, replay)


def unverified_header(data: bytes) -> Header:
    """Return the header of an envelope that nobody has verified yet: for logs and for looking up a sender.

    Raises:
        FrameError: not an envelope.
        HeaderError: the header breaks its form.
    """
    return parse_header(_split(data)[1])


def envelope_sha256(data: bytes) -> str:
    """Return the hex digest by which a reply names its request (`irt`)."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class _Incoming:
    """An envelope whose outside was checked and whose inside is still sealed."""

    data: bytes
    fixed: bytes
    header_bytes: bytes
    header: Header
    key: SealingKey


def _check_outside(
    data: bytes,
    recipient: SealingKey | Iterable[SealingKey],
    expected: Expected,
    now_ms: int,
    max_bytes: int,
    tolerance: Tolerance,
) -> _Incoming:
    """Run checks (1) to (6)."""
    # (1) size
    if len(data) > max_bytes:
        raise FrameError(f"an envelope of {len(data)} bytes; at most {max_bytes} are allowed", "too_large")
    # (2) frame
    fixed, header_bytes = _split(data)
    # (3) header syntax
    header = parse_header(header_bytes)
    # (4) recipient key and suite
    keys = [recipient] if isinstance(recipient, SealingKey) else list(recipient)
    key = next((key for key in keys if key.key_id == header.rkid), None)
    if key is None:
        raise RecipientError("the envelope is sealed for another key; fetch the current key record")
    if key.suite != fixed[4]:
        raise RecipientError(f"the envelope says suite {fixed[4]}, but its key is of suite {key.suite}", "wrong_suite")
    # (5) route
    _check_route(header, expected)
    # (6) time
    _check_time(header, now_ms, tolerance)
    return _Incoming(data, fixed, header_bytes, header, key)


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Return the five fixed bytes and the header's bytes."""
    if len(data) < _PREFIX_BYTES or data[:4] != MAGIC:
        raise FrameError("this is not an envelope (EFL1)")
    suite = data[4]
    if suite not in SEAL_OVERHEAD:
        raise FrameError(f"suite {suite} is unknown; 1 and 2 are allowed")
    (length,) = struct.unpack_from("<H", data, _FIXED_BYTES)
    if length > MAX_HEADER_BYTES:
        raise FrameError(f"header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if len(data) < _PREFIX_BYTES + length + SEAL_OVERHEAD[suite] + SIGNATURE_BYTES:
        raise FrameError("the envelope is cut short")
    return data[:_FIXED_BYTES], data[_PREFIX_BYTES : _PREFIX_BYTES + length]


def _check_route(header: Header, expected: Expected) -> None:
    """Run check (5): the envelope was made for this endpoint, or answers this request."""
    for name in ("typ", "mth", "pth", "fed", "cty", "irt"):
        if getattr(header, name) != getattr(expected, name):
            raise RouteError(f"the {name} in the envelope is not the one expected here")
    if expected.seq is not None and header.seq != expected.seq:
        raise RouteError("the sequence number of the reply is not the request's")


def _check_time(header: Header, now_ms: int, tolerance: Tolerance) -> None:
    """Run check (6): by this clock the envelope is neither too old, from the future, nor over."""
    if header.exp < header.iat or header.exp - header.iat > tolerance.lifetime_ms:
        raise ClockError(f"the envelope is not valid for 0 to {tolerance.lifetime_ms} ms", "bad_lifetime")
    if header.iat - now_ms > tolerance.skew_ms:
        raise ClockError(f"the envelope is {header.iat - now_ms} ms ahead of this clock; check both", "too_early")
    if now_ms - header.iat > tolerance.skew_ms:
        raise ClockError(f"the envelope is {now_ms - header.iat} ms old by this clock; seal it anew", "too_old")
    if now_ms > header.exp:
        raise ClockError("the envelope has expired; seal it anew", "expired")


def _named_sender(public: bytes | PublicSigningKey, header: Header) -> PublicSigningKey:
    """Return the sender's key where it is usable and the one that the header names."""
    try:
        sender = public if isinstance(public, PublicSigningKey) else PublicSigningKey(public)
    except KeyMaterialError as error:
        raise SenderError(f"the sender's key is unusable: {error}", error.code) from None
    if sender.key_id != header.skid:
        raise SenderError("the sender's key does not hash to its key id")
    return sender


def _unseal(incoming: _Incoming) -> tuple[bytes, bytes]:
    """Run checks (8) and (9); returns signature and payload, neither verified yet."""
    # (8) HPKE opens
    sealed = memoryview(incoming.data)[_PREFIX_BYTES + len(incoming.header_bytes) :]
    plaintext = incoming.key.open(sealed, pae(SEAL_LABEL, incoming.fixed, incoming.header_bytes))
    # (9) length
    if len(plaintext) - SIGNATURE_BYTES != incoming.header.len:
        raise OpenError("the length of the payload is not the one in its header", "wrong_length")
    return plaintext[:SIGNATURE_BYTES], plaintext[SIGNATURE_BYTES:]


def _accept(
    incoming: _Incoming,
    sender: PublicSigningKey,
    signature: bytes,
    payload: bytes,
    now_ms: int,
    replay: ReplayGuard | None,
) -> Opened:
    """Run checks (10) and (11)."""
    # (10) signature
    sender.verify(signature, SIGN_LABEL, incoming.fixed, incoming.header_bytes, payload)
    # (11) replay
    if replay is not None:
        replay.admit(incoming.header, now_ms)
    return Opened(incoming.header, payload, sender, envelope_sha256(incoming.data))


def _sealing_public(recipient: PublicSealingKey | SealingKey | bytes) -> PublicSealingKey:
    if isinstance(recipient, PublicSealingKey):
        return recipient
    if isinstance(recipient, SealingKey):
        return recipient.public_key
    return PublicSealingKey(SUITE_X25519 if len(recipient) == PUBLIC_BYTES[SUITE_X25519] else SUITE_XWING, recipient)

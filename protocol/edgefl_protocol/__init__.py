"""What crosses a boundary: payloads, envelopes, keys, bundles, images. Pure: bytes in, values or errors out.

A site seals a payload for the coordinator; the coordinator opens it once, and answers:

    >>> import numpy as np
    >>> from edgefl_protocol import Expected, Payload, ReplayWindow, generate_sealing_key, generate_signing_key
    >>> from edgefl_protocol import expected_reply, open_envelope, reply_fields, seal
    >>> now_ms = 1_790_000_000_000
    >>> site, site_box = generate_signing_key(), generate_sealing_key(2)
    >>> coordinator, coordinator_box = generate_signing_key(), generate_sealing_key(2)

    >>> payload = Payload({"head.bias": np.zeros(8, np.float32)}, {"round": 1})
    >>> header = {"typ": "request", "mth": "POST", "pth": "/v1/reply", "fed": "skin", "cty": "reply", "rnd": 1,
    ...           "iat": now_ms, "exp": now_ms + 600_000, "seq": 1}
    >>> request = seal(payload.to_bytes(), header, sender=site, recipient=coordinator_box.public_key)

    >>> window = ReplayWindow()
    >>> endpoint = Expected(pth="/v1/reply", fed="skin", typ="request", cty="reply")
    >>> opened = open_envelope(request, coordinator_box, {site.key_id: site.public}, endpoint, now_ms, window)
    >>> Payload.from_bytes(opened.payload) == payload, opened.sender.key_id == site.key_id
    (True, True)
    >>> open_envelope(request, coordinator_box, {site.key_id: site.public}, endpoint, now_ms, window)
    Traceback (most recent call last):
    edgefl_protocol.errors.ReplayError: this message id was accepted before

    >>> answer = Payload({}, {"accepted": 1}).to_bytes()
    >>> reply = seal(answer, reply_fields(opened, sts=200, now_ms=now_ms), coordinator, site_box.public_key)
    >>> senders = {coordinator.key_id: coordinator.public}
    >>> got = open_envelope(reply, site_box, senders, expected_reply(request), now_ms, None)
    >>> got.header.sts, Payload.from_bytes(got.payload).scalars["accepted"]
    (200, 1)

Further: `bundle`, `messages`, `pictures`, `records`, `rules`, `durable`, `tensors`. The names below are loaded
when first used, so that a device which only scores pays for no envelope.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl_protocol.envelopes.envelope import (
        Expected,
        Opened,
        Tolerance,
        envelope_sha256,
        open_enrolment,
        open_envelope,
        seal,
        unverified_header,
    )
    from edgefl_protocol.envelopes.header import Header
    from edgefl_protocol.envelopes.keys import (
        PublicSealingKey,
        PublicSigningKey,
        SealingKey,
        SigningKey,
        fingerprint,
        generate_sealing_key,
        generate_signing_key,
        same_fingerprint,
    )
    from edgefl_protocol.envelopes.replay import JudgedByCaller, ReplayWindow, judge
    from edgefl_protocol.envelopes.replies import expected_reply, reply_fields
    from edgefl_protocol.errors import EdgeflError, EnvelopeError, KeyMaterialError, PayloadError
    from edgefl_protocol.payload import Payload, digest, state_digest

__all__ = [
    "EdgeflError",
    "EnvelopeError",
    "Expected",
    "Header",
    "JudgedByCaller",
    "KeyMaterialError",
    "Opened",
    "Payload",
    "PayloadError",
    "PublicSealingKey",
    "PublicSigningKey",
    "ReplayWindow",
    "SealingKey",
    "SigningKey",
    "Tolerance",
    "digest",
    "envelope_sha256",
    "expected_reply",
    "fingerprint",
    "generate_sealing_key",
    "generate_signing_key",
    "judge",
    "open_enrolment",
    "open_envelope",
    "reply_fields",
    "same_fingerprint",
    "seal",
    "state_digest",
    "unverified_header",
]

_MODULES = {
    "envelopes.envelope": (
        "Expected Opened Tolerance envelope_sha256 open_enrolment open_envelope seal unverified_header"
    ),
    "envelopes.header": "Header",
    "envelopes.keys": (
        "PublicSealingKey PublicSigningKey SealingKey SigningKey fingerprint generate_sealing_key "
        "generate_signing_key same_fingerprint"
    ),
    "envelopes.replay": "JudgedByCaller ReplayWindow judge",
    "envelopes.replies": "expected_reply reply_fields",
    "errors": "EdgeflError EnvelopeError KeyMaterialError PayloadError",
    "payload": "Payload digest state_digest",
}
_HOME = {name: f"edgefl_protocol.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__

"""How a reply is bound: `irt` holds the request's SHA-256, `seq` repeats its number, `sts` is the HTTP status.

So replies cannot be swapped, sent again to another request, or have their status changed on the way. Source:
docs/security.md 2.2.
"""

from edgefl_protocol.envelopes.envelope import MAX_LIFETIME_MS, Expected, Opened, envelope_sha256, unverified_header


def expected_reply(request: bytes) -> Expected:
    """Return what the reply to our own request must show."""
    header = unverified_header(request)  # our own bytes
    return Expected(
        mth=header.mth,
        pth=header.pth,
        fed=header.fed,
        typ="reply",
        cty=header.cty,
        irt=envelope_sha256(request),
        seq=header.seq,
    )


def reply_fields(request: Opened, *, sts: int, now_ms: int) -> dict[str, object]:
    """Return the header fields of the reply to a request that we opened."""
    header = request.header
    route = {"mth": header.mth, "pth": header.pth, "fed": header.fed, "cty": header.cty, "rnd": header.rnd}
    binding = {"typ": "reply", "seq": header.seq, "irt": request.envelope_sha256, "sts": sts}
    return {**route, **binding, "iat": now_ms, "exp": now_ms + MAX_LIFETIME_MS}

"""Make the golden envelopes: `python tests/vectors/envelopes/make.py > tests/vectors/envelopes/envelopes.json`.

Sealing draws fresh randomness, so a second run gives other bytes and the same verdicts. Do not run it again for the
committed cases: their use is that later versions must treat these very bytes as this version did. Add cases instead.
"""

import base64
import hashlib
import json
import struct
import sys

from edgefl_protocol import Payload, SealingKey, SigningKey, envelope_sha256, seal, unverified_header
from edgefl_protocol.envelopes.header import encode_header
from edgefl_protocol.pae import pae

NOW = 1_790_000_000_000
SIGNING = {name: SigningKey(hashlib.sha256(name.encode()).digest()) for name in ("site", "coordinator", "stranger")}
SEALING = {
    f"{name}-{suite}": SealingKey(suite, hashlib.shake_256(f"{name}{suite}".encode()).digest({1: 32, 2: 96}[suite]))
    for name in ("site", "coordinator")
    for suite in (1, 2)
}
ROUTE = {"mth": "POST", "pth": "/v1/reply", "fed": "skin", "typ": "request", "cty": "reply"}


def fields(**changes):
    """Return the header fields of a request."""
    return {**ROUTE, "rnd": 1, "iat": NOW, "exp": NOW + 600_000, "seq": 1, **changes}


def case(name, suite, envelope, verdict="accept", payload=b"", *, now_ms=NOW, to="coordinator", **expected):
    """Return one row; `expected` alters the route that the endpoint asks for."""
    return {
        "name": name,
        "recipient": f"{to}-{suite}",
        "expected": {**ROUTE, "irt": None, "seq": None, **expected},
        "now_ms": now_ms,
        "verdict": verdict,
        "payload": base64.b64encode(payload).decode(),
        "envelope": base64.b64encode(envelope).decode(),
    }


def good(suite):
    """Yield ten accepted envelopes."""
    box, site = SEALING[f"coordinator-{suite}"].public_key, SIGNING["site"]
    texts = {"empty": b"", "one byte": b"\0", "text": b"plain text", "all bytes": bytes(range(256))}
    texts["payload"] = Payload({}, {"phase": "warm", "round": 1}).to_bytes()
    for name, text in texts.items():
        yield case(name, suite, seal(text, fields(), site, box), payload=text)
    edges = fields(seq=2**32, rnd=2**31, exp=NOW)
    yield case("largest numbers", suite, seal(b"x", edges, site, box), payload=b"x")
    late = seal(b"x", fields(iat=NOW - 300_000, exp=NOW + 300_000), site, box)
    yield case("oldest allowed", suite, late, payload=b"x")
    early = seal(b"x", fields(iat=NOW + 300_000, exp=NOW + 900_000), site, box)
    yield case("earliest allowed", suite, early, payload=b"x")
    spaced = pack(b"x", json.dumps(complete(suite, fields(), 1)).encode(), site, suite)
    yield case("header with spaces", suite, spaced, payload=b"x")
    reply = {**fields(typ="reply", seq=7), "irt": envelope_sha256(b"request"), "sts": 409}
    data = seal(b"no", reply, SIGNING["coordinator"], SEALING[f"site-{suite}"].public_key)
    yield case("reply", suite, data, payload=b"no", to="site", typ="reply", irt=reply["irt"], seq=7)


def complete(suite, header, length):
    """Return all required header fields."""
    box = SEALING[f"coordinator-{suite}"]
    return {"v": 1, **header, "mid": "5" * 32, "skid": SIGNING["site"].key_id, "rkid": box.key_id, "len": length}


def pack(payload, header, signer, suite, *, signature=None, info=None):
    """Seal a payload under header bytes of our choice."""
    fixed = b"EFL1" + bytes([suite])
    signature = signer.sign("efl1/sign", fixed, header, payload) if signature is None else signature
    sealed = SEALING[f"coordinator-{suite}"].public_key.seal(
        signature + payload, info or pae(b"efl1/seal", fixed, header)
    )
    return fixed + struct.pack("<H", len(header)) + header + sealed


def bad(suite):
    """Yield ten refused envelopes; the verdict is the error's class and code."""
    box, site, stranger = SEALING[f"coordinator-{suite}"].public_key, SIGNING["site"], SIGNING["stranger"]
    data = seal(b"text", fields(), site, box)
    header = encode_header(complete(suite, fields(), 4))
    yield case("cut", suite, data[: len(data) // 2], "FrameError:bad_frame")
    yield case("magic", suite, b"EFL2" + data[4:], "FrameError:bad_frame")
    duplicate = header.replace(b'"v":1,', b'"v":1,"v":1,')
    yield case("duplicate key", suite, pack(b"text", duplicate, site, suite), "HeaderError:bad_header")
    yield case("other recipient", suite, data, "RecipientError:wrong_recipient", to="site")
    yield case("other path", suite, data, "RouteError:wrong_route", pth="/v1/task")
    yield case("too old", suite, data, "ClockError:too_old", now_ms=NOW + 300_001)
    yield case("stranger", suite, seal(b"text", fields(), stranger, box), "SenderError:unknown_sender")
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    yield case("flipped bit", suite, flipped, "OpenError:cannot_open")
    longer = encode_header(complete(suite, fields(), 5))
    yield case("wrong length", suite, pack(b"text", longer, site, suite), "OpenError:wrong_length")
    forged = pack(b"text", header, stranger, suite)
    yield case("forged", suite, forged, "SignatureError:bad_signature")


def main():
    """Print the file."""
    cases = [row for suite in (1, 2) for rows in (good(suite), bad(suite)) for row in rows]
    assert len(cases) == 40 and all(unverified_header(base64.b64decode(c["envelope"])) for c in cases[:10])
    file = {
        "senders": {SIGNING[name].key_id: SIGNING[name].public.hex() for name in ("site", "coordinator")},
        "recipients": {name: {"suite": key.suite, "secret": key.secret.hex()} for name, key in SEALING.items()},
        "cases": cases,
    }
    json.dump(file, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

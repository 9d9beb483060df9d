"""Two parties, a clock and a request."""

import hashlib
import struct
from dataclasses import dataclass, replace

import pytest

from edgefl_protocol import (
    Expected,
    ReplayWindow,
    SealingKey,
    SigningKey,
    expected_reply,
    open_envelope,
    reply_fields,
    seal,
    unverified_header,
)
from edgefl_protocol.envelopes.header import encode_header
from edgefl_protocol.pae import pae

NOW_MS = 1_790_000_000_000


def signing_key(name):
    """Return a fixed key that depends on the name."""
    return SigningKey(hashlib.sha256(b"sign" + name.encode()).digest())


def sealing_key(name, suite):
    """Return a fixed key that depends on the name and suite."""
    return SealingKey(suite, hashlib.shake_256(b"seal" + name.encode()).digest(32 if suite == 1 else 96))


@dataclass(frozen=True)
class World:
    """One site and one coordinator in one suite, and what they say by default."""

    suite: int
    site: SigningKey
    site_box: SealingKey
    coordinator: SigningKey
    coordinator_box: SealingKey
    now_ms: int = NOW_MS

    def fields(self, **changes):
        """Return the header fields of a request to `/v1/reply`."""
        base = {"typ": "request", "mth": "POST", "pth": "/v1/reply", "fed": "skin", "cty": "reply", "rnd": 3}
        return {**base, "iat": self.now_ms, "exp": self.now_ms + 600_000, "seq": 1, **changes}

    def expected(self, **changes):
        """Return what the endpoint `/v1/reply` takes."""
        return replace(Expected(pth="/v1/reply", fed="skin", typ="request", cty="reply"), **changes)

    def request(self, payload=b"payload", **changes):
        """Return a sealed request of the site."""
        return seal(payload, self.fields(**changes), self.site, self.coordinator_box.public_key)

    def open(self, data, *, expected=None, now_ms=None, replay=None, senders=None, recipient=None):
        """Open at the coordinator."""
        return open_envelope(
            data,
            recipient or self.coordinator_box,
            {self.site.key_id: self.site.public} if senders is None else senders,
            expected or self.expected(),
            self.now_ms if now_ms is None else now_ms,
            replay or ReplayWindow(),
        )


def make_world(suite):
    """Return the fixed world of a suite."""
    return World(
        suite,
        signing_key("site"),
        sealing_key("site", suite),
        signing_key("coordinator"),
        sealing_key("coordinator", suite),
    )


@pytest.fixture(params=[1, 2], ids=["x25519", "xwing"])
def world(request):
    """The world in each suite."""
    return make_world(request.param)


@pytest.fixture
def world1():
    """The world in suite 1, for tests that do not depend on the suite."""
    return make_world(1)


@pytest.fixture(scope="session")
def worlds():
    """Both suites' worlds."""
    return make_world(1), make_world(2)


def split(data):
    """Return the fixed bytes, header bytes and sealed part of an envelope."""
    (length,) = struct.unpack_from("<H", data, 5)
    return data[:5], data[7 : 7 + length], data[7 + length :]


def header_of(data):
    """Return an envelope's header as a plain dict."""
    found = {name: value for name, value in vars(unverified_header(data)).items() if value is not None}
    return {"v": 1, **found}


def inside(data, box):
    """Return signature and payload as the recipient, or a thief of its key, sees them."""
    fixed, header, sealed = split(data)
    return box.open(sealed, pae(b"efl1/seal", fixed, header))


def reseal(plaintext, header, recipient):
    """Seal a known plaintext again under another header, without the sender's key."""
    encoded = header if isinstance(header, bytes) else encode_header(header)
    fixed = b"EFL1" + bytes([recipient.suite])
    sealed = recipient.seal(plaintext, pae(b"efl1/seal", fixed, encoded))
    return fixed + struct.pack("<H", len(encoded)) + encoded + sealed


def answer(world, data, text=b"answer"):
    """Return the coordinator's reply to a request, and the opened request."""
    opened = world.open(data)
    fields = reply_fields(opened, sts=200, now_ms=world.now_ms)
    return seal(text, fields, world.coordinator, world.site_box.public_key), opened


def read(world, reply, request, **changes):
    """Open a reply as the site does."""
    senders = {world.coordinator.key_id: world.coordinator.public}
    return open_envelope(
        reply, world.site_box, senders, replace(expected_reply(request), **changes), world.now_ms, None
    )

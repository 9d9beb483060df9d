"""Enrolment: an envelope that brings its own key. Source: docs/security.md 2.6, checks 9 and 22."""

import pytest
from tests.protocol.envelopes.conftest import inside, reseal

from edgefl_protocol import (
    EnvelopeError,
    Payload,
    ReplayWindow,
    generate_signing_key,
    open_enrolment,
    seal,
)
from edgefl_protocol.errors import (
    FrameError,
    RouteError,
    SenderError,
    SignatureError,
)


def enrolment(world, key, *, stated=None, signer=None, **scalars):
    """Return an enrol request of a newcomer; by default it states the key that signs."""
    fields = world.fields(pth="/v1/enrol", cty="enrol", rnd=0)
    public = key.public.hex() if stated is None else stated
    payload = Payload({}, {"signing_public": public, **scalars}).to_bytes()
    if signer is None:
        return seal(payload, fields, key, world.coordinator_box.public_key)
    plaintext = inside(seal(payload, fields, signer, world.coordinator_box.public_key), world.coordinator_box)
    box = world.coordinator_box.public_key
    header = {"v": 1, "mid": "1" * 32, "skid": key.key_id, "rkid": box.key_id, "len": len(payload), **fields}
    return reseal(plaintext, header, box)


def enrol(world, data):
    route = world.expected(pth="/v1/enrol", cty="enrol")
    return open_enrolment(data, world.coordinator_box, route, world.now_ms, ReplayWindow())


def test_an_enrolment_proves_the_key_it_brings(world):
    """docs/security.md 2.6, step 2: the key comes from the opened payload and must hash to skid."""
    newcomer = generate_signing_key()
    opened = enrol(world, enrolment(world, newcomer, token="00"))
    assert opened.sender.public == newcomer.public


def test_an_enrolment_with_another_key_is_refused(world1):
    """docs/security.md checks 9 and 22: no proof of the key, a key of low order, or no key at all."""
    newcomer, other = generate_signing_key(), generate_signing_key()
    low = (1).to_bytes(32, "little").hex()
    for data, refused in [
        (enrolment(world1, newcomer, stated=other.public.hex()), SenderError),
        (enrolment(world1, newcomer, stated=low), SenderError),
        (enrolment(world1, newcomer, stated="zz"), SenderError),
        (enrolment(world1, newcomer, stated=7), SenderError),
        (enrolment(world1, newcomer, signer=other), SignatureError),
        (world1.request(pth="/v1/enrol", cty="enrol"), SenderError),
        (world1.request(), RouteError),
    ]:
        with pytest.raises(EnvelopeError) as caught:
            enrol(world1, data)
        assert type(caught.value) is refused


def test_an_enrolment_is_small(world1):
    with pytest.raises(FrameError):
        enrol(world1, enrolment(world1, generate_signing_key(), filler="x" * 65_000))

"""Envelopes. Source: docs/security.md 2.2 to 2.5 and checks 5 to 8 and 20; Davis 2001."""

import random
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.envelopes.conftest import header_of, inside, reseal, split

from edgefl_protocol import (
    EnvelopeError,
    Expected,
    JudgedByCaller,
    KeyMaterialError,
    ReplayWindow,
    Tolerance,
    envelope_sha256,
    generate_sealing_key,
    generate_signing_key,
    open_envelope,
    seal,
)
from edgefl_protocol.envelopes.header import encode_header
from edgefl_protocol.errors import (
    ClockError,
    FrameError,
    HeaderError,
    OpenError,
    RecipientError,
    ReplayError,
    RouteError,
    SenderError,
    SequenceError,
    SignatureError,
)
from edgefl_protocol.routes import ROUTES


@settings(max_examples=40)
@given(st.binary(max_size=2000), st.integers(0, 2**32), st.integers(0, 2**31))
def test_what_is_sealed_opens_once_and_tells_who_sent_it(worlds, payload, seq, rnd):
    world = worlds[0]
    data = world.request(payload, seq=seq, rnd=rnd)
    window = ReplayWindow()
    opened = world.open(data, replay=window)
    assert (opened.payload, opened.sender.public) == (payload, world.site.public)
    assert (opened.header.seq, opened.header.rnd, opened.header.len) == (seq, rnd, len(payload))
    with pytest.raises(ReplayError):
        world.open(data, replay=window)


def test_round_trip_in_both_suites(world):
    opened = world.open(world.request(b"text"))
    assert opened.payload == b"text" and opened.envelope_sha256 != envelope_sha256(b"")


def mutate(rng, data):
    """Return a copy with one random change: bit, byte, cut, insertion, deletion or header edit."""
    data, kind = bytearray(data), rng.randrange(6)
    place = rng.randrange(len(data))
    if kind == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[place] = rng.randrange(256)
    elif kind == 2:
        del data[place:]
    elif kind == 3:
        data[place:place] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 4:
        del data[place : place + rng.randrange(1, 9)]
    else:
        data[rng.randrange(5, 500)] = rng.choice(b'0123456789abcdef",:{}[]-.eE ')
    return bytes(data)


def test_ten_thousand_mutated_envelopes(worlds):
    """docs/security.md check 5: 0 accepted, 0 untyped exceptions, under 15 s of processor time."""
    rng, started, tried = random.Random(5), time.process_time(), 0
    originals = [(world, world.request(b"x" * 200)) for world in worlds]
    outcomes = set()
    while tried < 10_000:
        world, data = originals[tried % 2]
        changed = mutate(rng, data)
        if changed == data:
            continue
        with pytest.raises(EnvelopeError) as caught:
            world.open(changed)
        outcomes.add(type(caught.value))
        tried += 1
    assert time.process_time() - started < 15
    assert {FrameError, HeaderError, RecipientError, RouteError, OpenError} <= outcomes


OTHER_VALUES = {
    "v": [0, 2, 3, 255, 2**31],
    "typ": ["reply", "requests", "r", "admin", "request-"],
    "mth": ["GET", "PUT", "post", "PATCH", "DELETE"],
    "pth": ["/v1/task", "/v1/reply/", "/v1/bundle", "/", "/v2/reply"],
    "fed": ["skin2", "ski", "eye", "skin-", "s"],
    "rnd": [0, 2, 4, 100, 2**31],
    "skid": None,
    "rkid": None,
    "iat": [1, -1, 1000, -1000, 60_000],  # added to the original
    "exp": [1, -1, 1000, -1000, -600_000],
    "seq": [0, 2, 3, 1000, 2**32],
    "mid": ["0" * 32, "1" * 32, "f" * 32, "a" * 32, "0123456789abcdef" * 2],
    "cty": ["task", "broadcast", "keys", "r", "reply-"],
    "len": [0, 1, 6, 8, 1000],
}


def others(world, field):
    """Return five other values of a header field and, for key ids, keys that go with them."""
    header = world.fields(mid="9" * 32)
    if field in ("iat", "exp"):
        return [header[field] + step for step in OTHER_VALUES[field]]
    if field == "skid":
        return [generate_signing_key() for _ in range(5)]
    if field == "rkid":
        return [generate_sealing_key(world.suite) for _ in range(5)]
    return OTHER_VALUES[field]


@pytest.mark.parametrize("field", sorted(OTHER_VALUES))
def test_a_substituted_header_field_is_refused(world1, field):
    """docs/security.md check 6: 14 fields by 5 values, sealed again without the sender's key: 70 of 70 refused.

    The endpoint is made to want each altered value, so that where a value is well formed the signature must refuse it.
    """
    data = world1.request(mid="9" * 32)
    plaintext, refused = inside(data, world1.coordinator_box), 0
    for value in others(world1, field):
        header, box, senders = header_of(data), world1.coordinator_box, {world1.site.key_id: world1.site.public}
        if field == "skid":
            header[field], senders = value.key_id, {value.key_id: value.public}
        elif field == "rkid":
            header[field], box = value.key_id, value
        else:
            header[field] = value
        wanted = {name: header[name] for name in ("typ", "mth", "pth", "fed", "cty")}
        text = str(header).replace("'", '"').encode()  # also values that our own encoder refuses
        with pytest.raises(EnvelopeError) as caught:
            world1.open(
                reseal(plaintext, text, box.public_key), expected=Expected(**wanted), senders=senders, recipient=box
            )
        assert isinstance(caught.value, SignatureError | HeaderError | OpenError | ClockError)
        refused += 1
    assert refused == 5
    assert world1.open(reseal(plaintext, header_of(data), world1.coordinator_box.public_key))  # unchanged: accepted


def test_surreptitious_forwarding_is_refused(world):
    """docs/security.md check 7, Davis 2001: a recipient seals the signed text for a third party: 100 of 100 refused."""
    for trial in range(50):
        data = world.request(b"secret %d" % trial)
        third = generate_sealing_key(world.suite)
        plaintext, header = inside(data, world.coordinator_box), header_of(data)
        with pytest.raises(RecipientError):
            world.open(reseal(plaintext, header, third.public_key), recipient=third)
        with pytest.raises(SignatureError):
            forwarded = reseal(plaintext, {**header, "rkid": third.key_id}, third.public_key)
            world.open(forwarded, recipient=third)


def test_stripped_and_re_signed_ciphertexts_are_refused(world):
    """docs/security.md check 7: nobody can claim another's sealed text as his own: 100 of 100 refused."""
    for trial in range(25):
        data = world.request(b"claim %3d" % trial * 20)
        fixed, _, sealed = split(data)
        thief = generate_signing_key()
        senders = {world.site.key_id: world.site.public, thief.key_id: thief.public}
        header = {**header_of(data), "skid": thief.key_id}
        encoded = encode_header(header)
        claimed = fixed + struct.pack("<H", len(encoded)) + encoded + sealed
        with pytest.raises(OpenError):  # the sender is bound into the seal
            world.open(claimed, senders=senders)
        plaintext = inside(data, world.coordinator_box)
        with pytest.raises(SignatureError):  # even with the text known, the signature names its signer
            world.open(reseal(plaintext, header, world.coordinator_box.public_key), senders=senders)
        stripped = {**header_of(data), "len": len(plaintext) - 128}
        with pytest.raises(SignatureError):  # without its signature the text is no envelope's inside
            world.open(reseal(plaintext[64:], stripped, world.coordinator_box.public_key))
        with pytest.raises(SignatureError):
            other = bytes(64) + plaintext[64:]
            world.open(reseal(other, header_of(data), world.coordinator_box.public_key))


def test_an_envelope_is_accepted_at_its_own_endpoint_only(world1):
    """docs/security.md check 8: all n × n pairs of routes."""
    accepted = []
    for made in ROUTES.values():
        data = world1.request(pth=made.path, cty=made.cty)
        for asked in ROUTES.values():
            try:
                world1.open(data, expected=world1.expected(pth=asked.path, cty=asked.cty))
                accepted.append((made.cty, asked.cty))
            except RouteError:
                pass
    assert accepted == [(name, name) for name in ROUTES] and len(ROUTES) >= 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("mth", "GET"), ("pth", "/v1/replies"), ("fed", "eye"), ("typ", "reply"), ("cty", "task"), ("irt", "0" * 64)],
)
def test_each_word_of_the_route_counts_alone(world1, field, value):
    """docs/security.md 2.3: `mth`, `pth`, `fed`, `typ` and `cty` must each be what the endpoint expects."""
    with pytest.raises(RouteError):
        world1.open(world1.request(), expected=world1.expected(**{field: value}))


SKEW, LIFE = 300_000, 600_000
TIMES = [  # iat − now, exp − now, refused with
    (0, LIFE, None),
    (0, 0, None),
    (SKEW, SKEW + LIFE, None),
    (SKEW + 1, SKEW + 2, "too_early"),
    (-SKEW, LIFE - SKEW, None),
    (-SKEW - 1, 1, "too_old"),
    (-1, -1, "expired"),
    (-1, 0, None),
    (0, -1, "bad_lifetime"),
    (10, 9, "bad_lifetime"),
    (0, LIFE + 1, "bad_lifetime"),
    (-SKEW, LIFE - SKEW + 1, "bad_lifetime"),
]


@pytest.mark.parametrize(("iat", "exp", "code"), TIMES)
def test_time_edges(world1, iat, exp, code):
    """docs/security.md check 20: ±(5 min ± 1 ms), exp before iat, exp too long: table exact."""
    data = world1.request(iat=world1.now_ms + iat, exp=world1.now_ms + exp)
    if code is None:
        assert world1.open(data).payload == b"payload"
    else:
        with pytest.raises(ClockError) as caught:
            world1.open(data)
        assert caught.value.code == code


def test_the_tolerance_can_be_set(world1):
    data = world1.request(iat=world1.now_ms - 2000)
    tight = Tolerance(skew_ms=1000)
    senders = {world1.site.key_id: world1.site.public}
    with pytest.raises(ClockError):
        open_envelope(
            data, world1.coordinator_box, senders, world1.expected(), world1.now_ms, ReplayWindow(), tolerance=tight
        )


def test_the_order_of_checks_is_fixed(world1):
    """docs/security.md 2.3: an envelope that is wrong in several ways is refused by the first step."""
    stranger, box = generate_signing_key(), generate_sealing_key(1)
    wrong_time = {"iat": 0, "exp": 1}

    def made(*, key=stranger, recipient=box, **changes):
        return seal(b"x", world1.fields(**changes), key, recipient)

    ours = world1.coordinator_box.public_key
    spoilt = bytearray(made(key=world1.site, recipient=ours))
    spoilt[-1] ^= 1
    short = {**header_of(made(key=world1.site, recipient=ours)), "len": 2}
    for data, refused in [
        (b"", FrameError),
        (made(pth="/other", **wrong_time)[:-60], FrameError),
        (made(pth="/other", **wrong_time).replace(b'"typ"', b'"tyb"'), HeaderError),
        (made(pth="/other", **wrong_time), RecipientError),
        (made(recipient=ours, pth="/other", **wrong_time), RouteError),
        (made(recipient=ours, **wrong_time), ClockError),
        (made(recipient=ours), SenderError),
        (bytes(spoilt), OpenError),
        (reseal(bytes(65), short, ours), OpenError),
        (reseal(bytes(65), {**short, "len": 1}, ours), SignatureError),
    ]:
        with pytest.raises(EnvelopeError) as caught:
            world1.open(data)
        assert type(caught.value) is refused


def test_a_refused_envelope_leaves_no_trace_in_the_window(world1):
    """docs/security.md 2.3: replay is judged last, so a forgery cannot use up a number."""
    window, data = ReplayWindow(), world1.request()
    with pytest.raises(SignatureError):
        world1.open(reseal(bytes(71), header_of(data), world1.coordinator_box.public_key), replay=window)
    assert world1.open(data, replay=window)


def test_sequence_numbers_are_judged(world1):
    """docs/security.md 2.5: a lagging sender is told the highest number; a wild jump is refused."""
    window = ReplayWindow()
    world1.open(world1.request(seq=10_000), replay=window)
    with pytest.raises(SequenceError) as caught:
        world1.open(world1.request(seq=10), replay=window)
    assert (caught.value.code, caught.value.highest) == ("seq_behind", 10_000)
    with pytest.raises(ReplayError):
        world1.open(world1.request(seq=10_000), replay=window)
    with pytest.raises(SequenceError):
        world1.open(world1.request(seq=2**40), replay=window)


def test_a_caller_may_judge_in_its_own_transaction(world1):
    data = world1.request()
    assert world1.open(data, replay=JudgedByCaller()) == world1.open(data, replay=JudgedByCaller())


def test_the_suite_is_fixed_by_the_recipients_key(worlds):
    """docs/security.md 0.3: nothing to negotiate, nothing to downgrade."""
    for world, other in (worlds, worlds[::-1]):
        data = world.request(b"x" * 2000)
        with pytest.raises(RecipientError) as caught:
            world.open(data[:4] + bytes([other.suite]) + data[5:])
        assert caught.value.code == "wrong_suite"
        for suite in (0, 3, 255):
            with pytest.raises(FrameError):
                world.open(data[:4] + bytes([suite]) + data[5:])


def test_a_recipient_may_have_several_current_keys(world1):
    """docs/security.md 2.4: weekly sealing keys overlap by two queue lifetimes."""
    old, new = generate_sealing_key(1), generate_sealing_key(2)
    for box in (old, new):
        data = seal(b"x", world1.fields(), world1.site, box.public_key)
        assert world1.open(data, recipient=[old, new]).payload == b"x"
    with pytest.raises(RecipientError):
        world1.open(data, recipient=[old])


def test_size_is_checked_first_on_both_sides(world1):
    """docs/security.md 2.2: at most 32 MiB an envelope, less where a device announces less."""
    senders = {world1.site.key_id: world1.site.public}
    data = world1.request(bytes(1000))
    with pytest.raises(FrameError, match="at most 1000"):
        open_envelope(data, world1.coordinator_box, senders, world1.expected(), 0, ReplayWindow(), max_bytes=1000)
    box = world1.coordinator_box.public_key
    with pytest.raises(FrameError, match="blob"):
        seal(bytes(32 << 20), world1.fields(), world1.site, box)
    with pytest.raises(FrameError, match="blob"):
        seal(bytes(1000), world1.fields(), world1.site, box, max_bytes=len(data) - 1)
    assert len(seal(bytes(1000), world1.fields(), world1.site, box, max_bytes=len(data))) == len(data)


@pytest.mark.parametrize(
    "changes", [{"skid": "0" * 64}, {"rkid": "0" * 64}, {"len": 0}, {"v": 2}, {"seq": None}, {"fed": "Skin"}, {"x": 1}]
)
def test_a_contradictory_header_is_not_sealed(world1, changes):
    with pytest.raises(HeaderError):
        world1.request(**changes)


def test_the_recipient_may_be_given_as_bytes(world):
    data = seal(b"x", world.fields(), world.site, world.coordinator_box.public)
    assert world.open(data).payload == b"x"
    with pytest.raises(KeyMaterialError):
        seal(b"x", world.fields(), world.site, world.coordinator_box.public[:-1])


def test_senders_may_be_looked_up_and_must_hash_to_their_id(world1):
    data, other = world1.request(), generate_signing_key()
    assert world1.open(data, senders={world1.site.key_id: world1.site.public}.get).sender.public == world1.site.public
    assert world1.open(data, senders=lambda key_id: world1.site.public_key)
    for found in (None, other.public, bytes(32), b"short"):
        with pytest.raises(SenderError):
            world1.open(data, senders=lambda key_id, found=found: found)

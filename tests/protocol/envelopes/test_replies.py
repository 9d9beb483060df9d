"""Replies: each opens for its own request alone. Source: docs/security.md 2.2, 2.5 and check 8."""

import struct
from dataclasses import replace

import pytest
from tests.protocol.envelopes.conftest import answer, read, split

from edgefl_protocol import (
    envelope_sha256,
    open_envelope,
)
from edgefl_protocol.errors import (
    OpenError,
    RouteError,
)


def test_a_reply_names_its_request_and_repeats_its_number(world):
    """docs/security.md 2.2 and 2.5: `irt` is the request's SHA-256, `seq` is the request's."""
    request = world.request(seq=9)
    reply, opened = answer(world, request)
    got = read(world, reply, request)
    assert got.payload == b"answer" and got.header.sts == 200
    assert (got.header.irt, got.header.seq, got.header.rnd) == (envelope_sha256(request), 9, opened.header.rnd)


def test_swapped_replies_are_refused(world1):
    """docs/security.md check 8: of 10 requests in flight, each reply opens for its own request only."""
    requests = [world1.request(b"%d" % number, seq=number + 1) for number in range(10)]
    replies = [answer(world1, request)[0] for request in requests]
    accepted = 0
    for row, request in enumerate(requests):
        for column, reply in enumerate(replies):
            try:
                read(world1, reply, request)
                accepted += 1
                assert row == column
            except RouteError:
                assert row != column
    assert accepted == 10


def test_reflected_messages_are_refused(world1):
    """docs/security.md check 8: a request is no reply and the reverse, even where one key plays both parts."""
    box, key = world1.coordinator_box, world1.coordinator
    twin = replace(world1, site=key, site_box=box)
    request = twin.request()
    reply, _ = answer(twin, request)
    with pytest.raises(RouteError):
        read(twin, request, request)
    with pytest.raises(RouteError):
        twin.open(reply)
    with pytest.raises(RouteError):
        twin.open(reply, expected=twin.expected(typ="reply"))


@pytest.mark.parametrize("field", ["irt", "seq"])
def test_a_reply_to_something_else_is_refused(world1, field):
    request = world1.request(seq=4)
    reply, _ = answer(world1, request)
    with pytest.raises(RouteError):
        read(world1, reply, request, **{field: "0" * 64 if field == "irt" else 5})


def test_a_changed_status_is_refused(world1):
    """docs/security.md check 44, in part: the status is signed."""
    request = world1.request()
    reply, _ = answer(world1, request)
    fixed, header, sealed = split(reply)
    changed = header.replace(b'"sts":200', b'"sts":404')  # the whole field: a digest may hold the digits as well
    assert changed != header
    with pytest.raises(OpenError):
        read(world1, fixed + struct.pack("<H", len(header)) + changed + sealed, request)


def test_only_a_reply_may_come_without_a_replay_guard(world1):
    with pytest.raises(TypeError):
        open_envelope(world1.request(), world1.coordinator_box, {}, world1.expected(), world1.now_ms, None)

"""Failures before the signature take the same time: check 11, measured as ratios within one run."""

import gc
import random
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from edgefl_coordinator.web import sealed_requests
from edgefl_coordinator.web.operations import OPERATIONS
from edgefl_coordinator.web.sealed_requests import handle
from edgefl_protocol import Payload, generate_sealing_key
from edgefl_protocol.envelopes.envelope import MAGIC, SEAL_LABEL
from edgefl_protocol.messages.requests import ROUTES
from edgefl_protocol.pae import pae

ROUTE = ROUTES["blob"]


def by_nobody(envelope: bytes, key: Any, length: int) -> bytes:
    """The envelope of somebody who has not the sender's key: its header, and a signature of zeros over zeros."""
    (header_bytes,) = struct.unpack_from("<H", envelope, 5)
    fixed, header = envelope[:5], envelope[7 : 7 + header_bytes]
    return envelope[: 7 + header_bytes] + key.public_key.seal(bytes(64 + length), pae(SEAL_LABEL, fixed, header))


def failures(coordinator: Any, tools: Any, length: int) -> dict[str, Callable[[], bytes]]:
    """Name of a cause → makes a request that fails because of it, with a payload of about so many bytes."""
    member, gone = tools.approved_member(coordinator, "clinic-a"), tools.approved_member(coordinator, "clinic-b")
    OPERATIONS["revoke"](coordinator, {"name": "clinic-b"})
    stranger, other = tools.Member(coordinator, "nobody"), generate_sealing_key(coordinator.keys.sealing.suite)
    filling = Payload({}, {"filling": "x" * length})
    size = len(filling.to_bytes())

    def changed(place: int) -> bytes:
        whole = bytearray(member.envelope("blob", filling))
        whole[place] ^= 1
        return bytes(whole)

    def for_another_key() -> bytes:
        ours = coordinator.keys.sealing.key_id.encode()
        return bytes(member.envelope("blob", filling).replace(ours, other.key_id.encode()))

    return {
        "unknown sender": lambda: stranger.envelope("blob", filling),
        "revoked sender": lambda: gone.envelope("blob", filling),
        "another's key id": for_another_key,
        "damaged header": lambda: changed(12),
        "damaged ciphertext": lambda: changed(-1),
        "bad signature": lambda: by_nobody(member.envelope("blob", filling), coordinator.keys.sealing, size),
        "no envelope": lambda: bytes([255]) * len(member.envelope("blob", filling)),
        "another federation": lambda: member.envelope("blob", filling, fed="bone"),
        "too old": lambda: member.envelope("blob", filling, iat=coordinator.clock() - 10**7),
    }


def times_us(coordinator: Any, causes: dict[str, Callable[[], bytes]], repeats: int) -> dict[str, tuple[float, float]]:
    """Microseconds of a refusal by cause, asked in turns of random order: the median of processor time, and the lowest
    tenth of waiting, which other processes lengthen least."""
    taken: dict[str, list[tuple[int, int]]] = {name: [] for name in causes}
    draw, order = random.Random(0), list(causes)
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            draw.shuffle(order)
            for name in order:
                request = causes[name]()
                waited, worked = time.perf_counter_ns(), time.thread_time_ns()
                answer = handle(coordinator, ROUTE, request)
                taken[name].append((time.thread_time_ns() - worked, time.perf_counter_ns() - waited))
                assert answer.status == 401
    finally:
        gc.enable()
    found = {}
    for name, times in taken.items():
        worked_ns, waited_ns = zip(*times, strict=True)
        found[name] = (statistics.median(worked_ns) / 1000, statistics.quantiles(waited_ns, n=10)[0] / 1000)
    return found


def ratio(times: dict[str, tuple[float, float]], which: int) -> float:
    """The longest time, divided by the shortest."""
    found = [one[which] for one in times.values()]
    return max(found) / min(found)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "length"), [(1, 4000), (2, 4000), (1, 60_000)])
def test_every_failure_takes_the_same_time(make_coordinator, tools, monkeypatch, capsys, suite, length) -> None:
    """Check 11: medians of processor time lie within a factor of 1.3, which other processes hardly change; without the
    work on stand-ins the least waiting does not, of a sample seven times smaller."""
    coordinator = make_coordinator(suite=suite)
    assert coordinator.keys.sealing.suite == suite and MAGIC == b"EFL1"
    causes = failures(coordinator, tools, length)
    found = times_us(coordinator, causes, 150)
    monkeypatch.setattr(sealed_requests, "catch_up", lambda *_: None)
    without = times_us(coordinator, causes, 20)
    with capsys.disabled():
        print(f"\nsuite {suite}, {length} bytes: longest by shortest {ratio(found, 0):.3f} of processor, "
              f"{ratio(found, 1):.3f} of waiting; {ratio(without, 1):.0f} without stand-ins. Both in µs: "
              + ", ".join(f"{name} {work:.0f} {wait:.0f}" for name, (work, wait) in found.items()))  # fmt: skip
    assert ratio(found, 0) < 1.3 and ratio(without, 1) > 2

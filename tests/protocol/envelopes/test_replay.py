"""Replay windows. Sources: RFC 6479; the counter self-test of WireGuard; docs/security.md 2.5, checks 16 and 17.

The rows below state the facts of drivers/net/wireguard/selftest/counter.c (Linux) with two changes for our numbers: the
window is 2048 (theirs: 8192 bits less one word), and numbers end at 2^53. Their last rows jump to the end of the number
range, which our limit of 2^32 per jump refuses, so those start from a counter near the end.
"""

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import Header, ReplayWindow, judge
from edgefl_protocol.envelopes import replay
from edgefl_protocol.envelopes.replay import EMPTY_BITMAP, MAX_JUMP, NO_HIGHEST, WINDOW
from edgefl_protocol.errors import ReplayError, SequenceError

LIM = WINDOW  # first distance that is too far below the highest
END = 2**53  # first number that is refused

ROWS = [
    (0, True),
    (1, True),
    (1, False),
    (9, True),
    (8, True),
    (7, True),
    (7, False),
    (LIM, True),
    (LIM - 1, True),
    (LIM - 1, False),
    (LIM - 2, True),
    (2, True),
    (2, False),
    (LIM + 16, True),
    (3, False),
    (LIM + 16, False),
    (LIM * 4, True),
    (LIM * 4 - (LIM - 1), True),
    (10, False),
    (LIM * 4 - LIM, False),
    (LIM * 4 - (LIM + 1), False),
    (LIM * 4 - (LIM - 2), True),
    (LIM * 4 + 1 - LIM, False),
    (0, False),
    (END, False),
]
ROWS_AT_THE_END = [
    (END - 1, True),
    (END, False),
    (END - 1, False),
    (END - 2, True),
    (END + 1, False),
    (END + 2, False),
    (END - 2, False),
    (END - 3, True),
    (0, False),
]


class Counter:
    """Run `judge` and keep its state, as a store would."""

    def __init__(self, highest=NO_HIGHEST, bitmap=EMPTY_BITMAP):
        self.state = (highest, bitmap)

    def accepts(self, seq):
        try:
            self.state = judge(*self.state, seq)
        except (ReplayError, SequenceError):
            return False
        return True


def test_the_counter_table_of_wireguard():
    """docs/security.md check 16: all rows agree."""
    counter = Counter()
    assert [counter.accepts(seq) for seq, _ in ROWS] == [wanted for _, wanted in ROWS]
    counter = Counter(END - MAX_JUMP)
    assert [counter.accepts(seq) for seq, _ in ROWS_AT_THE_END] == [wanted for _, wanted in ROWS_AT_THE_END]


@pytest.mark.parametrize(
    ("run", "then"),
    [
        (range(1, LIM), [(0, True), (0, False)]),
        (range(2, LIM + 1), [(1, True), (0, False)]),
        (range(LIM - 1, -1, -1), []),
        (range(LIM, 0, -1), [(0, False)]),
        (range(LIM - 1, 0, -1), [(LIM, True), (0, False)]),
        (range(LIM - 1, 0, -1), [(0, True), (LIM, True)]),
    ],
)
def test_the_bulk_tests_of_wireguard(run, then):
    """docs/security.md check 16: whole windows upwards and downwards, and their borders."""
    counter = Counter()
    assert all(counter.accepts(seq) for seq in run)
    assert [counter.accepts(seq) for seq, _ in then] == [wanted for _, wanted in then]


def test_five_thousand_shuffled_messages_are_each_accepted_once():
    """docs/security.md check 16: any order in which nobody falls 2048 behind."""
    rng = random.Random(16)
    order = sorted(range(5000), key=lambda seq: seq + rng.uniform(0, WINDOW - 2))
    counter = Counter()
    assert all(counter.accepts(seq) for seq in order)
    assert not any(counter.accepts(seq) for seq in order)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3 * WINDOW), max_size=120), st.integers(0, 2**40))
def test_judge_agrees_with_a_set(numbers, start):
    """The definition: accepted iff not seen and less than 2048 below the highest seen so far."""
    counter, seen, highest = Counter(start), set(), start
    for number in numbers:
        seq = start + number
        wanted = seq not in seen and highest - seq < WINDOW
        assert counter.accepts(seq) == wanted
        if wanted:
            seen.add(seq)
            highest = max(highest, seq)


def test_refusals_say_which_kind_and_how_to_go_on():
    """docs/security.md 2.5: `seq_behind` with the highest number; jumps above 2^32 are refused."""
    state = judge(*judge(NO_HIGHEST, EMPTY_BITMAP, 5000), 4000)
    with pytest.raises(SequenceError) as caught:
        judge(*state, 5000 - WINDOW)
    assert (caught.value.code, caught.value.highest) == ("seq_behind", 5000)
    with pytest.raises(SequenceError) as caught:
        judge(*state, 5000 + MAX_JUMP + 1)
    assert caught.value.code == "seq_jump"
    assert judge(*state, 5000 + MAX_JUMP)[0] == 5000 + MAX_JUMP
    with pytest.raises(ReplayError) as caught:
        judge(*state, 4000)
    assert caught.value.code == "replayed"
    for number in (-1, END):
        with pytest.raises(SequenceError):
            judge(*state, number)


def header(seq, mid, *, skid="a" * 64, exp=600_000):
    return Header(
        typ="request",
        mth="POST",
        pth="/v1/reply",
        fed="skin",
        rnd=1,
        skid=skid,
        rkid="b" * 64,
        iat=0,
        exp=exp,
        seq=seq,
        mid=f"{mid:032x}",
        cty="reply",
        len=0,
    )


def test_a_thousand_copies_at_once_are_accepted_once(monkeypatch):
    """docs/security.md check 17: 20 threads, 50 copies each, switched in the middle of the judgement."""
    monkeypatch.setattr(replay, "judge", lambda *args: (judge(*args), time.sleep(0.001))[0])
    window, accepted, start = ReplayWindow(), [], threading.Barrier(20)

    def send():
        start.wait()
        for _ in range(50):
            try:
                window.admit(header(7, 7), 0)
                accepted.append(1)
            except (ReplayError, SequenceError):
                pass

    threads = [threading.Thread(target=send) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(accepted) == 1


@pytest.mark.parametrize("now_ms", [0, 599_999, 600_000, 600_001, 899_999, 2_000_000])
def test_a_copy_is_refused_before_near_and_after_expiry(now_ms):
    """docs/security.md check 17: the sequence bitmap outlives the remembered message id."""
    window = ReplayWindow()
    window.admit(header(7, 7), 0)
    with pytest.raises(ReplayError):
        window.admit(header(7, 7), now_ms)


def test_a_copy_is_refused_after_a_restart():
    """docs/security.md check 17: (highest, bitmap) is all that a store must keep."""
    stored = judge(NO_HIGHEST, EMPTY_BITMAP, 7)
    with pytest.raises(ReplayError):
        judge(*stored, 7)


def test_a_message_id_counts_once_whatever_its_number():
    window = ReplayWindow()
    window.admit(header(7, 1), 0)
    with pytest.raises(ReplayError):
        window.admit(header(8, 1), 0)
    window.admit(header(8, 2), 0)


def test_senders_have_windows_of_their_own():
    window = ReplayWindow()
    window.admit(header(7, 1), 0)
    window.admit(header(7, 1, skid="c" * 64), 0)
    with pytest.raises(ReplayError):
        window.admit(header(7, 2, skid="c" * 64), 0)


def test_a_refused_number_changes_nothing():
    """A stale or wild number with a fresh id leaves no trace, so it cannot block a later message."""
    window = ReplayWindow()
    window.admit(header(5000, 1), 0)
    for seq, mid in [(1, 2), (5000, 3), (5001 + MAX_JUMP, 4)]:
        with pytest.raises((ReplayError, SequenceError)):
            window.admit(header(seq, mid), 0)
    for seq, mid in [(5001, 2), (5002, 3), (5003, 4)]:
        window.admit(header(seq, mid), 0)


def test_message_ids_are_forgotten_once_the_clock_refuses_them():
    """docs/security.md 2.5: `mid` unique until `exp` plus the skew; memory does not grow without end."""
    window = ReplayWindow()
    for seq in range(1000):
        window.admit(header(seq, seq, exp=600_000), 0)
    for seq in range(1000):
        with pytest.raises(ReplayError):
            window.admit(header(1000 + seq, seq), 900_000)
    for seq in range(1000):
        window.admit(header(1000 + seq, seq, exp=1_500_001), 900_001)

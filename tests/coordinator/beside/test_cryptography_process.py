"""A process opens and seals as the server itself does, refuses alike, and is done without where it ends."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from edgefl_coordinator.beside import cryptography_process
from edgefl_coordinator.beside.crowd import do_here
from edgefl_coordinator.beside.cryptography_process import CryptographyProcess
from edgefl_coordinator.beside.cryptography_work import Opening, Sealing
from edgefl_protocol import (
    EnvelopeError,
    Expected,
    SealingKey,
    generate_sealing_key,
    generate_signing_key,
    open_envelope,
    seal,
)
from edgefl_protocol.envelopes.envelope import Tolerance

NOW_MS = 1_790_000_000_000
MEMBER, MEMBERS_BOX, COORDINATOR = generate_signing_key(), generate_sealing_key(), generate_signing_key()
ROUTE = {"mth": "POST", "pth": "/v1/reply", "fed": "skin", "cty": "reply", "rnd": 1, "iat": NOW_MS, "exp": NOW_MS + 9}
REQUEST, REPLY = {**ROUTE, "typ": "request", "seq": 1}, {**ROUTE, "typ": "reply", "seq": 1, "irt": "0" * 64, "sts": 200}
EXPECTED = Expected(pth="/v1/reply", fed="skin", typ="request", cty="reply")


@pytest.fixture(scope="module")
def process() -> Iterator[CryptographyProcess]:
    made = CryptographyProcess()
    made.start()
    yield made
    made.stop()


def opening(box: SealingKey, **changes: Any) -> Opening:
    data = seal(b"a reply", REQUEST, MEMBER, box)
    made = Opening(data, [box], COORDINATOR, MEMBER.public_key, EXPECTED, NOW_MS, 2**20, Tolerance())
    return replace(made, **changes)


def told(outcome: Any) -> Any:
    return (type(outcome.error), str(outcome.error), getattr(outcome.error, "code", "")) if outcome.error else outcome


@pytest.mark.parametrize("suite", [1, 2])
def test_it_opens_and_refuses_as_the_server_does(process, suite) -> None:
    """Each step of docs/security.md 2.3 up to the signature: same value, or same error and code."""
    box, other = generate_sealing_key(suite), generate_signing_key()
    good = opening(box)
    broken = good.data[:-1] + bytes([good.data[-1] ^ 1])
    works = [
        good,
        replace(good, data=b"no envelope"),
        replace(good, data=good.data.replace(b'"v":1', b'"v":2')),
        replace(good, expected=replace(EXPECTED, fed="bone")),
        replace(good, now_ms=NOW_MS + 10**7),
        replace(good, sender=None),
        replace(good, sender=other.public_key),
        replace(good, data=broken),
        replace(good, max_bytes=100),
    ]
    found, wanted = [list(map(told, do(works))) for do in (process, do_here)]
    assert found == wanted and found[0].value.payload == b"a reply"
    assert all(issubclass(one[0], EnvelopeError) for one in found[1:])


def test_it_seals_with_the_coordinators_key(process) -> None:
    """RFC 9180: who has the key opens it; the header says what it was asked to say."""
    works = [Sealing(b"an answer", REPLY, COORDINATOR, MEMBERS_BOX.public_key)] * 3
    for outcome in process(works):
        expected = Expected(pth="/v1/reply", fed="skin", typ="reply", cty="reply", irt="0" * 64, seq=1)
        senders = {COORDINATOR.key_id: COORDINATOR.public}
        assert open_envelope(outcome.get(), MEMBERS_BOX, senders, expected, NOW_MS, None).payload == b"an answer"


def test_it_takes_new_keys(process) -> None:
    """A renewed ring and a new signing key count from the next works on, and a key that is gone opens nothing."""
    old, new, signing = generate_sealing_key(1), generate_sealing_key(2), generate_signing_key()
    assert process([opening(old)])[0].error is None
    assert process([opening(new, own=signing, keys=[new, old])])[0].error is None
    assert process([opening(old, own=signing, keys=[new, old])])[0].error is None
    assert type(process([opening(old, own=signing, keys=[new])])[0].error).__name__ == "RecipientError"
    sealed = process([Sealing(b"x", REPLY, signing, MEMBERS_BOX.public_key)])[0].get()
    assert signing.key_id.encode() in sealed


def test_a_seal_that_fails_tells_why(process) -> None:
    wrong = Sealing(b"x", {**REPLY, "fed": "NO"}, COORDINATOR, MEMBERS_BOX.public_key)
    assert type(process([wrong])[0].error).__name__ == "HeaderError"


def test_where_it_ends_the_server_does_its_work() -> None:
    """Killed between two batches, it loses none; the next batch is another process's."""
    made, box = CryptographyProcess(), generate_sealing_key(1)
    try:
        assert made([opening(box)])[0].error is None
        first = made._running
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        for _ in range(3):
            assert [one.get().payload for one in made([opening(box)] * 3)] == [b"a reply"] * 3
        assert made._running is not None and made._running.pid != first.pid
    finally:
        made.stop()
    assert made([opening(box)])[0].error is None  # here


def test_its_keys_are_in_no_command_line_and_no_environment(process) -> None:
    """Other users of the machine see command lines; a child's environment outlives many a log."""
    box = generate_sealing_key(1)
    assert process([opening(box)])[0].error is None
    assert process._running is not None
    for name in ("cmdline", "environ"):
        with open(f"/proc/{process._running.pid}/{name}", "rb") as file:
            shown = file.read()
        assert COORDINATOR.seed.hex().encode() not in shown and box.secret.hex().encode() not in shown


@pytest.mark.parametrize("error", [MemoryError, UnicodeDecodeError("utf-8", b"", 0, 1, "odd"), KeyboardInterrupt])
def test_an_answer_that_nobody_read_is_never_taken_for_the_next_ones(monkeypatch, error) -> None:
    """The answer to A lay in the pipe, and B's forged envelope was opened with the payload of A."""
    box, real, failing = generate_sealing_key(1), cryptography_process.read_frames, iter([True])

    def read_frames(source: Any) -> Any:
        if next(failing, False):
            raise error
        return real(source)

    monkeypatch.setattr(cryptography_process, "read_frames", read_frames)
    made = CryptographyProcess()
    good = opening(box)
    forged = replace(good, data=good.data[:-1] + bytes([good.data[-1] ^ 1]))
    try:
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                made([good])
        else:
            assert made([good])[0].get().payload == b"a reply"  # done here
        assert isinstance(made([forged])[0].error, EnvelopeError)
        assert made([good])[0].get().payload == b"a reply"
    finally:
        made.stop()


def test_its_environment_holds_no_secret(monkeypatch) -> None:
    started: list[dict[str, str]] = []

    def popen(*_: Any, env: dict[str, str], **__: Any) -> Any:
        started.append(env)
        raise OSError

    for name in ("EDGEFL_KEY_PASSPHRASE", "PGPASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setattr(cryptography_process.subprocess, "Popen", popen)
    CryptographyProcess().start()
    assert started and "secret" not in started[0].values()

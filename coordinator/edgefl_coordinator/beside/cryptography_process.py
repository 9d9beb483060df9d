"""A process that opens and seals for the server, so that a second core does half of the work of a request.

Both halves: the server holds a `CryptographyProcess` and hands it works of `cryptography_work`, many at once; the
process calls `do_works`. Guarantees: the answers are those of the same works done here, for that is what the process
does with them. Where it has ended, they are done here, and the next ones by another process. It holds the coordinator's
keys, which come through its input and never by its command line or environment. It opens no file and no socket, and
ends with its input, so it does not outlive the server. Source: docs/security.md 2.3; docs/decisions/0055.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any, BinaryIO, Final

from edgefl_coordinator.beside.crowd import Errand, Finished, do_here
from edgefl_coordinator.beside.cryptography_work import Opening, Sealing
from edgefl_coordinator.beside.frames import (
    DONE,
    FAILED,
    KEYS,
    OPEN,
    REFUSED,
    SEAL,
    WRITTEN,
    Frame,
    read_frames,
    write_frames,
)
from edgefl_protocol import EnvelopeError, Expected, Opened, PublicSealingKey, PublicSigningKey, SealingKey, SigningKey
from edgefl_protocol.envelopes.envelope import Tolerance, unverified_header

log = logging.getLogger("edgefl_coordinator")

_PROGRAM: Final = (sys.executable, "-m", "edgefl_coordinator.beside.cryptography_process")
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "LC_ALL")  # no passphrase, no key
_BUFFER: Final = 2**20


class CryptographyProcess:
    """Does works in a process of its own, one batch after the other."""

    def __init__(self, program: Sequence[str] = _PROGRAM) -> None:
        self._program = program
        self._using = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._known: tuple[str, ...] = ()  # ids of the keys that it has
        self._stopped = False

    def start(self) -> None:
        """Begin the process, which takes a second, before there is work."""
        with self._using, contextlib.suppress(OSError):  # the first work tells
            self._begun()

    def __call__(self, works: Sequence[Errand]) -> Sequence[Finished]:
        """Do works, each an `Opening` or a `Sealing`; others are done here."""
        with self._using:
            theirs = [work for work in works if isinstance(work, Opening | Sealing)]
            if self._stopped or len(theirs) < len(works):
                return do_here(works)
            try:
                return self._done(theirs)
            except BaseException as error:
                self._end()  # an answer that nobody read must never be taken for the next one's
                if not isinstance(error, Exception):
                    raise
                log.error("the process that opens and seals ended (%s): the server does that itself for now",
                          type(error).__name__, extra={"once_a_minute": True})  # fmt: skip
                return do_here(works)

    def stop(self) -> None:
        """End the process, after the works that it has."""
        with self._using:
            self._stopped = True
            self._end()

    def _done(self, works: Sequence[Opening | Sealing]) -> list[Finished]:
        running = self._begun()
        assert running.stdin is not None and running.stdout is not None
        frames = [_to_frame(work) for work in works]
        if known := self._unknown_keys(works):
            frames.insert(0, Frame(KEYS, known, b""))
        write_frames(_binary(running.stdin), frames)
        answers = read_frames(_binary(running.stdout))
        if answers is None or len(answers) != len(works):
            raise EOFError("it gave no answer")
        return [_from_frame(work, answer) for work, answer in zip(works, answers, strict=True)]

    def _begun(self) -> "subprocess.Popen[bytes]":
        if self._running is None:
            environment = {name: value for name in _ENVIRONMENT if (value := os.environ.get(name)) is not None}
            pipe, self._known = subprocess.PIPE, ()
            self._running = subprocess.Popen(  # noqa: S603 - our own module
                self._program, stdin=pipe, stdout=pipe, bufsize=_BUFFER, start_new_session=True, env=environment
            )
        return self._running

    def _unknown_keys(self, works: Sequence[Opening | Sealing]) -> str:
        """Write the keys of the newest work; "" where the process has those and no others."""
        own = works[-1].own
        opening = next((tuple(work.keys) for work in reversed(works) if isinstance(work, Opening)), None)
        if opening is None and self._known[:1] == (own.key_id,):
            return ""
        wanted = (own.key_id, *(key.key_id for key in opening or ()))
        if wanted == self._known:
            return ""
        self._known = wanted
        sealing = [[key.suite, key.secret.hex()] for key in opening or ()]
        return WRITTEN.encode([own.seed.hex(), sealing])

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        for pipe in (running.stdin, running.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(5.0)
            return
        running.kill()
        running.wait()


def do_works(source: BinaryIO, to: BinaryIO) -> None:
    """Do the works that come, until there are no more."""
    own, keys = SigningKey(bytes(32)), list[SealingKey]()
    while (frames := read_frames(source)) is not None:
        answers = []
        for frame in frames:
            if frame.kind == KEYS:
                seed, sealing = json.loads(frame.words)
                own = SigningKey(bytes.fromhex(seed))
                keys = [SealingKey(suite, bytes.fromhex(secret)) for suite, secret in sealing]
            else:
                answers.append(_answer(frame, own, keys))
        write_frames(to, answers)


def _answer(frame: Frame, own: SigningKey, keys: Sequence[SealingKey]) -> Frame:
    words = json.loads(frame.words)
    try:
        if frame.kind == SEAL:
            fields, suite, public = words
            key = PublicSealingKey.checked_before(suite, bytes.fromhex(public))
            return Frame(DONE, "", Sealing(frame.data, fields, own, key)())
        pth, fed, cty, now_ms, most, skew_ms, lifetime_ms, public = words
        sender = PublicSigningKey(bytes.fromhex(public)) if public else None
        expected, tolerance = (
            Expected(pth=pth, fed=fed, typ="request", cty=cty),
            Tolerance(skew_ms=skew_ms, lifetime_ms=lifetime_ms),
        )
        opened = Opening(frame.data, keys, own, sender, expected, now_ms, most, tolerance)()
        return Frame(DONE, opened.envelope_sha256, opened.payload)
    except EnvelopeError as error:
        return Frame(REFUSED, WRITTEN.encode([type(error).__name__, str(error), error.code]), b"")
    except Exception as error:  # noqa: BLE001 - whoever asked does it again, and tells
        return Frame(FAILED, type(error).__name__, b"")


def _to_frame(work: Opening | Sealing) -> Frame:
    if isinstance(work, Sealing):
        return Frame(SEAL, WRITTEN.encode([dict(work.fields), work.to.suite, work.to.public.hex()]), work.payload)
    expected, tolerance = work.expected, work.tolerance
    sender = work.sender.public.hex() if work.sender else ""
    limits = (work.max_bytes, tolerance.skew_ms, tolerance.lifetime_ms)
    return Frame(
        OPEN, WRITTEN.encode([expected.pth, expected.fed, expected.cty, work.now_ms, *limits, sender]), work.data
    )


def _from_frame(work: Opening | Sealing, answer: Frame) -> Finished:
    if answer.kind == REFUSED and isinstance(work, Opening):
        return Finished(error=_refusal(*json.loads(answer.words)))
    if answer.kind != DONE:
        return Finished.of(work)
    if isinstance(work, Sealing):
        return Finished(answer.data)
    assert work.sender is not None
    return Finished(Opened(unverified_header(work.data), answer.data, work.sender, answer.words))


def _refusal(name: str, message: str, code: str) -> EnvelopeError:
    kinds: dict[str, type[EnvelopeError]] = {one.__name__: one for one in EnvelopeError.__subclasses__()}
    return kinds.get(name, EnvelopeError)(message, code)


def _binary(pipe: IO[bytes]) -> Any:
    return pipe


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, EOFError):  # the server is gone
        do_works(sys.stdin.buffer, sys.stdout.buffer)

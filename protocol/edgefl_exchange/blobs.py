"""Blobs on their way: sent and fetched in pieces that a cut, a kill or a restart does not lose.

* Sending asks how much the coordinator holds durably and goes on from there; a piece that comes twice changes nothing.
* Fetching keeps what came, still encrypted, in a file of the member's folder (mode 0600) that a later call goes on
  with. The key is in no file. Nothing is used before length, SHA-256 and every chunk are verified; a file that does not
  verify is thrown away and fetched once more.
* Pieces begin small and grow while they are quick, so a slow line gets pieces that it can carry within the deadline of
  a request, and memory is bounded by the largest.

Source: docs/security.md 2.2, and the reliability table (resumable upload).
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from edgefl_exchange.caller import Caller
from edgefl_exchange.errors import Unavailable
from edgefl_protocol.durable import create_empty, file_bytes, read_anywhere, read_pieces, write_at
from edgefl_protocol.envelopes.blob import BlobReference, open_blob
from edgefl_protocol.errors import BlobError, PayloadError, StorageError
from edgefl_protocol.messages.blob_messages import MAX_PIECE_BYTES, BlobGet, BlobGetReply, BlobPut, BlobPutReply

FIRST_PIECE_BYTES = 256 * 2**10
LEAST_PIECE_BYTES = 64 * 2**10
INSTANT_S, QUICK_S, SLOW_S = 0.5, 2.0, 10.0
MAX_SETBACKS = 3  # times that the coordinator may hold no more after a piece than before it
PART_AGE_S = 7 * 86_400.0  # after which a partial file that nobody went on with is deleted
_PART = ".part"


class Pace:
    """How long the next piece is: two or four times longer after a quick one, halved after a slow one."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._bytes = FIRST_PIECE_BYTES
        self._since = 0.0

    def begin(self, most: int) -> int:
        """Return the bytes of the piece that is sent now, at most `most`."""
        self._since = self._clock_s()
        return max(1, min(self._bytes, most, MAX_PIECE_BYTES))

    def done(self) -> None:
        """Note that it arrived."""
        took_s = self._clock_s() - self._since
        if took_s < QUICK_S:
            growth = 4 if took_s < INSTANT_S else 2
            self._bytes = min(growth * self._bytes, MAX_PIECE_BYTES)
        elif took_s > SLOW_S:
            self._bytes = max(self._bytes // 2, LEAST_PIECE_BYTES)


def send_blob(caller: Caller, reference: BlobReference, source: Path, pace: Pace) -> None:
    """Bring a blob to the coordinator, from where it holds it already.

    Raises:
        Unavailable: no signed answer came; a later call goes on.
        SignedRefusal: the coordinator does not take it.
        StorageError: the file is gone or shorter.
    """
    with read_anywhere(source, reference.size) as read_at:
        have, most = _put(caller, reference, 0, b"")
        setbacks = 0
        while have < reference.size:
            data = read_at(have, pace.begin(min(most, reference.size - have)))
            if not data:
                raise StorageError(
                    f"{source} is damaged: it is shorter than the {reference.size} bytes that it should have",
                    "damaged",
                )
            before = have
            have, most = _put(caller, reference, before, data)
            pace.done()
            setbacks += have <= before
            if setbacks > MAX_SETBACKS:
                raise Unavailable(
                    "the coordinator asks for the same bytes again and again; try again later", "no_progress"
                )


def fetch_blob(caller: Caller, reference: BlobReference, folder: Path, pace: Pace, max_bytes: int) -> bytes:
    """Fetch a blob and return its verified payload, from where an earlier call was cut.

    Args:
        reference: from the coordinator's signed answer.
        folder: of partial files; made where it is missing.

    Raises:
        Unavailable: no signed answer came; a later call goes on.
        SignedRefusal: the coordinator does not give it, any more or to this member.
        BlobError: it is too large, or what came does not verify, twice.
    """
    if reference.plain_bytes > max_bytes:
        raise BlobError(f"the blob holds {reference.plain_bytes} bytes; at most {max_bytes} are allowed", "too_large")
    part = folder / f"{reference.blob}{_PART}"
    sweep_parts(folder, keep=part)
    resumed = _begun(folder, part, reference.size)
    while True:
        _fill(caller, reference, part, pace)
        try:
            payload = open_blob(read_pieces(part, reference.size), reference, max_bytes)
        except BlobError:
            part.unlink(missing_ok=True)
            if not resumed:
                raise
            resumed = _begun(folder, part, reference.size)  # what lay here was damaged: all of it anew, once
            continue
        part.unlink(missing_ok=True)
        return payload


def sweep_parts(folder: Path, keep: Path | None = None, rested_s: float = 0.0) -> None:
    """Delete partial files of blobs that nobody asks for any more, all but `keep`, in a folder that may be missing.

    Those that grew within `rested_s` seconds are left.
    """
    if not folder.is_dir():
        return
    for path in folder.glob(f"*{_PART}"):
        with contextlib.suppress(OSError):  # the next sweep finds it again
            if path != keep and time.time() - path.stat().st_mtime >= rested_s:
                path.unlink()


def _begun(folder: Path, part: Path, size: int) -> bool:
    """Make the partial file where there is none that can be gone on with; tells whether there was."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make {folder}: {error.strerror}; check the home folder", "storage") from error
    if part.exists() and 0 < file_bytes(part) <= size:
        return True
    part.unlink(missing_ok=True)
    create_empty(part)
    return False


def _fill(caller: Caller, reference: BlobReference, part: Path, pace: Pace) -> None:
    """Fetch what a partial file lacks."""
    have = file_bytes(part)
    while have < reference.size:
        length = pace.begin(reference.size - have)
        request = BlobGet(blob=reference.blob, offset=have, length=length)
        data = BlobGetReply.from_payload(caller.call("blob", request.to_payload())).data
        pace.done()
        if len(data) > length:
            raise PayloadError(
                f"the coordinator sent {len(data)} bytes of a blob, but {length} were asked for", "too_large"
            )
        if not data:
            raise Unavailable("the coordinator sent no bytes of the blob; try again later", "no_progress")
        write_at(part, have, data)
        have += len(data)


def _put(caller: Caller, reference: BlobReference, offset: int, data: bytes) -> tuple[int, int]:
    """Send a piece; gives what the coordinator then holds, and the longest piece that it takes."""
    piece = BlobPut(blob=reference.blob, size=reference.size, sha256=reference.sha256, offset=offset, data=data)
    answer = BlobPutReply.from_payload(caller.call("blob", piece.to_payload()))
    return answer.have, answer.piece_bytes

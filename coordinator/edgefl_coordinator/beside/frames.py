"""How works of `cryptography_work` go to another process and come back: plain bytes, read by their lengths.

    u32 count, then of each    u8 kind | u32 length of the words | words (JSON) | u32 length of the data | data

Guarantees: both ends are processes of one server; what was cut is an `EOFError`. Nothing is
unpickled.
"""

import json
import struct
from collections.abc import Sequence
from typing import BinaryIO, Final, NamedTuple

_COUNT: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BI")

KEYS: Final = 0
OPEN: Final = 1
SEAL: Final = 2
DONE: Final = 3
REFUSED: Final = 4  # an `EnvelopeError`; the words are its name, message and code
FAILED: Final = 5  # anything else; the words are the error's name
WRITTEN: Final = json.JSONEncoder(separators=(",", ":"))


class Frame(NamedTuple):
    """One piece."""

    kind: int
    words: str  # JSON, or a name
    data: bytes


def write_frames(to: BinaryIO, frames: Sequence[Frame]) -> None:
    """Write frames, and flush."""
    parts = [_COUNT.pack(len(frames))]
    for kind, words, data in frames:
        encoded = words.encode()
        parts += (_HEAD.pack(kind, len(encoded)), encoded, _COUNT.pack(len(data)), data)
    to.write(b"".join(parts))
    to.flush()


def read_frames(source: BinaryIO) -> list[Frame] | None:
    """Read what `write_frames` wrote; None at the end."""
    count = source.read(_COUNT.size)
    if not count:
        return None
    found = []
    for _ in range(_COUNT.unpack(_whole(count, _COUNT.size))[0]):
        kind, length = _HEAD.unpack(_whole(source.read(_HEAD.size), _HEAD.size))
        words = _whole(source.read(length), length).decode()
        (size,) = _COUNT.unpack(_whole(source.read(_COUNT.size), _COUNT.size))
        found.append(Frame(kind, words, _whole(source.read(size), size)))
    return found


def _whole(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise EOFError("the other process ended in the middle of a frame")
    return data

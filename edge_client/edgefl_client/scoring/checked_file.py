"""Learned values in a file that says when it was changed: payload, then the SHA-256 of it (32 bytes).

A bit that falls over on a device's disk would otherwise become another weight, and another score, unnoticed.
"""

import hashlib
from pathlib import Path

from edgefl_protocol.durable import read_bounded, write_atomic
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.payload import Payload

MAX_BYTES = 2**30
_SUM_BYTES = 32


def write_checked(file: Path, payload: Payload) -> None:
    """Replace a file durably, mode 0600."""
    content = payload.to_bytes()
    write_atomic(file, content + hashlib.sha256(content).digest(), mode=0o600)


def read_checked(file: Path) -> Payload:
    """Read what `write_checked` wrote.

    Raises:
        PayloadError: it is not what was written.
    """
    data = read_bounded(file, MAX_BYTES)
    content, found = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
    if hashlib.sha256(content).digest() != found:
        raise PayloadError(f"{file.name} was changed after it was written")
    return Payload.from_bytes(content, MAX_BYTES)

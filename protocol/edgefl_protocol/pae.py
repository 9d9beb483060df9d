"""Pre-authentication encoding: an injective map from a list of byte strings to one byte string.

Source: the DSSE and PASETO encodings. PAE(p1..pn) = u64 little-endian count, then for each part its u64 little-endian
length and its bytes. Two different lists never encode alike, so nothing can move from one signed field into another.
"""

import struct
from typing import Final

_LENGTH: Final = struct.Struct("<Q").pack


def pae(*parts: bytes) -> bytes:
    """Encode the parts so that their number and borders are part of the result."""
    pieces = [_LENGTH(len(parts))]
    for part in parts:
        pieces += (_LENGTH(len(part)), part)
    return b"".join(pieces)

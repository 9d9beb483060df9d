"""The envelope's header: a flat JSON record in ASCII, at most 2048 bytes, kept as the bytes that were received.

Guarantees: `parse_header` returns a record in which every field is present, of the stated form and named once, or
raises `HeaderError`. Refused: non-ASCII bytes, duplicate and unknown keys, floats, NaN, truth values in place of
integers, integers from 2^53, nesting. Nothing ever serialises a received header again: signatures and seals cover the
bytes as they came. Source: docs/security.md 2.2.

    v     1                          rnd   0…2^31, 0 on routes without a round
    typ   request | reply            skid  sender's key id, 64 hex digits
    mth   POST                       rkid  recipient's key id, 64 hex digits
    pth   path, no query             iat   issued at, Unix ms
    fed   federation                 exp   expires at, Unix ms
    cty   content: the route's name  seq   sequence number of the sender's key
    len   payload bytes              mid   message id, 32 hex digits, random
    irt   in replies: SHA-256 of the request's envelope
    sts   in replies: HTTP status
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgefl_protocol.errors import HeaderError
from edgefl_protocol.fields import MAX_ROUND
from edgefl_protocol.strict_json import parse_integers

MAX_HEADER_BYTES: Final = 2048
MAX_SAFE_INT: Final = (1 << 53) - 1

_WORD: Final = re.compile(r"[a-z0-9-]{1,32}")
_HEX64: Final = re.compile(r"[0-9a-f]{64}")
_TEXTS: Final[dict[str, re.Pattern[str]]] = {
    "typ": _WORD,
    "mth": re.compile(r"POST"),
    "pth": re.compile(r"/[!$-.0-;=@-\[\]-~/]{0,127}"),  # printable, without space " # ? < > \
    "fed": _WORD,
    "skid": _HEX64,
    "rkid": _HEX64,
    "mid": re.compile(r"[0-9a-f]{32}"),
    "cty": _WORD,
    "irt": _HEX64,
}
_INTEGERS: Final[dict[str, tuple[int, int]]] = {
    "v": (1, 1),
    "rnd": (0, MAX_ROUND),
    "iat": (0, MAX_SAFE_INT),
    "exp": (0, MAX_SAFE_INT),
    "seq": (0, MAX_SAFE_INT),
    "len": (0, MAX_SAFE_INT),
    "sts": (100, 599),
}
# A request as `encode_header` writes it: what matches is a header by the rules below, which need eight times as long.
_USUAL: Final = re.compile(
    r'\{"v":1,"typ":"(?P<typ>[a-z0-9-]{1,32})","mth":"(?P<mth>POST)","pth":"(?P<pth>/[!$-.0-;=@-\[\]-~/]{0,127})",'
    r'"fed":"(?P<fed>[a-z0-9-]{1,32})","rnd":(?P<rnd>0|[1-9][0-9]{0,8}),"skid":"(?P<skid>[0-9a-f]{64})",'
    r'"rkid":"(?P<rkid>[0-9a-f]{64})","iat":(?P<iat>0|[1-9][0-9]{0,14}),"exp":(?P<exp>0|[1-9][0-9]{0,14}),'
    r'"seq":(?P<seq>0|[1-9][0-9]{0,14}),"mid":"(?P<mid>[0-9a-f]{32})","cty":"(?P<cty>[a-z0-9-]{1,32})",'
    r'"len":(?P<len>0|[1-9][0-9]{0,14})\}'
)
_REQUIRED: Final = ("v", "typ", "mth", "pth", "fed", "rnd", "skid", "rkid", "iat", "exp", "seq", "mid", "cty", "len")
_REPLY_ONLY: Final = ("irt", "sts")
_WRITTEN: Final = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Header:
    """A header whose form was checked; the module docstring explains the fields."""

    typ: str
    mth: str
    pth: str
    fed: str
    rnd: int
    skid: str
    rkid: str
    iat: int
    exp: int
    seq: int
    mid: str
    cty: str
    len: int
    irt: str | None = None
    sts: int | None = None


def encode_header(fields: Mapping[str, object]) -> bytes:
    """Return the header's bytes, keys in the fixed order.

    Args:
        fields: all required keys, and `irt` with `sts` in a reply.

    Raises:
        HeaderError: a key is missing, unknown or has not its form.
    """
    _check(dict(fields))
    ordered = {key: fields[key] for key in (*_REQUIRED, *_REPLY_ONLY) if key in fields}
    encoded = _WRITTEN.encode(ordered).encode("ascii")
    if len(encoded) > MAX_HEADER_BYTES:
        raise HeaderError(f"header of {len(encoded)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    return encoded


def parse_header(data: bytes) -> Header:
    """Read a header strictly."""
    if len(data) > MAX_HEADER_BYTES:
        raise HeaderError(f"header of {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    try:
        text = data.decode("ascii")
        if usual := _USUAL.fullmatch(text):
            return _request(*usual.groups())
        fields = parse_integers(text)
    except ValueError:
        raise HeaderError("the header is not strict ASCII JSON") from None
    if type(fields) is not dict:
        raise HeaderError("the header is not a JSON object")
    _check(fields)
    del fields["v"]
    return Header(**fields)


def _request(
    typ: str, mth: str, pth: str, fed: str, rnd: str, skid: str, rkid: str, iat: str, exp: str, seq: str, mid: str,
    cty: str, length: str,
) -> Header:  # fmt: skip
    """A request's header from the groups of `_USUAL`."""
    return Header(
        typ=typ, mth=mth, pth=pth, fed=fed, rnd=int(rnd), skid=skid, rkid=rkid, iat=int(iat), exp=int(exp),
        seq=int(seq), mid=mid, cty=cty, len=int(length),
    )  # fmt: skip


def _check(fields: dict[str, Any]) -> None:
    """Refuse a record with a missing or unknown key or a value of another form."""
    is_reply = "irt" in fields or "sts" in fields
    wanted = {*_REQUIRED, *_REPLY_ONLY} if is_reply else set(_REQUIRED)
    if fields.keys() != wanted:
        odd = ", ".join(sorted(str(key)[:16] for key in fields.keys() ^ wanted)[:4])
        raise HeaderError(f"the header's keys are wrong, missing or unknown: {odd}")
    for key, pattern in _TEXTS.items():
        value = fields.get(key)
        if key in fields and (type(value) is not str or not pattern.fullmatch(value)):
            raise HeaderError(f"header field {key} does not have the form {pattern.pattern}")
    for key, (lowest, highest) in _INTEGERS.items():
        value = fields.get(key)
        if key in fields and (type(value) is not int or not lowest <= value <= highest):
            raise HeaderError(f"header field {key} is not an integer from {lowest} to {highest}")

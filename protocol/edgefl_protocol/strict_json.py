"""JSON as the wire wants it: objects without duplicate keys, integers of at most 16 digits, no other numbers.

The standard parser accepts duplicate keys, NaN and 1e999 in silence and raises RecursionError on deep nesting. Bounds
on size are the caller's, before the call.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DIGITS = 16  # with a sign; 2^53 has 16


def loads(text: str) -> Any:
    """Parse strictly.

    Raises:
        ValueError: not JSON, a duplicate key, a number that is not a short integer, or too deep.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_float=_refuse, parse_constant=_refuse, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: object) -> bytes:
    """Return the one canonical form: ASCII, sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:16]} is not an integer")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return int(text)

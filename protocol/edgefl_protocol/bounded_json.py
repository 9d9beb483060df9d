"""JSON that means one thing: bounded, no duplicate keys, no NaN, and one way to write each value.

Guarantees of `parse_json`: the size is checked first, brackets are counted before anything is parsed (the standard
library answers deep nesting with `RecursionError`, and takes duplicate keys, NaN and 1e999 without a word), integers
stay below 2^53, numbers are finite, text holds no lone surrogate. `write_json` gives equal bytes for equal values.
Unlike `strict_json`, which reads headers of integers and text, this one takes the nested records of a bundle.

Source: RFC 8259 and RFC 7493 (I-JSON); docs/security.md, attack list 11.
"""

import json
import math
import re
from typing import Final, NoReturn

MAX_JSON_BYTES: Final = 256 * 1024
MAX_JSON_DEPTH: Final = 8
MAX_INT: Final = 2**53 - 1

_MARKS: Final = re.compile(rb'[\[\]{}"\\]')


def parse_json(data: bytes, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_JSON_DEPTH) -> object:
    """Parse one JSON value.

    Args:
        data: UTF-8.
        max_bytes: refuse more.
        max_depth: refuse deeper nesting of arrays and objects.

    Returns:
        dict, list, str, int, float, bool or None.

    Raises:
        ValueError: anything that is not strict JSON within the bounds; the text is one clause for a sentence.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data):,} bytes where {max_bytes:,} are allowed")
    if (depth := _depth(data)) > max_depth:
        raise ValueError(f"nested {depth} deep where {max_depth} is allowed")
    try:
        value: object = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_int=_whole,
            parse_float=_finite,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate cannot be encoded
    except UnicodeError as error:
        raise ValueError("not UTF-8, or text with a lone surrogate") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at character {error.pos}") from error
    return value


def write_json(value: object) -> bytes:
    """Write a JSON value in its one form: keys sorted, no spaces, ASCII.

    Raises:
        ValueError: NaN or infinity is among the numbers.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def _depth(data: bytes) -> int:
    """Count the deepest nesting, brackets inside strings left out."""
    depth = deepest = 0
    inside = False
    skip = -1  # place of a character after a backslash
    for mark in _MARKS.finditer(data):
        place, sign = mark.start(), mark.group()
        if place == skip:
            continue
        if inside:
            if sign == b"\\":
                skip = place + 1
            inside = sign != b'"'
        elif sign == b'"':
            inside = True
        elif sign in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif sign in b"]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _whole(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) > MAX_INT:
        raise ValueError("an integer of 2^53 or more")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("a number beyond the range of float64")
    return number

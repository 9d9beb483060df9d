"""JSON that means one thing: no duplicate keys, no NaN, bounded, and one way to write each value.

The standard library takes duplicate keys, NaN and 1e999 without a word and answers deep nesting with `RecursionError`.
`parse_json` reads the nested records of a bundle: size and depth are bounded before anything is parsed, integers stay
below 2^53, numbers are finite, text holds no lone surrogate. `parse_integers` reads headers and records of the wire,
whose size its callers bound and whose numbers are short integers. `write_json` gives equal bytes for equal values.

Source: RFC 8259 and RFC 7493 (I-JSON); docs/security.md 2.2 and attack list 11.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Final, NoReturn

MAX_JSON_BYTES: Final = 256 * 1024
MAX_JSON_DEPTH: Final = 8
MAX_INT: Final = 2**53 - 1
MAX_DIGITS: Final = 16  # of an integer on the wire, with its sign; 2^53 has 16

_MARKS: Final = re.compile(rb'[\[\]{}"\\]')


class UnknownKeysError(ValueError):
    """A record has all that this version knows and more: a newer version wrote it."""


def check_keys(
    record: object, needed: Collection[str], optional: Collection[str] = (), what: str = ""
) -> dict[str, Any]:
    """Take a JSON object with these keys and no others; `what` names it where it is part of a record.

    Raises:
        UnknownKeysError: it has others besides.
        ValueError: it is no object, or a key is missing; the text is one clause for a sentence.
    """
    if not isinstance(record, dict) or not set(needed) <= set(record):
        also = f"; {', '.join(sorted(optional))} may be added" if optional else ""
        raise ValueError(f"{what or 'the record'} must hold exactly {', '.join(sorted(needed))}{also}")
    unknown = sorted(set(record) - set(needed) - set(optional))
    if unknown:
        raise UnknownKeysError(f"{what}{' ' if what else ''}has {', '.join(unknown)[:300]}, which is not known here")
    return record


def parse_json(data: bytes, *, max_bytes: int = MAX_JSON_BYTES, max_depth: int = MAX_JSON_DEPTH) -> object:
    """Parse one JSON value: dict, list, str, int, float, bool or None.

    Raises:
        ValueError: anything that is not strict JSON within the bounds; the text is one clause for a sentence.
    """
    if len(data) > max_bytes:
        raise ValueError(f"it has {len(data):,} bytes, and at most {max_bytes:,} are allowed")
    if (depth := _depth(data)) > max_depth:
        raise ValueError(f"it is nested {depth} deep, and at most {max_depth} is allowed")
    try:
        value: object = _NUMBERS.decode(data.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate cannot be encoded
    except UnicodeError as error:
        raise ValueError("it is not UTF-8, or holds text with a lone surrogate") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON at character {error.pos}") from error
    return value


def parse_integers(text: str) -> Any:
    """Parse one JSON value whose numbers are integers of at most 16 digits.

    Raises:
        ValueError: not JSON, a duplicate key, another number, or too deep.
    """
    try:
        return _INTEGERS.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(value: object) -> bytes:
    """Write a JSON value in its one form: keys sorted, no spaces, ASCII.

    Raises:
        ValueError: NaN or infinity is among the numbers.
    """
    return _WRITTEN.encode(value).encode("ascii")


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
        raise ValueError("a key is given twice")
    return result


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _no_integer(digits: str) -> NoReturn:
    raise ValueError(f"{digits[:16]} is not an integer")


def _short(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds an integer of more than {MAX_DIGITS} digits")
    return int(digits)


def _whole(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) > MAX_INT:
        raise ValueError("it holds an integer of 2^53 or more")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("it holds a number beyond the range of float64")
    return number


def _decoder(whole: Callable[[str], int], broken: Callable[[str], float]) -> json.JSONDecoder:
    return json.JSONDecoder(object_pairs_hook=_unique, parse_int=whole, parse_float=broken, parse_constant=_no_number)


# Made once: `json.loads` and `json.dumps` make one each time where they are told how.
_INTEGERS: Final = _decoder(_short, _no_integer)
_NUMBERS: Final = _decoder(_whole, _finite)
_WRITTEN: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

"""Checks of single fields of a message: each returns the value in its own type or raises `PayloadError`.

Guarantees: every error raised here has the code `bad_message` and names the field and what is allowed, never the value
itself (it may be secret). Used by `messages` and `refusals`; nothing here knows a route.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.errors import PayloadError
from edgefl_protocol.payload import Payload, Scalar
from edgefl_protocol.strict_json import parse_json, write_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Plain = Scalar | bool | tuple[int | float, ...]  # a value of a method's settings or of a backbone's description

MAX_FIELD_BYTES = 64 * 2**10  # of one field's JSON text: a message carries many
MAX_ROUND = 2**31
MAX_CLASSES = 10_000
MAX_PLAIN_TEXT = 500  # characters

HEX = re.compile(r"(?:[0-9a-f]{2})+")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
IDEM = re.compile(r"[A-Za-z0-9_-]{16,64}")
FINGERPRINT = re.compile(r"[0-9A-HJKMNP-TV-Z]{20}")
CODE = re.compile(r"[a-z][a-z_]{0,39}")
MAX_CLASS_NAME = 200


def bad_message(message: str) -> PayloadError:
    """Return the error to raise for a field that has not its form."""
    return PayloadError(message, "bad_message")


def expect_names(payload: Payload, what: str, scalars: frozenset[str], arrays: frozenset[str] = frozenset()) -> None:
    """Refuse a payload whose names are not exactly these."""
    found_scalars, found_arrays = frozenset(payload.scalars), frozenset(payload.arrays)
    if found_scalars != scalars or found_arrays != arrays:
        wrong = sorted((found_scalars ^ scalars) | (found_arrays ^ arrays))
        names = ", ".join(wrong)[:200]
        raise bad_message(f"{what} has missing or extra fields ({names}): send exactly the documented ones")


def own_scalars(kind: "type[DataclassInstance]", payload: Payload, what: str) -> Mapping[str, Scalar]:
    """Return the scalars of a payload that has exactly the fields of a message and no array; refuse another."""
    expect_names(payload, what, frozenset(field.name for field in fields(kind)))
    return payload.scalars


def text(value: object, field: str, form: re.Pattern[str]) -> str:
    """Return text that matches `form` from end to end."""
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise bad_message(f"{field} does not have the form {form.pattern}")
    return value


def choice(value: object, field: str, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise bad_message(f"{field} is not one of {', '.join(allowed)}")
    return value


def hex_bytes(value: object, field: str, size: int) -> bytes:
    """Decode lower-case hex of exactly `size` bytes."""
    if not isinstance(value, str) or HEX.fullmatch(value) is None:
        raise bad_message(f"{field} is not lower-case hexadecimal")
    data = bytes.fromhex(value)
    if len(data) != size:
        raise bad_message(f"{field} has {len(data)} bytes; allowed: {size}")
    return data


def whole(value: object, field: str, low: int, high: int) -> int:
    """Return an integer within the bounds, both included; a bool is no integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_message(f"{field} is not a whole number from {low} to {high}")
    return value


def flag(value: object, field: str) -> bool:
    """Return the truth that 0 or 1 stands for: a payload's scalars have no bool."""
    return bool(whole(value, field, 0, 1))


def sentence(value: object, field: str, limit: int) -> str:
    """Return printable text of at most `limit` characters."""
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise bad_message(f"{field} is not printable text of at most {limit} characters")
    return value


def octets(payload: Payload, field: str, limit: int) -> bytes:
    """Return the bytes of a one-axis uint8 array of at most `limit` elements."""
    array = payload.arrays[field]
    if array.dtype != np.uint8 or array.ndim != 1 or array.size > limit:
        raise bad_message(f"{field} is not a one-dimensional uint8 array of at most {limit} bytes")
    return array.tobytes()


def octet_array(data: bytes, field: str, limit: int) -> NDArray[np.uint8]:
    """Return bytes as the array that carries them."""
    if len(data) > limit:
        raise bad_message(f"{field} has {len(data)} bytes; at most {limit} are allowed")
    return np.frombuffer(data, dtype=np.uint8)


def flat_json(value: object, field: str, depth: int = 1) -> object:
    """Parse a bounded JSON text nested no deeper than `depth`: no duplicate key, no NaN, no infinity."""
    if not isinstance(value, str):
        raise bad_message(f"{field} is not a JSON text")
    try:
        return parse_json(value.encode("utf-8", "surrogatepass"), max_bytes=MAX_FIELD_BYTES, max_depth=depth)
    except ValueError as error:
        raise bad_message(f"{field} is not one flat JSON value of at most {MAX_FIELD_BYTES} bytes") from error


def class_names(value: object) -> tuple[str, ...]:
    """Parse the JSON list of class names: at least one, distinct, printable."""
    names = flat_json(value, "classes")
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_CLASSES:
        raise bad_message(f"classes is not a list of 1 to {MAX_CLASSES} names")
    checked = tuple(sentence(name, "classes", MAX_CLASS_NAME) for name in names)
    if len(set(checked)) != len(checked) or "" in checked:
        raise bad_message("classes holds an empty name, or the same name twice")
    return checked


def words(value: object, field: str, most: int) -> tuple[str, ...]:
    """Parse a JSON list of at most `most` names."""
    found = flat_json(value, field)
    if not isinstance(found, list) or len(found) > most:
        raise bad_message(f"{field} is not a list of at most {most} names")
    return tuple(text(word, field, NAME) for word in found)


def plain_table(value: object, field: str) -> Mapping[str, Plain]:
    """Parse a JSON object of plain values: truth, numbers, printable text, and flat lists of numbers."""
    table = flat_json(value, field, depth=2)
    if not isinstance(table, dict):
        raise bad_message(f"{field} is not a JSON object")
    return MappingProxyType(
        {text(name, f"a name in {field}", NAME): _plain(item, field) for name, item in table.items()}
    )


def _plain(item: object, field: str) -> Plain:
    if isinstance(item, list) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in item):
        return tuple(item)
    if isinstance(item, str):
        return sentence(item, field, MAX_PLAIN_TEXT)
    if not isinstance(item, int | float):
        raise bad_message(f"{field} holds a value that is not true or false, a number, a text or a list of numbers")
    return item


def _scalar(value: object) -> Scalar:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float | str):
        return value
    plain = dict(value) if isinstance(value, Mapping) else value
    return write_json(plain).decode("ascii")


def scalar_payload(message: "DataclassInstance") -> Payload:
    """Return the payload whose scalars are the message's fields: bytes as hex, truth as 0 or 1, the rest as JSON."""
    return Payload({}, {field.name: _scalar(getattr(message, field.name)) for field in fields(message)})

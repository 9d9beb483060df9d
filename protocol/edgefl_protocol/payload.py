"""Payload: the content of a broadcast or a reply; named arrays plus a small flat dict of numbers and strings.

Guarantees: nothing but finite arrays of twelve plain types, integers, finite floats and text can be in it; equal
content has equal bytes; decoding is bounded and raises `PayloadError` and nothing else. Layout: that of `tensors`; the
scalars lie in its metadata as text with one letter for the type (`i:7`, `f:0.5`, `s:warm`).

Digests: SHA-256 over PAE(name, type, shape, little-endian bytes, …) of the arrays in name order.
"""

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from edgefl_protocol.errors import PayloadError
from edgefl_protocol.pae import pae
from edgefl_protocol.tensors import (
    Array,
    check_name,
    check_values,
    dtype_code,
    little_endian,
    read_tensors,
    write_tensors,
    written_bytes,
)

Scalar = int | float | str

MAX_PAYLOAD_BYTES: Final = 32 << 20  # above this a payload travels as a blob (docs/security.md 2.2)
MAX_SCALAR_INT: Final = 1 << 63
MAX_TEXT: Final = 1 << 16  # characters
_INT: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True, eq=False)
class Payload:
    """Named arrays and scalars; read-only once made (copy an array before changing it).

    Raises:
        PayloadError: a name, type or value may not travel.
    """

    # name to array, C-contiguous, little-endian, read-only, in name order
    arrays: Mapping[str, Array] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)  # name to integer, finite float or text, in name order

    def __post_init__(self) -> None:
        arrays = {check_name(name): _freeze(name, self.arrays[name]) for name in sorted(self.arrays)}
        scalars = {check_name(name): _plain(name, self.scalars[name]) for name in sorted(self.scalars)}
        object.__setattr__(self, "arrays", MappingProxyType(arrays))
        object.__setattr__(self, "scalars", MappingProxyType(scalars))

    def to_bytes(self) -> bytes:
        """Encode; equal payloads give equal bytes."""
        return write_tensors(self.arrays, self._texts(), checked=True)

    def encoded_bytes(self) -> int:
        """Return the length of `to_bytes`, without encoding."""
        return written_bytes(self.arrays, self._texts())

    def _texts(self) -> dict[str, str]:
        return {name: _write_scalar(value) for name, value in self.scalars.items()}

    @classmethod
    def from_bytes(cls, data: bytes | mmap.mmap, max_bytes: int = MAX_PAYLOAD_BYTES) -> "Payload":
        """Decode; of a mapped file nothing is copied, so it has to stay as it is.

        Raises:
            PayloadError: anything else than a well-formed, bounded payload.
        """
        arrays, metadata = read_tensors(data, max_bytes=max_bytes)
        scalars = {name: _read_scalar(name, text) for name, text in metadata.items()}
        if not isinstance(data, bytes):  # somebody else's memory, until `_freeze` has looked at it
            return cls(arrays, scalars)
        return cls._of_checked(arrays, {name: _plain(name, scalars[name]) for name in sorted(scalars)})

    def without(self, *names: str) -> "Payload":
        """Return the payload without some scalars; its arrays are the same."""
        return self._of_checked(self.arrays, {name: self.scalars[name] for name in self.scalars if name not in names})

    @classmethod
    def _of_checked(cls, arrays: Mapping[str, Array], scalars: Mapping[str, Scalar]) -> "Payload":
        """Take what was checked, in name order, and may not change any more."""
        payload = object.__new__(cls)
        object.__setattr__(payload, "arrays", MappingProxyType(dict(arrays)))
        object.__setattr__(payload, "scalars", MappingProxyType(scalars))
        return payload

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Payload):
            return NotImplemented
        return self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the SHA-256 (hex) of named arrays: equal names, types, shapes and bytes, equal digest.

    Raises:
        PayloadError: an array of a type that may not travel.
    """
    hasher = hashlib.sha256(struct.pack("<Q", 4 * len(arrays)))
    for name in sorted(arrays):
        array = little_endian(np.asarray(arrays[name]))
        shape = ",".join(str(extent) for extent in array.shape)
        for part in (name.encode(), dtype_code(array).encode(), shape.encode()):
            hasher.update(struct.pack("<Q", len(part)))
            hasher.update(part)
        hasher.update(struct.pack("<Q", array.nbytes))
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def state_digest(server: str, sites: Mapping[str, str]) -> str:
    """Return the SHA-256 (hex) over the server's digest, then `name:digest` of each site in name order."""
    parts = [f"{name}:{sites[name]}".encode() for name in sorted(sites)]
    return hashlib.sha256(pae(server.encode(), *parts)).hexdigest()


def _freeze(name: str, value: Array) -> Array:
    """Return a read-only array that nobody else can change."""
    array = little_endian(np.asarray(value))
    check_values(name, array)
    if array.flags.writeable or not array.flags.owndata:
        array = _own(array)
    array.flags.writeable = False
    return array


def _own(array: Array) -> Array:
    """Return the array itself where its bytes are immutable, or a file's that was mapped to be read; else a copy."""
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return array.copy()
        base = base.base
    mapped = isinstance(base, memoryview) and base.readonly and isinstance(base.obj, mmap.mmap)
    immutable = mapped or isinstance(base, bytes)
    return array if base is None or immutable else array.copy()


def _plain(name: str, value: object) -> Scalar:
    """Return a scalar as int, float or str; numpy numbers become Python's."""
    if isinstance(value, (bool, np.bool_)):
        raise PayloadError(f"scalar {name} is true or false; send 0 or 1", "bad_scalar")
    if isinstance(value, (int, np.integer)):
        if not -MAX_SCALAR_INT <= value < MAX_SCALAR_INT:
            raise PayloadError(f"scalar {name} does not fit 64 bits", "bad_scalar")
        return int(value)
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise PayloadError(f"scalar {name} is NaN or infinite; only finite numbers may travel", "not_finite")
        return float(value)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise PayloadError(f"scalar {name} must be a number or at most {MAX_TEXT} characters of text", "bad_scalar")
    return str(value)


def _write_scalar(value: Scalar) -> str:
    letter = "s" if isinstance(value, str) else "f" if isinstance(value, float) else "i"
    return f"{letter}:{value!r}" if letter != "s" else f"s:{value}"


def _read_scalar(name: str, text: str) -> Scalar:
    kind, value = text[:2], text[2:]
    if kind == "s:":
        return value
    if kind == "i:" and _INT.fullmatch(value):
        return int(value)
    if kind == "f:" and len(value) <= 32:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        # Only the form that we write: one value, one spelling, so equal content keeps equal bytes.
        if math.isfinite(number) and repr(number) == value:
            return number
    raise PayloadError(f"scalar {name} is not i:, f: or s: followed by a value in its canonical form", "bad_scalar")

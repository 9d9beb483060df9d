"""Named arrays and text in the safetensors layout, read and written with numpy alone.

Layout (github.com/huggingface/safetensors, "Format"): u64 little-endian header length, JSON header, raw little-endian
data. The reader is stricter than the format asks: it bounds the file, the header and the number of tensors before it
allocates, wants every data byte owned by exactly one tensor, and refuses duplicate keys, floats in the header, and
values that are not finite numbers. It never unpickles. Equal input gives equal bytes: names are written in order.
Subnormal numbers are ordinary numbers here (float16 maps are full of them) and keep their bits.
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol.distribution import require
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.strict_json import parse_integers

Array = NDArray[Any]

require("numpy", np.__version__)

DTYPES: Final[dict[str, str]] = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I8": "|i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "BOOL": "|b1",
}
MAX_HEADER_BYTES: Final = 1 << 20
MAX_TENSORS: Final = 4000
MAX_DIMENSIONS: Final = 8
MAX_EMPTY_EXTENT: Final = 1 << 31  # product of the other dimensions of an array without elements
METADATA: Final = "__metadata__"

_CODES: Final = {np.dtype(numpy_name): code for code, numpy_name in DTYPES.items()}
_WRITTEN: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True)
_NAME: Final = re.compile(r"[!-~]{1,256}")


def dtype_code(array: Array) -> str:
    """Return the safetensors name of an array's type, such as `F32`."""
    code = _CODES.get(array.dtype.newbyteorder("<"))
    if code is None:
        raise PayloadError(f"arrays of type {array.dtype} may not travel; allowed: {', '.join(DTYPES)}", "bad_dtype")
    return code


def little_endian(array: Array) -> Array:
    """Return the array C-contiguous and little-endian, copied only where needed; a 0-d array stays 0-d."""
    return np.asarray(array, dtype=DTYPES[dtype_code(array)], order="C")


def check_name(name: object) -> str:
    """Return a name of a tensor or scalar, 1 to 256 printable ASCII characters without spaces."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == METADATA:
        raise PayloadError("a name must be 1 to 256 printable ASCII characters without spaces", "bad_name")
    return name


def check_values(name: str, array: Array) -> None:
    """Refuse NaN and infinities, and bytes other than 0 and 1 in a boolean array."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise PayloadError(f"tensor {name} holds NaN or infinity; only finite numbers may travel", "not_finite")
    if array.dtype.kind == "b" and array.size and int(array.view(np.uint8).max()) > 1:
        raise PayloadError(f"boolean tensor {name} holds a byte other than 0 and 1", "bad_dtype")


def write_tensors(arrays: Mapping[str, Array], metadata: Mapping[str, str], *, checked: bool = False) -> bytes:
    """Encode arrays and text; the same content always gives the same bytes.

    Args:
        arrays: name to array, any shape of up to 8 dimensions.
        checked: their names and values were, and nobody can change them since.

    Raises:
        PayloadError: a name, type or value may not travel, or the header grows above its cap.
    """
    return b"".join(_pieces(arrays, metadata, checked=checked))


def written_bytes(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> int:
    """Return the length of what `write_tensors` makes of arrays that were checked, without making it."""
    return sum(len(piece) for piece in _pieces(arrays, metadata, checked=True))


def _pieces(arrays: Mapping[str, Array], metadata: Mapping[str, str], *, checked: bool) -> list[bytes | memoryview]:
    if len(arrays) > MAX_TENSORS:
        raise PayloadError(f"{len(arrays)} tensors; at most {MAX_TENSORS} may travel together", "too_many_tensors")
    header: dict[str, Any] = {}
    if metadata:
        header[METADATA] = {check_name(key): _check_text(metadata[key]) for key in sorted(metadata)}
    chunks: list[memoryview] = []
    offset = 0
    for name in sorted(arrays):
        array = arrays[name] if checked else little_endian(np.asarray(arrays[check_name(name)]))
        _check_shape(name, list(array.shape))
        if not checked:
            check_values(name, array)
        end = offset + array.nbytes
        header[name] = {"dtype": dtype_code(array), "shape": list(array.shape), "data_offsets": [offset, end]}
        chunks.append(array.reshape(-1).view(np.uint8).data)
        offset = end
    encoded = _WRITTEN.encode(header).encode("ascii")
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER_BYTES:
        raise PayloadError(
            f"header of {len(encoded)} bytes; at most {MAX_HEADER_BYTES} are allowed", "header_too_large"
        )
    return [struct.pack("<Q", len(encoded)), encoded, *chunks]


def read_tensors(data: bytes | mmap.mmap, *, max_bytes: int) -> tuple[dict[str, Array], dict[str, str]]:
    """Decode what `write_tensors` or the safetensors library wrote.

    Returns:
        Arrays by name in name order (read-only: copy before changing) and the metadata.

    Raises:
        PayloadError: anything else than a well-formed, bounded file of finite numbers.
    """
    if len(data) > max_bytes:
        raise PayloadError(f"the tensors have {len(data)} bytes; at most {max_bytes} are allowed here", "too_large")
    header, start = _read_header(data)
    metadata = _read_metadata(header.pop(METADATA, {}))
    if len(header) > MAX_TENSORS:
        raise PayloadError(
            f"the file has {len(header)} tensors; at most {MAX_TENSORS} are allowed here", "too_many_tensors"
        )
    entries = sorted(
        (_read_entry(name, value) for name, value in header.items()), key=lambda entry: entry[3:] + entry[:1]
    )
    arrays: dict[str, Array] = {}
    position = 0
    for name, dtype, shape, begin, end in entries:
        if begin != position:
            raise PayloadError(
                f"tensor {name} starts at byte {begin}, expected {position}: overlap or gap", "bad_offsets"
            )
        if end > len(data) - start:
            raise PayloadError(f"tensor {name} reaches beyond the end of the file", "bad_offsets")
        arrays[name] = _view(name, data, dtype, shape, start + begin)
        position = end
    if position != len(data) - start:
        raise PayloadError(f"{len(data) - start - position} bytes belong to no tensor", "bad_offsets")
    return {name: arrays[name] for name in sorted(arrays)}, metadata


def tensor_names(pieces: Iterable[bytes]) -> list[str]:
    """Return the names of the arrays of a file that comes in pieces, of which no more is taken than its header.

    Raises:
        PayloadError: it does not begin with a header.
    """
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= 8 and len(data) - 8 >= min(struct.unpack_from("<Q", data)[0], MAX_HEADER_BYTES):
            break
    header, _ = _read_header(bytes(data))
    return [check_name(name) for name in sorted(header) if name != METADATA]


def _read_header(data: bytes | mmap.mmap) -> tuple[dict[str, Any], int]:
    """Return the parsed JSON header and the offset of the first data byte."""
    if len(data) < 10:
        raise PayloadError(f"{len(data)} bytes are too few for a tensor file", "truncated")
    (length,) = struct.unpack_from("<Q", data)
    if length > MAX_HEADER_BYTES:
        raise PayloadError(f"header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed", "header_too_large")
    if length > len(data) - 8:
        raise PayloadError("the header reaches beyond the end of the file", "truncated")
    try:
        header = parse_integers(data[8 : 8 + length].decode("utf-8"))
    except ValueError:
        raise PayloadError("the tensor header is not strict JSON", "bad_header") from None
    if type(header) is not dict:
        raise PayloadError("the tensor header is not a JSON object", "bad_header")
    return header, 8 + length


def _read_metadata(value: object) -> dict[str, str]:
    if type(value) is not dict:
        raise PayloadError("the metadata is not a JSON object", "bad_header")
    return {check_name(key): _check_text(text) for key, text in value.items()}


def _check_text(text: object) -> str:
    if not isinstance(text, str):
        raise PayloadError("metadata must be text", "bad_header")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PayloadError("metadata must be Unicode text without lone surrogates", "bad_header") from None
    return text


def _check_shape(name: str, shape: object) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise PayloadError(f"tensor {name}: the shape must be at most {MAX_DIMENSIONS} integers ≥ 0", "bad_shape")
    if 0 in shape and math.prod(max(n, 1) for n in shape) > MAX_EMPTY_EXTENT:
        raise PayloadError(f"tensor {name} is empty with dimensions beyond 2^31", "bad_shape")
    return tuple(shape)


def _read_entry(name: str, value: object) -> tuple[str, str, tuple[int, ...], int, int]:
    """Check one header entry; returns name, numpy type, shape, first and end byte within the data."""
    check_name(name)
    if type(value) is not dict or set(value) != {"dtype", "shape", "data_offsets"}:
        raise PayloadError(f"tensor {name}: the entry must hold dtype, shape and data_offsets", "bad_header")
    code, offsets = value["dtype"], value["data_offsets"]
    if type(code) is not str or code not in DTYPES:
        raise PayloadError(f"tensor {name}: unknown type; allowed: {', '.join(DTYPES)}", "bad_dtype")
    shape = _check_shape(name, value["shape"])
    if type(offsets) is not list or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise PayloadError(f"tensor {name}: data_offsets must be two integers", "bad_offsets")
    begin, end = offsets
    if begin < 0 or end - begin != math.prod(shape) * np.dtype(DTYPES[code]).itemsize:
        raise PayloadError(f"tensor {name}: offsets do not match the shape and type", "bad_offsets")
    return name, DTYPES[code], shape, begin, end


def _view(name: str, data: bytes | mmap.mmap, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
    """Return a read-only, aligned array over (or copied from) the file's bytes."""
    count = math.prod(shape)
    flat: Array = np.frombuffer(data, dtype, count, offset) if count else np.empty(0, dtype)
    array = np.require(flat.reshape(shape), requirements=["A", "C"])
    array.flags.writeable = False
    check_values(name, array)
    return array

"""The tensor file reader and writer. Source: the safetensors format; docs/security.md check 37."""

import contextlib
import json
import struct
import sys
import time
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgefl_protocol.errors import PayloadError
from edgefl_protocol.tensors import DTYPES, MAX_HEADER_BYTES, read_tensors, write_tensors

LIMIT = 32 << 20
names = st.from_regex(r"[!-~]{1,40}", fullmatch=True).filter(lambda name: name != "__metadata__")
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(sorted(DTYPES.values()))))
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else None
    return draw(hnp.arrays(dtype, draw(shapes), elements=finite))


def encode(header, data=b""):
    """Build a file from a header of our choice."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@settings(max_examples=100)
@given(st.dictionaries(names, arrays(), max_size=5), st.dictionaries(names, st.text(max_size=20), max_size=3))
def test_round_trip_keeps_names_types_shapes_and_bits(content, metadata):
    """docs/security.md check 37: what is written is read, bit for bit."""
    data = write_tensors(content, metadata)
    back, text = read_tensors(data, max_bytes=len(data))
    assert text == metadata and list(back) == sorted(content)
    for name, array in content.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


@settings(max_examples=50)
@given(st.dictionaries(names, arrays(), max_size=5))
def test_the_safetensors_library_reads_what_we_write_and_we_read_what_it_writes(content):
    """Independent oracle: the reference implementation."""
    theirs = safetensors.numpy.load(write_tensors(content, {}))
    assert {name: array.tobytes() for name, array in theirs.items()} == {n: a.tobytes() for n, a in content.items()}
    ours, _ = read_tensors(safetensors.numpy.save(content), max_bytes=LIMIT)
    assert {name: array.tobytes() for name, array in ours.items()} == {n: a.tobytes() for n, a in content.items()}


def test_equal_content_gives_equal_bytes_whatever_order_byte_order_and_layout():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    one = write_tensors({"a": matrix, "b": np.int16(3)}, {"x": "1", "y": "2"})
    other = write_tensors({"b": np.array(3, ">i2"), "a": np.asfortranarray(matrix.astype(">f4"))}, {"y": "2", "x": "1"})
    assert one == other


HOSTILE = {
    "overlap": encode({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(8)),
    "same bytes twice": encode({"a": entry(), "b": entry()}, bytes(4)),
    "gap": encode({"a": entry(), "b": entry(offsets=(8, 12))}, bytes(12)),
    "begins late": encode({"a": entry(offsets=(4, 8))}, bytes(8)),
    "trailing bytes": encode({"a": entry()}, bytes(5)),
    "ends behind the file": encode({"a": entry(shape=(2,), offsets=(0, 8))}, bytes(4)),
    "negative begin": encode({"a": entry(offsets=(-4, 0))}, bytes(4)),
    "reversed": encode({"a": entry(shape=(0,), offsets=(4, 0))}, bytes(4)),
    "huge offsets": encode({"a": entry(offsets=(2**60, 2**60 + 4))}, bytes(4)),
    "larger than any int": encode(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,%s]}}' % (b"9" * 5000)),
    "huge shape": encode({"a": entry(shape=(2**40, 2**40), offsets=(0, 4))}, bytes(4)),
    "product overflows 64 bits to 4": encode({"a": entry(shape=(2**32, 2**32 + 1), offsets=(0, 4))}, bytes(4)),
    "huge empty": encode({"a": entry(shape=(0, 2**50, 2**50), offsets=(0, 0))}),
    "nine dimensions": encode({"a": entry(shape=(1,) * 9)}, bytes(4)),
    "negative dimension": encode({"a": entry(shape=(-1,), offsets=(0, 4))}, bytes(4)),
    "two negative dimensions": encode({"a": entry(shape=(-1, -1))}, bytes(4)),
    "float dimension": encode({"a": entry(shape=(1.0,))}, bytes(4)),
    "bool dimension": encode({"a": entry(shape=(True,))}, bytes(4)),
    "text dimension": encode({"a": entry(shape=("1",))}, bytes(4)),
    "shape is not a list": encode({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, bytes(4)),
    "dtype object": encode({"a": entry(dtype="O", offsets=(0, 8))}, bytes(8)),
    "dtype numpy name": encode({"a": entry(dtype="<f4")}, bytes(4)),
    "dtype lower case": encode({"a": entry(dtype="f32")}, bytes(4)),
    "dtype bfloat16": encode({"a": entry(dtype="BF16", offsets=(0, 2))}, bytes(2)),
    "dtype list": encode({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "wider type than bytes": encode({"a": entry(dtype="F64")}, bytes(4)),
    "bool byte 2": encode({"a": entry(dtype="BOOL", offsets=(0, 1))}, b"\x02"),
    "NaN": encode({"a": entry()}, struct.pack("<f", float("nan"))),
    "infinity": encode({"a": entry(dtype="F16", offsets=(0, 2))}, struct.pack("<e", float("inf"))),
    "signalling NaN": encode({"a": entry()}, struct.pack("<I", 0x7F800001)),
    "duplicate name": encode(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
    "extra key": encode({"a": {**entry(), "z": 1}}, bytes(4)),
    "missing key": encode({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "entry is a list": encode({"a": [1, 2]}, bytes(4)),
    "name with a space": encode({"a b": entry()}, bytes(4)),
    "name with a newline": encode({"a\n": entry()}, bytes(4)),
    "empty name": encode({"": entry()}, bytes(4)),
    "name not ASCII": encode({"ä": entry()}, bytes(4)),
    "name of 257": encode({"a" * 257: entry()}, bytes(4)),
    "metadata number": encode({"__metadata__": {"a": 1}}),
    "metadata list": encode({"__metadata__": []}),
    "metadata lone surrogate": encode(b'{"__metadata__":{"a":"\\ud800"}}'),
    "NaN in header": encode(b'{"a":NaN}'),
    "float in header": encode(b'{"a":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}', bytes(4)),
    "not an object": encode(b"[]"),
    "not JSON": encode(b"{]"),
    "not UTF-8": encode(b'{"\xff":1}'),
    "deep": encode(b"[" * 500_000),
    "deep objects": encode(b'{"a":' * 200_000),
    "empty": b"",
    "nine bytes": bytes(9),
    "header length beyond the file": struct.pack("<Q", 100) + b"{}",
    "header length 2^64-1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header over its cap": encode(b"{}" + b" " * MAX_HEADER_BYTES),
    "4001 tensors": encode({f"t{i}": entry(shape=(0,), offsets=(0, 0)) for i in range(4001)}),
    "million names": encode(b"{" + b",".join(b'"%d":0' % i for i in range(1_000_000)) + b"}"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_a_typed_error(case):
    """docs/security.md check 37: overlapping, negative and huge offsets, type tricks, 10^6 names, NaN and infinity."""
    with pytest.raises(PayloadError):
        read_tensors(HOSTILE[case], max_bytes=LIMIT)


def test_hostile_files_cost_neither_memory_nor_time():
    """docs/security.md check 37: bounds are checked before anything of the stated size is allocated."""
    tracemalloc.start()
    started = time.process_time()
    for case in ("huge offsets", "huge shape", "product overflows 64 bits to 4", "million names", "deep"):
        with pytest.raises(PayloadError):
            read_tensors(HOSTILE[case], max_bytes=LIMIT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert time.process_time() - started < 2


def test_the_valid_neighbour_of_the_hostile_files_is_read():
    """The table above can fail: the same shape of file without the trick is accepted."""
    found, _ = read_tensors(encode({"a": entry(), "b": entry(offsets=(4, 8))}, bytes(8)), max_bytes=LIMIT)
    assert list(found) == ["a", "b"]


def test_subnormal_numbers_keep_their_bits():
    """docs/security.md check 37: denormals are numbers, and half-precision maps hold many."""
    tiny = np.array([1, 2, 1023], np.uint16).view(np.float16)
    back, _ = read_tensors(write_tensors({"m": tiny}, {}), max_bytes=LIMIT)
    assert back["m"].tobytes() == tiny.tobytes()


def test_a_file_over_the_limit_is_refused_by_size():
    data = write_tensors({"a": np.zeros(10, np.float32)}, {})
    with pytest.raises(PayloadError, match="at most"):
        read_tensors(data, max_bytes=len(data) - 1)


@settings(max_examples=300)
@given(st.data())
def test_any_change_of_bytes_is_read_or_refused_never_a_crash(data):
    """docs/security.md check 37: mutated files end in a value no larger than the file, or in `PayloadError`."""
    good = bytearray(write_tensors({"a": np.ones((2, 3), np.float32), "b": np.array([True])}, {"k": "v"}))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrays, metadata = read_tensors(bytes(good), max_bytes=LIMIT)
    except PayloadError as error:
        assert error.code and str(error)
        return
    assert sum(array.nbytes for array in arrays.values()) <= len(good)
    assert all(isinstance(word, str) for pair in metadata.items() for word in pair)


def test_no_pickle_code_execution_or_command_is_reachable():
    """docs/security.md check 37: an audit hook sees no `pickle.find_class`, `exec` or `os.system` meanwhile."""
    seen = []
    watched = {"pickle.find_class", "exec", "os.system", "subprocess.Popen"}
    active = [True]
    sys.addaudithook(lambda event, args: seen.append(event) if active[0] and event in watched else None)
    for data in HOSTILE.values():
        with contextlib.suppress(PayloadError):
            read_tensors(data, max_bytes=LIMIT)
    active[0] = False
    assert seen == []


@pytest.mark.parametrize(
    "array",
    [np.array([None]), np.array(["a"]), np.zeros(2, np.complex64), np.zeros(2, "M8[s]"), np.array([np.nan])],
    ids=["object", "text", "complex", "date", "nan"],
)
def test_what_may_not_travel_is_refused_when_written(array):
    with pytest.raises(PayloadError):
        write_tensors({"a": array}, {})

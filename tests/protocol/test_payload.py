"""Payloads and digests. Source: the formats page of the design; docs/security.md check 37."""

import contextlib
import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgefl_protocol import Payload, PayloadError, digest, state_digest
from edgefl_protocol.tensors import write_tensors

names = st.from_regex(r"[a-z0-9._]{1,20}", fullmatch=True)
arrays = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64, np.int64, np.uint8, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements=None,
).filter(lambda array: array.dtype.kind != "f" or np.isfinite(array).all())
scalars = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=30)
)


@settings(max_examples=150)
@given(st.dictionaries(names, arrays, max_size=4), st.dictionaries(names, scalars, max_size=6))
def test_round_trip_keeps_every_value_and_type(content, values):
    payload = Payload(content, values)
    back = Payload.from_bytes(payload.to_bytes())
    assert back == payload and back.to_bytes() == payload.to_bytes()
    assert payload.encoded_bytes() == len(payload.to_bytes())
    assert back.scalars == {name: values[name] for name in sorted(values)}
    assert [type(value) for value in back.scalars.values()] == [type(values[name]) for name in sorted(values)]
    for name, array in content.items():
        assert back.arrays[name].tobytes() == array.tobytes() and back.arrays[name].dtype == array.dtype


def test_a_number_keeps_its_sign_bit_and_its_type():
    back = Payload.from_bytes(Payload({}, {"zero": -0.0, "whole": 1.0, "one": 1, "text": "1"}).to_bytes()).scalars
    assert struct.pack("<d", back["zero"]) == struct.pack("<d", -0.0)
    assert [type(back[name]) for name in ("whole", "one", "text")] == [float, int, str]


def test_a_payload_cannot_be_changed_from_outside():
    """A payload that exists stays what was checked: neither its maker nor its reader can alter it."""
    mine = np.zeros(3, np.float32)
    view = np.zeros((2, 3), np.float32)
    payload = Payload({"a": mine, "v": view[1]}, {"n": 1})
    before = payload.to_bytes()
    mine[:] = np.nan
    view[:] = np.nan
    assert payload.to_bytes() == before
    with pytest.raises(ValueError):
        payload.arrays["a"][0] = 1
    with pytest.raises(TypeError):
        payload.arrays["b"] = mine
    with pytest.raises(TypeError):
        payload.scalars["n"] = 2


@pytest.mark.parametrize(
    "value",
    [True, np.True_, None, b"x", [1], float("nan"), float("inf"), 2**63, -(2**63) - 1, "x" * 65537, "\ud800", 1j],
    ids=str,
)
def test_scalars_that_may_not_travel_are_refused(value):
    """docs/security.md check 37."""
    with pytest.raises(PayloadError):
        Payload({}, {"x": value}).to_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_hold_finite_numbers_only(value, dtype):
    """docs/security.md check 37."""
    with pytest.raises(PayloadError):
        Payload({"x": np.array([0, value], dtype)})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "i:",
        "i:05",
        "i:-0",
        "i:+5",
        "i: 5",
        "i:5_0",
        "i:99999999999999999999",
        "i:9223372036854775808",
        "b:1",
        "x:1",
        "f:",
        "f:nan",
        "f:inf",
        "f:1e999",
        "f:1",
        "f:1.00",
        "f: 1.0",
        "f:1_0.0",
        "f:1111111111111111111111111111111111111111",
    ],
)
def test_a_scalar_has_one_spelling(text):
    """docs/security.md check 37: equal content keeps equal bytes, so other spellings of a number are refused."""
    with pytest.raises(PayloadError):
        Payload.from_bytes(write_tensors({}, {"x": text}))


@settings(max_examples=200)
@given(st.integers(0, 200), st.integers(1, 255))
def test_a_flipped_byte_never_gives_the_same_payload(position, flip):
    """Tamper property: either a typed refusal or another payload (padding of the header aside)."""
    payload = Payload({"a": np.arange(6, dtype=np.int32)}, {"round": 3})
    data = bytearray(payload.to_bytes())
    position %= len(data)
    was_space = data[position] == 0x20
    data[position] ^= flip
    with contextlib.suppress(PayloadError):
        assert Payload.from_bytes(bytes(data)) != payload or was_space


def test_numpy_scalars_become_plain_numbers():
    assert Payload({}, {"a": np.int32(3), "b": np.float64(0.5)}).scalars == {"a": 3, "b": 0.5}


def test_the_limit_is_enforced_before_parsing():
    data = Payload({"a": np.zeros(100, np.uint8)}).to_bytes()
    with pytest.raises(PayloadError, match="at most 50"):
        Payload.from_bytes(data, max_bytes=50)


def reference_digest(arrays):
    """Ten lines from the definition: SHA-256 over PAE(name, type, shape, bytes, …) in name order."""
    codes = {"float32": b"F32", "int64": b"I64", "bool": b"BOOL"}
    parts = []
    for name in sorted(arrays):
        shape = ",".join(map(str, arrays[name].shape)).encode()
        parts += [name.encode(), codes[arrays[name].dtype.name], shape, arrays[name].tobytes()]
    text = struct.pack("<Q", len(parts)) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hashlib.sha256(text).hexdigest()


def test_digest_follows_its_definition():
    content = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.int64([7]), "c": np.array(True)}
    assert digest(content) == reference_digest(content)
    assert digest({}) == hashlib.sha256(bytes(8)).hexdigest()


def test_digest_sees_name_type_shape_and_bytes_and_nothing_else():
    base = np.arange(6, dtype=np.float32)
    variants = [
        {"a": base},
        {"b": base},
        {"a": base.reshape(2, 3)},
        {"a": base.reshape(3, 2)},
        {"a": base.view(np.int32)},
        {"a": base + 1},
        {"a": base, "b": base[:0]},
        {"a": base[:3], "b": base[3:]},
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)
    assert digest({"a": base.astype(">f4")}) == digest({"a": base}) == digest({"a": np.repeat(base, 2)[::2]})


def test_state_digest_depends_on_each_site_and_not_on_their_order():
    """The design's summary: the server's digest, then name:digest of each site in name order."""
    server, one, two = "a" * 64, "b" * 64, "c" * 64
    found = state_digest(server, {"Kiel": one, "Ulm": two})
    assert found == state_digest(server, {"Ulm": two, "Kiel": one})
    parts = [server.encode(), f"Kiel:{one}".encode(), f"Ulm:{two}".encode()]
    text = struct.pack("<Q", 3) + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    assert found == hashlib.sha256(text).hexdigest()
    others = [{"Kiel": two, "Ulm": one}, {"Kiel": one}, {}, {"Kiel": one, "Ulm": two, "Jena": one}]
    assert len({found, *(state_digest(server, other) for other in others)}) == 5

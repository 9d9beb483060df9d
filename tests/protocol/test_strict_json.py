"""JSON that means one thing: RFC 8259 less what it leaves open, RFC 7493; docs/security.md 2.2."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol.strict_json import MAX_INT, parse_integers, parse_json, write_json

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INT, MAX_INT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab[]{}"\\é', max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_round_trip(value: object) -> None:
    """Every value of bounded depth survives, whatever brackets, quotes and backslashes its texts hold."""
    data = write_json(value)
    assert parse_json(data, max_depth=64) == value
    assert write_json(parse_json(data, max_depth=64)) == data


TEXTS = st.text('[]"\\\\', max_size=6)


@given(st.lists(st.recursive(TEXTS, lambda inner: st.lists(inner, max_size=3), max_leaves=12), max_size=3))
def test_depth_is_exact(value: list[object]) -> None:
    """The bracket count equals the real depth, computed on the parsed value, whatever its texts hold."""

    def depth(item: object) -> int:
        return 1 + max((depth(inner) for inner in item), default=0) if isinstance(item, list) else 0

    data = json.dumps(value).encode()
    assert parse_json(data, max_depth=depth(value)) == value
    with pytest.raises(ValueError, match="nested"):
        parse_json(data, max_depth=depth(value) - 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"[-1e999]",
        b"9007199254740992",
        b"-9007199254740992",
        b"1" * 5_000,
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
        b'["\\udfff"]',
        b'{"\\ud800":1}',
        b"\xef\xbb\xbf1",
        b"'a'",
        b"[1,]",
        b"// comment\n1",
        b'"a\nb"',
        b"1 2",
        b"01",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'"' + b"a" * 300_000 + b'"',
    ],
)
def test_refused(data: bytes) -> None:
    """docs/security.md, attack list 11, and check 10's torture list: a ValueError each, never RecursionError."""
    with pytest.raises(ValueError, match=r"\w"):
        parse_json(data)


def test_no_slow_input() -> None:
    """The bracket count reads each byte once: 256 KiB of quotes and backslashes take well under a second."""
    for data in (b'"\\' * 131_072, b"\\" * 262_144, b'"' * 262_144, b'"\\"' * 87_000):
        started = time.process_time()
        with pytest.raises(ValueError, match=r"\w"):
            parse_json(data)
        assert time.process_time() - started < 1.0


def test_write_refuses_what_cannot_be_read() -> None:
    with pytest.raises(ValueError, match=r"\w"):
        write_json(float("nan"))


# ---- headers and records of the wire: integers are the only numbers

ints = st.integers(-(10**15) + 1, 10**16 - 1)
values = st.recursive(
    st.none() | st.booleans() | ints | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=100)
@given(values)
def test_plain_values_come_back_and_have_one_form(value):
    data = write_json(value)
    assert parse_integers(data.decode("ascii")) == value == json.loads(data)
    assert write_json(parse_integers(data.decode("ascii"))) == data


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '{"a":1,"\\u0061":2}',
        '[{"b":{"a":1,"a":2}}]',
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1.0",
        "1e2",
        "12345678901234567",
        "-1234567890123456",
        "9" * 5000,
        "[" * 100000,
        '{"a":' * 100000,
        "",
        "01",
        "'a'",
        "{}x",
    ],
    ids=lambda text: text[:16],
)
def test_what_the_standard_parser_lets_pass_is_refused(text):
    with pytest.raises(ValueError):
        parse_integers(text)

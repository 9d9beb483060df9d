"""The strict header parser. Source: docs/security.md 2.2 and check 10."""

import json
import re
import tracemalloc
from collections.abc import Iterable
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import Header
from edgefl_protocol.envelopes import header as header_module
from edgefl_protocol.envelopes.header import MAX_HEADER_BYTES, encode_header, parse_header
from edgefl_protocol.errors import HeaderError

GOOD = {
    "v": 1,
    "typ": "request",
    "mth": "POST",
    "pth": "/v1/reply",
    "fed": "skin",
    "rnd": 3,
    "skid": "a" * 64,
    "rkid": "b" * 64,
    "iat": 1_790_000_000_000,
    "exp": 1_790_000_600_000,
    "seq": 7,
    "mid": "c" * 32,
    "cty": "reply",
    "len": 100,
}
REPLY = {**GOOD, "typ": "reply", "irt": "d" * 64, "sts": 200}
TEXT = json.dumps(GOOD)


def spoil(old, new):
    assert old in TEXT
    return TEXT.replace(old, new, 1).encode("utf-8")


TORTURE = {
    "duplicate key": spoil('"v": 1', '"v": 1, "v": 1'),
    "duplicate by escape": spoil('"v": 1', '"v": 1, "\\u0076": 1'),
    "NaN": spoil('"rnd": 3', '"rnd": NaN'),
    "Infinity": spoil('"rnd": 3', '"rnd": Infinity'),
    "1e999": spoil('"rnd": 3', '"rnd": 1e999'),
    "float": spoil('"rnd": 3', '"rnd": 3.0'),
    "exponent": spoil('"rnd": 3', '"rnd": 3e0'),
    "true as integer": spoil('"v": 1', '"v": true'),
    "false as integer": spoil('"rnd": 3', '"rnd": false'),
    "null": spoil('"rnd": 3', '"rnd": null'),
    "text as integer": spoil('"rnd": 3', '"rnd": "3"'),
    "integer as text": spoil('"fed": "skin"', '"fed": 5'),
    "2^53": spoil('"seq": 7', f'"seq": {2**53}'),
    "minus one": spoil('"seq": 7', '"seq": -1'),
    "minus 2^53": spoil('"seq": 7', f'"seq": {-(2**53)}'),
    "thousand digits": spoil('"seq": 7', '"seq": ' + "9" * 1000),
    "leading zero": spoil('"seq": 7', '"seq": 07'),
    "round above 2^31": spoil('"rnd": 3', f'"rnd": {2**31 + 1}'),
    "version 2": spoil('"v": 1', '"v": 2'),
    "non-ASCII": spoil('"skin"', '"skín"'),
    "non-ASCII by escape": spoil('"skin"', '"sk\\u00edn"'),
    "full-width digit by escape": spoil('"skin"', '"sk\\uff11"'),
    "newline at the end": spoil('"skin"', '"skin\\n"'),
    "upper case": spoil('"skin"', '"Skin"'),
    "empty word": spoil('"skin"', '""'),
    "word of 33": spoil('"skin"', '"' + "s" * 33 + '"'),
    "list": spoil('"skin"', '["skin"]'),
    "object": spoil('"skin"', '{"a": "skin"}'),
    "GET": spoil('"POST"', '"GET"'),
    "query": spoil('"/v1/reply"', '"/v1/reply?x=1"'),
    "fragment": spoil('"/v1/reply"', '"/v1/reply#x"'),
    "relative path": spoil('"/v1/reply"', '"v1/reply"'),
    "path with a space": spoil('"/v1/reply"', '"/v1/ reply"'),
    "path with a control character": spoil('"/v1/reply"', '"/v1/\\u0000"'),
    "path of 129": spoil('"/v1/reply"', '"/' + "a" * 128 + '"'),
    "key id of 63": spoil("a" * 64, "a" * 63),
    "key id of 65": spoil("a" * 64, "a" * 65),
    "key id upper case": spoil("a" * 64, "A" * 64),
    "message id of 64": spoil("c" * 32, "c" * 64),
    "unknown key": spoil('"v": 1', '"v": 1, "crit": 1'),
    "missing key": spoil('"v": 1, ', ""),
    "irt without sts": spoil('"v": 1', '"v": 1, "irt": "%s"' % ("d" * 64)),
    "sts without irt": spoil('"v": 1', '"v": 1, "sts": 200'),
    "status 99": json.dumps({**REPLY, "sts": 99}).encode(),
    "status 600": json.dumps({**REPLY, "sts": 600}).encode(),
    "trailing text": TEXT.encode() + b"x",
    "second object": TEXT.encode() + b"{}",
    "byte order mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "comment": TEXT.encode() + b"/**/",
    "single quotes": TEXT.replace('"', "'").encode(),
    "an array": b"[" + TEXT.encode() + b"]",
    "a number": b"1",
    "empty": b"",
    "2 KiB + 1": TEXT.encode() + b" " * (MAX_HEADER_BYTES + 1 - len(TEXT)),
    "10^5 brackets": b"[" * 100_000,
    "2048 brackets": b"[" * 2048,
    "deep objects": b'{"v":' * 400,
}


@pytest.mark.parametrize("case", TORTURE)
def test_a_tortured_header_is_refused(case):
    """docs/security.md check 10: all refused with one type of error."""
    with pytest.raises(HeaderError):
        parse_header(TORTURE[case])


def test_torture_costs_no_memory():
    """docs/security.md check 10: growth below 2 MB."""
    tracemalloc.start()
    for data in TORTURE.values():
        with pytest.raises(HeaderError):
            parse_header(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize("fields", [GOOD, REPLY], ids=["request", "reply"])
def test_a_good_header_comes_back(fields):
    """The table above can fail: the same record without the spoiling is read."""
    wanted = {**fields}
    del wanted["v"]
    assert parse_header(encode_header(fields)) == Header(**wanted)
    assert parse_header(json.dumps(fields, indent=1).encode()) == Header(**wanted)


def test_the_edges_of_each_range_are_allowed():
    """docs/security.md 2.2: u53 numbers, 2^31 rounds, words of 1 to 32, paths of 128, headers of 2048."""
    largest = 2**53 - 1
    edge = {**GOOD, "seq": largest, "len": largest, "iat": 0, "exp": largest, "rnd": 2**31, "fed": "-" * 32}
    edge["pth"] = "/" + "~" * 127
    assert parse_header(encode_header(edge)).seq == largest
    padded = encode_header(GOOD)
    assert parse_header(padded + b" " * (MAX_HEADER_BYTES - len(padded))).fed == "skin"


@pytest.mark.parametrize("key", sorted(GOOD))
def test_an_incomplete_header_cannot_be_written(key):
    with pytest.raises(HeaderError):
        encode_header({name: value for name, value in GOOD.items() if name != key})


@settings(max_examples=300)
@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "ignore")))
def test_noise_is_refused_with_the_typed_error(data):
    with pytest.raises(HeaderError):
        parse_header(data)


@settings(max_examples=300)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4), st.data()
)
def test_any_json_in_any_field_is_read_or_refused(value, data):
    key = data.draw(st.sampled_from(sorted(REPLY)))
    fields = {**REPLY, key: value}
    try:
        header = parse_header(json.dumps(fields).encode())
    except HeaderError as error:
        assert str(error)
        return
    del fields["v"]
    assert header == Header(**fields)


EDGES = (0, 1, 10**8, 10**9 - 1, 10**9, 2**31, 2**31 + 1, 10**10 - 1, 10**15 - 1, 10**15, 2**53 - 1, 2**53, 10**16 - 1)
VALUES = (
    *map(str, EDGES), "-1", "-0", "+1", "00", "01", "1.0", "1e1", "true", "null", "", "{}", "1 ", '"1"', '""', '"POST"',
    '"post"', '"reply"', '"/"', '"a b"', '"a_b"', '"a.b"', '"aA"', '"\\u0061"', '"\\/"', '"a\\n"', '"\\""', '"é"',
    *(f'"{letter * length}"' for letter in "a0Ag-" for length in (31, 32, 33, 63, 64, 65)),
    *(f'"/{"~" * length}"' for length in (126, 127, 128)), *(f'"/{sign}"' for sign in " \"#?<>\\!$.:;=@[]{|}%é"),
)  # fmt: skip
ODDITIES = ("", " ", "\n", ",", '"', "\\", "0", "1", "+", "-", ".", "a", "A", "{", "}", ":", "é", "\x00", '"v":1,')
PLACES = st.tuples(st.integers(0, 600), st.integers(0, 1), st.sampled_from(ODDITIES))


def nearly_usual(values: dict[str, str], *places: tuple[int, int, str]) -> bytes:
    """A request's header as it is written, but for some values, and for characters put in or in place of another."""
    written = {key: json.dumps(value) for key, value in GOOD.items()} | values
    text = "{" + ",".join(f'"{key}":{value}' for key, value in written.items()) + "}"
    for place, cut, odd in places:
        text = text[:place] + odd + text[place + cut :]
    return text.encode()


def assert_read_alike(cases: Iterable[bytes]) -> None:
    """What the pattern takes, the strict parser takes, and reads alike; what it does not take falls through to that."""

    def parsed(data: bytes) -> Header | None:
        try:
            return parse_header(data)
        except HeaderError:
            return None

    for data in cases:
        found = parsed(data)
        with mock.patch.object(header_module, "_USUAL", re.compile("(?!)")):  # matches nothing
            assert found == parsed(data), data


def test_the_pattern_of_a_usual_header_reads_what_the_strict_parser_reads():
    """Each odd value in each field, and each odd character at each place."""
    assert_read_alike(nearly_usual({key: value}) for key in GOOD for value in VALUES)
    size = len(nearly_usual({}))
    assert_read_alike(
        nearly_usual({}, (place, cut, odd)) for place in range(size + 1) for cut in (0, 1) for odd in ODDITIES
    )


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(GOOD)), st.sampled_from(VALUES), max_size=4), st.lists(PLACES, max_size=3)
)
def test_so_it_does_with_several_changes(values, places):
    assert_read_alike([nearly_usual(values, *places)])


def test_the_pattern_is_used():
    """The comparison above would hold for a pattern that matches nothing; the usual header is read by it."""
    with mock.patch.object(header_module, "parse_integers", side_effect=AssertionError):
        assert parse_header(encode_header(GOOD)).fed == "skin"

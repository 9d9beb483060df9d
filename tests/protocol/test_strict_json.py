"""The strict JSON parser. Source: RFC 8259 less what it leaves open; docs/security.md 2.2."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_protocol import strict_json

ints = st.integers(-(10**15) + 1, 10**16 - 1)
values = st.recursive(
    st.none() | st.booleans() | ints | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(values)
def test_plain_values_come_back_and_have_one_form(value):
    data = strict_json.dumps(value)
    assert strict_json.loads(data.decode("ascii")) == value == json.loads(data)
    assert strict_json.dumps(strict_json.loads(data.decode("ascii"))) == data


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
        strict_json.loads(text)

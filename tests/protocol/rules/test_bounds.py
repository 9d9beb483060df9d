"""Bounds of settings, for runs, tasks and bundles alike: docs/decisions/0037."""

import pytest

from edgefl_protocol.rules import bounds, defaults
from edgefl_protocol.rules.bounds import Range

TABLES = {
    "fedevprompt": (bounds.FEDEVPROMPT, defaults.FedEvPromptDefaults),
    "fedclf": (bounds.FEDCLF, defaults.FedCLFDefaults),
}


@pytest.mark.parametrize("method", TABLES)
def test_every_number_that_has_a_default_has_bounds(method: str) -> None:
    """And lies within them; a default of 0 that stands for something is allowed."""
    table, declared = TABLES[method]
    numbers = {name: value for name, value in defaults.by_name(declared).items() if type(value) in (int, float)}
    assert table.keys() == numbers.keys()
    assert all(table[name].holds(value) for name, value in numbers.items())


@pytest.mark.parametrize(
    ("bound", "text"),
    [
        (Range(least=0, most=1), "0 to 1"), (Range(least=0, most=10, above=True), "above 0, at most 10"),
        (Range(least=0, most=1, below=True), "0 to below 1"), (Range(least=1, most=65_536, whole=True), "1 to 65536"),
        (Range(least=0, most=1, below=True, zero="by itself"), "0 (by itself) to below 1"),
        (Range(least=2, most=9, whole=True, zero="by itself"), "0 (by itself), 2 to 9"),
        (Range(least=0.001, most=1000, zero="none"), "0 (none), 0.001 to 1000"),
    ],
)  # fmt: skip
def test_a_range_says_what_is_allowed(bound: Range, text: str) -> None:
    """As it ends the sentence that refuses a value."""
    assert str(bound) == text

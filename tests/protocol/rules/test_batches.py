"""How rows are cut into batches: docs/methods.md 2.3 (of two pictures, batch norm knows signs alone)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.rules.batches import batches_of, cut, in_batches


@pytest.mark.parametrize(
    ("rows", "batch", "sizes"),
    [
        (9, 4, [4, 5]), (8, 4, [4, 4]), (11, 4, [4, 7]), (5, 4, [5]), (12, 8, [8, 4]), (3, 128, [3]), (0, 4, []),
    ],
)  # fmt: skip
def test_fewer_than_four_rows_join_the_batch_before(rows: int, batch: int, sizes: list[int]) -> None:
    """By hand."""
    assert [len(part) for part in cut(np.arange(rows), batch)] == sizes


@given(rows=st.integers(0, 60), batch=st.integers(4, 20))
def test_batches_are_all_rows_in_order_and_whole_but_for_the_last(rows: int, batch: int) -> None:
    """Against the sizes that division gives: whole batches, and a rest that stands alone from four on."""
    whole, rest = divmod(rows, batch)
    sizes = [batch] * whole + [rest] * (rest > 0)
    if whole and 0 < rest < 4:
        sizes[-2:] = [batch + rest]
    parts = cut(np.arange(rows)[::-1], batch)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part.tolist()] == list(range(rows))[::-1]


def test_rows_are_taken_as_they_are_needed() -> None:
    """At most B + 4 pictures lie in memory: the first batch is out before the ninth row is asked for."""
    asked = list[int]()

    def rows():
        for row in range(20):
            asked.append(row)
            yield row

    assert next(in_batches(rows(), 4)) == [0, 1, 2, 3]
    assert len(asked) == 8


@given(rows=st.integers(0, 40), batch=st.integers(1, 12))
def test_a_plain_cut_leaves_what_is_over_by_itself(rows: int, batch: int) -> None:
    """Every row once, in order; all batches full but the last."""
    parts = batches_of(np.arange(rows), batch)
    assert [row for part in parts for row in part.tolist()] == list(range(rows))
    assert [len(part) for part in parts] == [batch] * (rows // batch) + ([rows % batch] if rows % batch else [])

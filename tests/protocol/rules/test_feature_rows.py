"""Features as they travel: FedCLF (arXiv 2208.11278) section III; docs/methods.md 2, feature exchange."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_protocol.rules.feature_rows import (
    are_features,
    check_bank,
    first_order,
    have_unit_length,
    made_in_round,
    order_by_content,
    received,
    sent,
    unit,
)

GOOD = unit(np.random.default_rng(7).normal(size=(4, 128))).astype(np.float16)


@pytest.mark.parametrize(("pictures", "epochs", "made"), [(3, 1, 3), (3, 2, 6), (10, 1, 10), (11, 1, 10), (9, 9, 10)])
def test_a_reply_holds_what_its_round_made(pictures: int, epochs: int, made: int) -> None:
    """FedCLF III-A: of ten rows, the newest; a picture gives one in every epoch."""
    bank = np.arange(10)[:, None].repeat(128, axis=1)
    np.testing.assert_array_equal(made_in_round(bank, pictures, epochs)[:, 0], np.arange(10)[10 - made :])


@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-6, 1e6))
def test_rows_come_to_length_one(seed: int, scale: float) -> None:
    """Against Python's own square root of a sum of squares; in float16 within what travels."""
    rows = np.random.default_rng(seed).normal(size=(6, 128)) * scale
    found = unit(rows)
    assert found.dtype == np.float32
    for row, value in zip(rows.tolist(), found, strict=True):
        length = math.sqrt(math.fsum(x * x for x in row))
        np.testing.assert_allclose(value, np.array(row) / length, rtol=1e-5)
    halved = found.astype(np.float16)
    assert have_unit_length(halved)
    assert np.abs(np.linalg.norm(halved.astype(np.float64), axis=1) - 1).max() < 0.0005
    check_bank(halved, 6)


def test_a_row_of_zeros_stays_one() -> None:
    """It has no direction; it never becomes a NaN."""
    assert not unit(np.zeros((2, 128))).any()


@pytest.mark.parametrize("wrong", [np.zeros((0, 128)), np.zeros((3, 64)), np.zeros((3, 128), np.int8), np.zeros(128)])
def test_what_is_no_table_of_128_numbers_is_no_features(wrong: np.ndarray) -> None:
    """The width, the axes, the type and at least one row."""
    assert are_features(GOOD) and are_features(np.ones((1, 128))) and not are_features(wrong)


def test_what_leaves_is_half_precision_and_arrives_as_it_left() -> None:
    """docs/methods.md 2, feature exchange: `features` of a reply, `remote` of a broadcast."""
    rows = unit(np.random.default_rng(3).normal(size=(50, 128)))
    (name, halved) = next(iter(sent(rows).items()))
    assert (name, halved.dtype) == ("features", np.float16)
    np.testing.assert_array_equal(received({"remote": halved, "head.bias": np.ones(2)}), halved)
    assert np.abs(unit(halved) @ unit(halved).T - rows @ rows.T).max() < 1e-3  # of a similarity


@pytest.mark.parametrize(
    "wrong", [np.zeros((0, 128), np.float16), np.zeros((3, 64), np.float16), np.zeros((3, 128), np.int8)]
)
def test_nobody_else_is_no_array_and_what_is_no_features_is_refused(wrong: np.ndarray) -> None:
    """A site that is alone receives none; the text ends the sentence that each side begins."""
    assert received({"head.bias": np.ones(2)}) is None
    with pytest.raises(ValueError, match=rf"^are of type {wrong.dtype} and shape "):
        received({"remote": wrong})


def test_every_picture_may_be_the_first_of_a_bank() -> None:
    """All positions once; each of ten comes first in a tenth of 2,000 draws, five standard deviations allowed."""
    rng = np.random.default_rng(0)
    orders = [first_order(rng, 10) for _ in range(2000)]
    assert all(sorted(order.tolist()) == list(range(10)) for order in orders)
    firsts = np.bincount([order[0] for order in orders], minlength=10)
    assert np.abs(firsts - 200).max() < 5 * math.sqrt(2000 * 0.1 * 0.9)


@pytest.mark.parametrize(("length", "holds"), [(1.0, True), (1.009, True), (0.991, True), (1.011, False), (0.0, False)])
def test_a_length_may_be_off_by_a_hundredth(length: float, holds: bool) -> None:
    """docs/methods.md 2, feature exchange."""
    rows = np.zeros((2, 128))
    rows[0, 0], rows[1, 5] = 1.0, length
    assert have_unit_length(rows) == holds


@pytest.mark.parametrize("worse", [np.nan, np.inf])
def test_what_is_not_finite_has_no_length(worse: float) -> None:
    """A comparison with NaN is false, so it must not be the one that refuses."""
    rows = GOOD.copy()
    rows[2, 3] = worse
    assert not have_unit_length(rows)
    with pytest.raises(ValueError, match=r"^a feature that is not finite$"):
        check_bank(rows, 10)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (GOOD.astype(np.float32), r"type float32 and shape \(4, 128\); they must be float16 \(n, 128\)"),
        (GOOD[:, :64].copy(), r"type float16 and shape \(4, 64\)"),
        (GOOD[0].copy(), r"shape \(128,\)"),
        (GOOD[:0], "^0 features; allowed: 1 to 4"),
        (np.concatenate([GOOD, GOOD]), "^8 features; allowed: 1 to 4"),
        (GOOD * np.float16(3), "^a feature of length 3; features have length 1"),
        (np.concatenate([GOOD[:3], 0 * GOOD[:1]]), "^a feature of length 0;"),
    ],
)
def test_what_is_no_bank_is_refused_in_a_clause(rows: np.ndarray, sentence: str) -> None:
    """docs/methods.md 2, feature exchange: float16, 1 to K rows of length 1."""
    check_bank(GOOD, 4)
    with pytest.raises(ValueError, match=sentence):
        check_bank(rows, 4)


def test_the_order_is_a_function_of_the_set() -> None:
    """However rows came, they end in one order, which is not the one of their values."""
    rows = unit(np.random.default_rng(1).normal(size=(40, 128))).astype(np.float16)
    shuffled = rows[np.random.default_rng(2).permutation(40)]
    once, again = rows[order_by_content(rows)], shuffled[order_by_content(shuffled)]
    np.testing.assert_array_equal(once, again)
    assert sorted(order_by_content(rows).tolist()) == list(range(40))
    by_value = rows[np.argsort(rows[:, 0])]
    assert (once != by_value).any() and (once != rows).any()

"""The threshold of suspicious classes against scikit-learn's ROC curve. Source: docs/methods.md 1.8."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_curve

from edgefl_trainer.evaluate.calibration import choose_suspicion

FLAGS = np.array([True, False, True, False])


def drawn(rows: int, seed: int, classes: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of probabilities that know a little, the predicted class, and the true one."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes, rows)
    logits = rng.normal(0, 1, (rows, classes)) + 1.2 * np.eye(classes)[targets]
    probabilities = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).astype(np.float32)
    return probabilities, probabilities.argmax(1), targets


def oracle(probabilities: np.ndarray, predicted: np.ndarray, targets: np.ndarray) -> tuple[float, float, float]:
    """The first point of the curve with 95 %, less a thousandth, at most a third, and what it refers.

    A predicted one goes first.
    """
    mark = np.where(FLAGS[predicted], 1.0, probabilities[:, FLAGS].sum(1, dtype=np.float64))
    _, true, level = roc_curve(FLAGS[targets], mark, drop_intermediate=False)
    threshold = min(0.999 * float(level[int(np.argmax(true >= 0.95 - 1e-12))]), 1 / 3)
    referred = mark >= threshold
    return threshold, float(referred[FLAGS[targets]].mean()), float(1 - referred[~FLAGS[targets]].mean())


@settings(max_examples=40)
@given(st.integers(60, 300), st.integers(0, 10_000))
def test_the_threshold_is_that_of_the_roc_curve(rows: int, seed: int) -> None:
    case = drawn(rows, seed)
    if FLAGS[case[2]].sum() < 20:
        return
    found = choose_suspicion(*case, FLAGS)
    threshold, sensitivity, specificity = oracle(*case)
    assert found.threshold == pytest.approx(threshold, abs=1e-12)
    assert found.sensitivity == pytest.approx(sensitivity, abs=1e-12) and sensitivity >= 0.95
    assert found.specificity == pytest.approx(specificity, abs=1e-12)
    assert (found.suspicious, found.benign) == (FLAGS[case[2]].sum(), (~FLAGS[case[2]]).sum())
    assert (
        f"of {found.suspicious} pictures (sensitivity" in found.statement
        and f"{found.threshold:.1%}" in found.statement
    )


@settings(max_examples=40)
@given(st.integers(60, 300), st.integers(0, 10_000))
def test_a_device_that_rounds_otherwise_reaches_the_same_sensitivity(rows: int, seed: int) -> None:
    """The threshold lies at a row: a device whose sums differ in their last digits must refer that row, too."""
    probabilities, predicted, targets = drawn(rows, seed)
    ill = FLAGS[targets]
    if ill.sum() < 20:
        return
    found = choose_suspicion(probabilities, predicted, targets, FLAGS)
    noise = np.random.default_rng(seed).uniform(-1e-5, 1e-5, rows)
    together = probabilities[:, FLAGS].sum(1, dtype=np.float64) * (1 + noise)
    referred = FLAGS[predicted] | (together >= found.threshold)
    assert referred[ill].mean() >= 0.95


def test_a_model_that_names_them_all_still_asks_at_a_third() -> None:
    """Every suspicious row is named, so naming alone reaches 95 %; near ties must ask all the same."""
    probabilities = np.tile(np.array([[0.9, 0.05, 0.03, 0.02]], np.float32), (40, 1))
    found = choose_suspicion(probabilities, np.zeros(40, np.int64), np.zeros(40, np.int64), FLAGS)
    assert found.threshold == pytest.approx(1 / 3)
    assert "33.3% or more together" in found.statement


@pytest.mark.parametrize(("ill", "chosen"), [(0, False), (1, False), (19, False), (20, True)])
def test_too_few_suspicious_rows_choose_no_threshold(ill: int, chosen: bool) -> None:
    """The default threshold is in force then, of which the figures are, and the card warns."""
    probabilities, predicted, _ = drawn(100, 3)
    targets = np.where(np.arange(100) < ill, 0, 1)
    found = choose_suspicion(probabilities, predicted, targets, FLAGS)
    assert (found.threshold is not None) is chosen
    assert found.statement.startswith("WARNING: no threshold was chosen") is not chosen
    if not chosen:
        referred = FLAGS[predicted] | (probabilities[:, FLAGS].sum(1) >= 0.10)
        assert found.sensitivity == (referred[:ill].mean() if ill else None)
        assert found.specificity == pytest.approx(1 - referred[ill:].mean())
        assert "by default, where such classes have 10% or more together" in found.statement


def test_rows_without_a_prediction_are_referred_by_their_sum_alone() -> None:
    """−1 stands for no prediction, and is no index of a class."""
    probabilities = np.tile(np.array([[0.1, 0.2, 0.1, 0.6]], np.float32), (30, 1))
    predicted, targets = np.full(30, -1), np.repeat([0, 1], [20, 10])
    found = choose_suspicion(probabilities, predicted, targets, np.array([True, False, False, True]))
    assert (found.sensitivity, found.specificity) == (1.0, 0.0)
    assert found.threshold == pytest.approx(1 / 3)


@pytest.mark.parametrize(("flags", "words"), [([True] * 4, "No class"), ([False] * 4, "Every class")])
def test_models_with_one_kind_of_class_say_so(flags: list[bool], words: str) -> None:
    assert choose_suspicion(*drawn(80, 1), np.array(flags)).statement.startswith(words)


def test_the_statement_says_of_what_a_count_is() -> None:
    """ "0 of 8 of classes" could not be read: of pictures, and the rule in force asks at none of them."""
    probabilities = np.tile(np.array([[0.01, 0.97, 0.01, 0.01]], np.float32), (28, 1))
    targets = np.repeat([0, 1], [8, 20])
    said = choose_suspicion(
        probabilities, np.ones(28, np.int64), targets, np.array([True, False, False, True])
    ).statement
    assert "at 0 of 8 pictures (sensitivity 0.0%) of classes that are not known to be benign" in said
    assert "for none at 20 of 20 pictures (specificity 100.0%) of benign classes" in said


def test_no_rows_at_all() -> None:
    none = np.zeros(0, np.int64)
    found = choose_suspicion(np.zeros((0, 4), np.float32), none, none, FLAGS)
    assert (found.threshold, found.sensitivity, found.specificity, found.suspicious, found.benign) == (None,) * 3 + (
        0,
        0,
    )

"""docs/methods.md, "evaluation": every figure against a plain numpy oracle, hand-made cases and properties."""

import json
import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.evaluate.metrics import (
    METRIC_NAMES,
    area_under_risk_coverage,
    brier_score,
    entropy_nats,
    expected_calibration_error,
    federation_summary,
    out_of_distribution_auroc,
    shares_of_right,
    site_metrics,
)


def draw(seed, rows=60, classes=4, abstain=False):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(classes, 0.7), rows)
    target = rng.integers(0, classes, rows)
    predicted = probabilities.argmax(axis=1)
    if abstain:
        predicted[rng.random(rows) < 0.2] = -1
    return probabilities, target, predicted, rng.random(rows)


def oracle(probabilities, target, predicted, uncertainty, answers=None):
    """Every figure from its textbook sentence, one class and one row at a time."""
    recall, precision, f1, specificity, area = [], [], [], [], []
    for k in sorted(set(target.tolist())):
        tp = sum((target == k) & (predicted == k))
        fp = sum((target != k) & (predicted == k))
        fn = sum((target == k) & (predicted != k))
        tn = len(target) - tp - fp - fn
        recall.append(tp / (tp + fn))
        precision.append(tp / (tp + fp) if tp + fp else 0.0)
        f1.append(2 * tp / (2 * tp + fp + fn))
        if tn + fp:
            specificity.append(tn / (tn + fp))
            inside, outside = probabilities[target == k, k], probabilities[target != k, k]
            wins = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)  # Mann-Whitney
            area.append(wins.mean())
    top, right = probabilities.max(axis=1), predicted == target
    ece = 0.0
    for i in range(15):
        inside = (top > i / 15) & (top <= (i + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - top[inside].mean())
    order = np.argsort(uncertainty)
    risks = [np.mean(~right[order[: i + 1]]) for i in range(len(target))]
    brier = np.mean(
        [sum((p[j] - (j == t)) ** 2 for j in range(len(p))) for p, t in zip(probabilities, target, strict=True)]
    )
    likeliest = probabilities.argmax(axis=1)
    opened = {} if answers is not None else oracle(probabilities, target, likeliest, uncertainty, answers=likeliest)
    return {
        "n_test": len(target),
        "balanced_accuracy": np.mean(recall),
        "macro_precision": np.mean(precision),
        "macro_recall": np.mean(recall),
        "macro_f1": np.mean(f1),
        "specificity": np.mean(specificity) if specificity else None,
        "auroc": np.mean(area) if area else None,
        "accuracy": right.mean(),
        "ece": ece,
        "brier": brier,
        "aurc": np.mean(risks),
        "open_accuracy": np.mean([p.argmax() == t for p, t in zip(probabilities, target, strict=True)]),
        "open_balanced_accuracy": np.mean(
            [np.mean(probabilities[target == k].argmax(axis=1) == k) for k in sorted(set(target.tolist()))]
        ),
        **{f"open_{name}": opened[name] for name in ("macro_precision", "macro_f1", "specificity") if opened},
    }


@pytest.mark.parametrize("abstain", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_figure_equals_the_oracle(seed, classes, abstain):
    probabilities, target, predicted, vacuity = draw(seed, classes=classes, abstain=abstain)
    found = site_metrics(probabilities, target, predicted=predicted, vacuity=vacuity)
    assert found == pytest.approx(oracle(probabilities, target, predicted, vacuity), abs=1e-12)
    right = shares_of_right(probabilities, target, predicted)
    assert right == {name: found[name] for name in ("balanced_accuracy", "accuracy", "open_accuracy")}


def test_a_class_without_test_rows_is_left_out_of_every_mean():
    """FLamby metric.py: MSK has rows of three of eight classes; the mean runs over three."""
    target = np.array([0, 0, 1, 1, 4])
    predicted = np.array([0, 1, 1, 7, 4])  # 7 has no test row: a wrong answer, but no class of its own in the mean
    probabilities = np.full((5, 8), 0.05)
    probabilities[np.arange(5), predicted] = 0.65
    found = site_metrics(probabilities, target, predicted=predicted)
    assert found["balanced_accuracy"] == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    assert found["macro_precision"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    assert found["specificity"] == pytest.approx((1 + 2 / 3 + 1) / 3)


def test_a_class_never_predicted_has_precision_zero_without_a_warning():
    """docs/methods.md, "evaluation": the precision of a class that is never predicted counts 0."""
    target, predicted = np.array([0, 0, 0, 1]), np.zeros(4, dtype=np.int64)
    found = site_metrics(np.tile([0.8, 0.2], (4, 1)), target, predicted=predicted)
    assert found["macro_precision"] == pytest.approx((3 / 4 + 0) / 2)
    assert found["macro_f1"] == pytest.approx((6 / 7 + 0) / 2)
    assert found["balanced_accuracy"] == 0.5
    assert found["specificity"] == 0.5
    assert found["auroc"] == 0.5  # constant scores: all ties
    assert found["ece"] == pytest.approx(abs(0.75 - 0.8))


def test_undefined_figures_are_none_and_survive_json():
    """One class only: no ROC curve and no specificity exist."""
    found = site_metrics(np.array([[0.9, 0.1]]), np.array([0]), predicted=np.array([0]))
    assert found["auroc"] is None
    assert found["specificity"] is None
    assert found["balanced_accuracy"] == 1.0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_zero_rows_give_none_everywhere():
    empty = np.zeros(0, dtype=np.int64)
    found = site_metrics(np.zeros((0, 3)), empty, predicted=empty, vacuity=np.zeros(0))
    assert found == {"n_test": 0} | dict.fromkeys(METRIC_NAMES)


def test_an_abstention_is_wrong_but_no_false_alarm():
    """The module's text: -1 lowers recall and accuracy, not precision or specificity."""
    target = np.array([0, 0, 1, 1])
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.1, 0.9], [0.2, 0.8]])
    found = site_metrics(probabilities, target, predicted=np.array([0, -1, 1, 1]))
    assert (found["balanced_accuracy"], found["accuracy"]) == (0.75, 0.75)
    assert (found["macro_precision"], found["specificity"]) == (1.0, 1.0)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)


def test_open_figures_let_a_model_name_what_its_site_has_never_seen():
    """What is shown names classes 0 and 1 only; papers judge the argmax over all three."""
    probabilities = np.array([[0.3, 0.2, 0.5], [0.1, 0.8, 0.1], [0.5, 0.4, 0.1]])
    target, shown = np.array([0, 1, 0]), np.array([0, 1, -1])  # the last one abstained
    found = site_metrics(probabilities, target, predicted=shown)
    assert (found["accuracy"], found["balanced_accuracy"]) == (pytest.approx(2 / 3), 0.75)
    assert (found["open_accuracy"], found["open_balanced_accuracy"]) == (pytest.approx(2 / 3), 0.75)
    sure = site_metrics(probabilities, target, predicted=np.array([0, 1, 0]))
    assert (sure["accuracy"], sure["open_accuracy"]) == (1.0, pytest.approx(2 / 3))


def test_a_site_whose_head_is_dead_has_half_of_two_classes_right_where_answers_are_forced():
    """FedEvPrompt's Table 1 prints 50.00 for such sites: W of counts (2977, 186) names the rarer class for all."""
    probabilities = np.tile([0.059, 0.941], (8, 1))
    target = np.array([0] * 6 + [1] * 2)
    found = site_metrics(probabilities, target, predicted=np.full(8, -1))
    assert (found["balanced_accuracy"], found["open_balanced_accuracy"]) == (0.0, 0.5)


def test_present_restricts_the_mean():
    probabilities, target, predicted, _ = draw(3, classes=3)
    only = site_metrics(probabilities, target, predicted=predicted, present=np.array([False, True, False]))
    assert only["balanced_accuracy"] == pytest.approx(np.mean(predicted[target == 1] == 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": np.array([0, 2])}, "allowed: 0 to 1"),
        ({"target": np.array([0])}, "have 2 rows|Type-check error"),  # the second where shapes are checked
        ({"predicted": np.array([0, -2])}, "allowed: -1 to 1"),
        ({"vacuity": np.array([0.1, np.nan])}, "not finite"),
        ({"probabilities": np.array([[0.5, 0.5], [np.nan, 0.5]])}, "not finite"),
        ({"probabilities": np.ones((2, 1))}, "at least 2 classes"),
    ],
)
def test_bad_input_is_named(change, message):
    good = {
        "probabilities": np.full((2, 2), 0.5),
        "target": np.array([0, 1]),
        "predicted": np.array([0, 1]),
        "vacuity": np.array([0.1, 0.2]),
    }
    case = good | change
    with pytest.raises((ValueError, TypeError), match=message):
        site_metrics(case.pop("probabilities"), case.pop("target"), **case)


def test_brier_of_a_uniform_answer_is_one_minus_one_over_k():
    """Closed form: (1 − 1/K)² + (K − 1)/K² = 1 − 1/K; certain and wrong gives 2, certain and right 0."""
    for classes in (2, 5, 8):
        assert brier_score(np.full((3, classes), 1 / classes), np.zeros(3, dtype=int)) == pytest.approx(1 - 1 / classes)
    assert brier_score(np.array([[0.0, 1.0]]), np.array([0])) == 2.0
    assert brier_score(np.array([[0.0, 1.0]]), np.array([1])) == 0.0


def test_ece_of_calibrated_and_of_overconfident_answers():
    """Guo et al. 2017: confidence 0.8 and right in 80 of 100 gives 0; always certain gives the error rate."""
    right = np.arange(100) < 80
    assert expected_calibration_error(np.full(100, 0.8), right) == pytest.approx(0.0, abs=1e-12)
    assert expected_calibration_error(np.ones(100), right) == pytest.approx(0.2)


def test_ece_bins_are_closed_on_the_right():
    """0.6 = 9/15 belongs to bin 9, (8/15, 9/15], together with 0.55 and apart from 0.61."""
    same = expected_calibration_error(np.array([0.6, 0.55]), np.array([True, False]))
    apart = expected_calibration_error(np.array([0.6, 0.61]), np.array([True, False]))
    assert same == pytest.approx(abs(0.4 - 0.55) / 2)
    assert apart == pytest.approx((0.4 + 0.61) / 2)


@pytest.mark.parametrize(("rows", "wrong"), [(10, 3), (25, 1), (7, 7), (5, 0)])
def test_aurc_of_a_perfect_order_has_its_closed_form(rows, wrong):
    """Errors last: (1/n)·Σ_{j=1..e} j/(n − e + j); without errors 0; constant uncertainty gives the error rate."""
    correct = np.arange(rows) < rows - wrong
    closed = sum(j / (rows - wrong + j) for j in range(1, wrong + 1)) / rows
    assert area_under_risk_coverage(np.arange(rows) / rows, correct) == pytest.approx(closed)
    assert area_under_risk_coverage(np.full(rows, 0.3), correct) == pytest.approx(wrong / rows)


def test_aurc_of_ties_is_the_mean_over_all_their_orders():
    """Rows 2 to 4 share one uncertainty: the mean over their six orders, by brute force."""
    correct, uncertainty = np.array([True, False, True, False, True]), np.array([0.1, 0.5, 0.5, 0.5, 0.9])
    areas = []
    for middle in permutations([1, 2, 3]):
        order = [0, *middle, 4]
        areas.append(np.mean([np.mean(~correct[order[: i + 1]]) for i in range(5)]))
    assert area_under_risk_coverage(uncertainty, correct) == pytest.approx(np.mean(areas))


def test_softmax_methods_are_ordered_by_entropy():
    probabilities, target, predicted, _ = draw(11)
    entropy = [-sum(p * math.log(p) for p in row) for row in probabilities]
    assert entropy_nats(probabilities) == pytest.approx(entropy)
    assert entropy_nats(np.array([[1.0, 0.0]])).tolist() == [0.0]
    found = site_metrics(probabilities, target, predicted=predicted)
    assert found["aurc"] == pytest.approx(oracle(probabilities, target, predicted, np.array(entropy))["aurc"])


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 40), classes=st.integers(2, 6), abstain=st.booleans())
@settings(max_examples=60)
def test_ranges_and_independence_of_the_order_of_rows(seed, rows, classes, abstain):
    probabilities, target, predicted, vacuity = draw(seed, rows, classes, abstain)
    vacuity = vacuity.round(1)  # ties
    found = site_metrics(probabilities, target, predicted=predicted, vacuity=vacuity)
    for name in METRIC_NAMES:
        high = 2.0 if name == "brier" else 1.0
        assert found[name] is None or -1e-12 <= found[name] <= high + 1e-12, name
    order = np.random.default_rng(seed + 1).permutation(rows)
    again = site_metrics(probabilities[order], target[order], predicted=predicted[order], vacuity=vacuity[order])
    assert again == pytest.approx(found, abs=1e-9)


@given(seed=st.integers(0, 10_000), classes=st.integers(2, 5))
@settings(max_examples=30)
def test_renaming_the_classes_changes_no_figure(seed, classes):
    probabilities, target, predicted, vacuity = draw(seed, 50, classes)
    name = np.random.default_rng(seed).permutation(classes)
    renamed = np.empty_like(probabilities)
    renamed[:, name] = probabilities
    found = site_metrics(probabilities, target, predicted=predicted, vacuity=vacuity)
    assert site_metrics(renamed, name[target], predicted=name[predicted], vacuity=vacuity) == pytest.approx(found)


def test_federation_summary_against_numpy():
    """docs/methods.md, "evaluation": sites count equally, ddof=1, linear percentile; a site without rows is counted."""
    figures = {"b": 0.5, "a": 0.9, "d": 0.7, "c": 0.6}
    sites = {name: {"balanced_accuracy": value} for name, value in figures.items()} | {"e": {"balanced_accuracy": None}}
    values = list(figures.values())
    assert federation_summary(sites) == pytest.approx(
        {
            "mean_balanced_accuracy": 0.675,
            "std_balanced_accuracy": math.sqrt(sum((v - 0.675) ** 2 for v in values) / 3),
            "worst_balanced_accuracy": 0.5,
            "p5_balanced_accuracy": 0.5 + 0.15 * 0.1,  # position 0.05·3 between the two lowest
            "p10_balanced_accuracy": 0.5 + 0.30 * 0.1,
            "p15_balanced_accuracy": 0.5 + 0.45 * 0.1,
            "sites_without_figures": 1,
        }
    )


@given(
    inside=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), max_size=12),
    outside=st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), max_size=12),
)
def test_foreign_pictures_are_told_apart_by_pairs(inside, outside):
    """Mann and Whitney: the share of (own, foreign) pairs in which the foreign one is less certain, ties half."""
    pairs = [(b > a) + 0.5 * (b == a) for a in inside for b in outside]
    found = out_of_distribution_auroc(np.array(inside), np.array(outside))
    assert found == (pytest.approx(np.mean(pairs)) if pairs else None)


def test_federation_summary_of_one_and_of_no_site():
    one = federation_summary({"a": {"balanced_accuracy": 0.5}})
    assert (one["mean_balanced_accuracy"], one["std_balanced_accuracy"]) == (0.5, None)
    assert federation_summary({})["mean_balanced_accuracy"] is None

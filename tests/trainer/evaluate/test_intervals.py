"""docs/methods.md, "evaluation": intervals by lesion, against `site_metrics`, scipy, and what clusters mean."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap
from sklearn.metrics import recall_score

from edgefl_trainer.evaluate.intervals import (
    FEW_LESIONS,
    Scored,
    _recalls,
    interval,
    lesion_weights,
    pooled,
    recall_intervals,
    resample,
    share_bounds,
    weighted_figures,
)
from edgefl_trainer.evaluate.metrics import METRIC_NAMES, site_metrics
from edgefl_trainer.evaluate.site_figures import figures_of_sites, thin_sites


def draw(seed, rows=60, classes=3, lesions=None, ties=False, softmax=False) -> Scored:
    """Scores that are right somewhat more often than chance; a few rows abstain."""
    rng = np.random.default_rng(seed)
    target = rng.integers(0, classes, rows)
    probabilities = rng.dirichlet(np.full(classes, 0.7), rows)
    probabilities[np.arange(rows), target] += 0.4
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    predicted = probabilities.argmax(axis=1)
    predicted[rng.random(rows) < 0.05] = -1
    vacuity = np.round(rng.random(rows), 1 if ties else 9)
    if ties:
        probabilities = np.full((rows, classes), 1 / classes)
    number = np.arange(rows) if lesions is None else rng.integers(0, lesions, rows)
    return Scored(probabilities, target, predicted, None if softmax else vacuity, tuple(f"L{i}" for i in number))


@settings(max_examples=75)
@given(
    seed=st.integers(0, 10_000), rows=st.integers(1, 25), classes=st.integers(2, 4), ties=st.booleans(),
    softmax=st.booleans(),
)  # fmt: skip
def test_a_weight_is_a_repeated_row(seed, rows, classes, ties, softmax):
    """The oracle: every figure of the rows written out as often as their weights say, by scikit-learn."""
    scored = draw(seed, rows, classes, ties=ties, softmax=softmax)
    weights = np.random.default_rng(seed).integers(0, 4, (3, rows))
    weights[:, 0] += 1  # no draw is empty
    found = weighted_figures(scored, weights.astype(float))
    for r in range(3):
        part = scored.take(np.repeat(np.arange(rows), weights[r]))
        plain = site_metrics(part.probabilities, part.target, predicted=part.predicted, vacuity=part.vacuity)
        for name in METRIC_NAMES:
            expected = np.nan if plain[name] is None else plain[name]
            np.testing.assert_allclose(found[name][r], expected, atol=1e-9, err_msg=name)


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 25), classes=st.integers(2, 4))
def test_recalls_of_a_draw_are_scikit_learns(seed, rows, classes):
    scored = draw(seed, rows, classes)
    weights = np.random.default_rng(seed).integers(0, 4, (3, rows)).astype(float)
    weights[:, 0] += 1  # no draw is empty
    found = _recalls(scored.target, scored.predicted, weights, classes)
    for r in range(3):
        drawn = {int(k) for k in scored.target[weights[r] > 0]}
        every = list(range(classes))
        plain = recall_score(
            scored.target, scored.predicted, labels=every, average=None, sample_weight=weights[r], zero_division=0
        )
        np.testing.assert_allclose(found[r], [plain[k] if k in drawn else np.nan for k in every], atol=1e-12)


def test_the_interval_of_a_recall_is_scipys_percentile_bootstrap():
    """With a lesion for each picture; scipy's draws are of the class's rows alone, and others."""
    scored = draw(1, rows=300)
    for k, bounds in enumerate(recall_intervals(scored, 4000)):
        right = (scored.predicted == k)[scored.target == k].astype(float)
        expected = bootstrap((right,), np.mean, n_resamples=4000, method="percentile", rng=2).confidence_interval
        np.testing.assert_allclose(bounds, list(expected), atol=0.025)


def test_copies_of_a_lesions_pictures_narrow_no_recall():
    single = draw(3, rows=60)
    copied = single.take(np.repeat(np.arange(60), 5))
    for one, many in zip(recall_intervals(single), recall_intervals(copied), strict=True):
        np.testing.assert_allclose(many, one, atol=1e-9)


def test_no_interval_is_claimed_that_the_rows_cannot_carry():
    """Too few lesions of a class, however many pictures; a class of which all is right, or all wrong, or nothing."""

    def of(lesions, rows, right):
        """Class 0 as asked, beside forty lesions of class 1 that are right half the time; nothing of class 2."""
        target = np.r_[np.zeros(rows, int), np.ones(40, int)]
        predicted = np.r_[np.where(np.arange(rows) < right, 0, 1), np.arange(40) % 2]
        names = [f"a{i % lesions}" for i in range(rows)] + [f"b{i}" for i in range(40)]
        return recall_intervals(Scored(np.full((rows + 40, 3), 1 / 3), target, predicted, None, tuple(names)))

    assert of(FEW_LESIONS - 1, 90, 45)[0] is None and of(FEW_LESIONS, 90, 45)[0] is not None
    assert of(30, 30, 30)[0] is None and of(30, 30, 0)[0] is None
    low, high = of(30, 30, 29)[0]
    assert low < 29 / 30 <= high
    assert of(30, 30, 15)[1] is not None and of(30, 30, 15)[2] is None


def test_many_classes_need_little_memory():
    """iNaturalist has 1,203 classes and DomainNet 345: rows times classes, never classes to the fourth power."""
    scored, weights = draw(0, rows=100, classes=200), np.ones((4, 100))
    tracemalloc.start()
    found = weighted_figures(scored, weights)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6
    plain = site_metrics(scored.probabilities, scored.target, predicted=scored.predicted, vacuity=scored.vacuity)
    for name in METRIC_NAMES:
        np.testing.assert_allclose(found[name], plain[name], atol=1e-9, err_msg=name)


def test_with_a_lesion_for_each_picture_it_is_scipys_percentile_bootstrap():
    """Efron and Tibshirani 1993; scipy's draws are others, so the bounds agree to the noise of the draws."""
    scored = draw(1, rows=200)
    correct = (scored.predicted == scored.target).astype(float)
    expected = bootstrap((correct,), np.mean, n_resamples=4000, method="percentile", rng=2).confidence_interval
    np.testing.assert_allclose(interval(resample(scored, 4000)["accuracy"]), list(expected), atol=0.012)


@pytest.mark.parametrize(("lesions", "right"), [(2, 0), (7, 7), (40, 0), (313, 313)])
def test_where_all_draws_are_alike_a_share_has_the_exact_interval_of_its_lesions(lesions, right):
    """Clopper and Pearson 1934, by scipy: all rows wrong, or all right, three pictures of each lesion."""
    correct = np.full(3 * lesions, right > 0)
    target = np.arange(correct.size) % 2
    names = tuple(str(i % lesions) for i in range(correct.size))
    rows = Scored(np.full((correct.size, 2), 0.5), target, np.where(correct, target, 1 - target), None, names)
    expected = binomtest(right, lesions).proportion_ci(0.95, method="exact")
    found = figures_of_sites({"a": rows}, {"a": {}})
    for figures in (found["sites"]["a"], found["pooled"]):
        assert figures["accuracy_interval"] == pytest.approx([expected.low, expected.high])
    assert found["sites"]["a"]["balanced_accuracy_interval"] == [right / lesions] * 2  # no share of rows


def test_an_exact_interval() -> None:
    """Clopper and Pearson 1934: 10 of 100 lies in 4.9 % to 17.6 %; none and all have one open end."""
    assert share_bounds(10, 100) == pytest.approx((0.0490, 0.1762), abs=1e-4)
    assert share_bounds(0, 30) == (0.0, pytest.approx(1 - 0.025 ** (1 / 30)))
    assert share_bounds(30, 30) == (pytest.approx(0.025 ** (1 / 30)), 1.0)


def test_lesions_that_are_all_half_right_are_no_certainty():
    """Each of twelve lesions has one of its two pictures right, and so has every draw."""
    target = np.arange(24) % 2
    rows = Scored(np.full((24, 2), 0.5), target, np.zeros(24, int), None, tuple(str(i // 2) for i in range(24)))
    expected = binomtest(6, 12).proportion_ci(0.95, method="exact")
    found = figures_of_sites({"a": rows}, {"a": {}})["sites"]["a"]
    assert found["accuracy_interval"] == pytest.approx([expected.low, expected.high])


def test_the_interval_of_no_right_answer_covers_however_alike_a_lesions_answers_are():
    """If the share were above the upper end, fewer than 1 in 40 sites of 15 lesions would be all wrong."""
    upper = 1 - 0.025 ** (1 / 15)
    rng = np.random.default_rng(0)
    for spread in (0.01, 1.0, 100.0):  # beta-binomial lesions of four pictures: all alike … independent
        shares = rng.beta(spread * upper, spread * (1 - upper), (4000, 15))
        none_right = (rng.binomial(4, shares) == 0).all(axis=1).mean()
        assert none_right < 0.025 + 3 * (0.025 * 0.975 / 4000) ** 0.5, spread


def test_pictures_of_one_lesion_are_not_more_lesions():
    """Five copies of every picture in its own lesion: no interval gets any narrower, as it would picture by picture."""
    single = draw(3, rows=40)
    copied = single.take(np.repeat(np.arange(40), 5))
    apart = Scored(copied.probabilities, copied.target, copied.predicted, copied.vacuity, tuple(map(str, range(200))))
    one, many, wrong = (resample(scored) for scored in (single, copied, apart))
    for name in ("balanced_accuracy", "auroc", "ece", "brier", "specificity"):
        np.testing.assert_allclose(interval(many[name]), interval(one[name]), atol=1e-9)
        low, high = interval(wrong[name])
        assert high - low < 0.65 * np.diff(interval(one[name]))[0]  # 1/sqrt(5) = 0.45


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """200 sites of 60 lesions with 1 to 3 pictures, three answers in four right: 95 % of intervals hold 0.75."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(200):
        views = rng.integers(1, 4, 60)
        right = np.repeat(rng.random(60) < 0.75, views)  # pictures of a lesion are right or wrong together
        target = np.arange(right.size) % 2
        predicted = np.where(right, target, 1 - target)
        lesions = tuple(np.repeat(np.arange(60), views).astype(str))
        scored = Scored(np.eye(2)[predicted] * 0.8 + 0.1, target, predicted, None, lesions)
        low, high = interval(resample(scored, 300)["accuracy"])
        held += low <= 0.75 <= high
    assert 0.88 <= held / 200 <= 0.99  # percentile intervals of 60 clusters lie a little below 0.95


def test_order_of_rows_changes_nothing():
    scored = draw(5, rows=80, lesions=30)
    shuffled = scored.take(np.random.default_rng(1).permutation(80))
    first, second = resample(scored, 200), resample(shuffled, 200)
    for name in METRIC_NAMES:
        np.testing.assert_allclose(first[name], second[name], atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 30])
def test_pairs_and_the_order_give_the_same_bits(classes, monkeypatch):
    """Classes of few rows are counted pair by pair, others along the order; some scores are equal."""
    scored = draw(7, rows=120, classes=classes, lesions=60)
    scored = dataclasses.replace(scored, probabilities=scored.probabilities.round(2))
    found = []
    for most in (0, 120):
        monkeypatch.setattr("edgefl_trainer.evaluate.intervals.PAIRED_ROWS", most)
        found.append(resample(scored, 50)["auroc"])
    assert np.isfinite(found[0]).all() and np.array_equal(*found)


def test_blocks_of_draws_are_one_stream(monkeypatch):
    scored = draw(6, rows=50, lesions=20)
    whole = resample(scored, 100)
    monkeypatch.setattr("edgefl_trainer.evaluate.intervals.BLOCK_VALUES", 350)  # seven draws at once
    for name, values in resample(scored, 100).items():
        np.testing.assert_allclose(values, whole[name], atol=1e-12)


def test_what_most_draws_do_not_define_has_no_interval():
    assert interval(np.array([0.5, np.nan, np.nan])) is None
    assert interval(np.array([0.5, 0.5, np.nan])) == [0.5, 0.5]


def report(sites, facts=None):
    return figures_of_sites(sites, {name: (facts or {}).get(name, {}) for name in {*sites, *(facts or {})}})


def test_the_report_pools_rows_and_counts_sites_once():
    sites = {"a": draw(1, rows=30), "b": draw(2, rows=90), "c": draw(3, rows=1)}
    found = report(sites)
    everything = pooled(list(sites.values()))
    assert len(everything.target) == 121
    expected = site_metrics(
        everything.probabilities, everything.target, predicted=everything.predicted, vacuity=everything.vacuity
    )
    assert {name: found["pooled"][name] for name in expected} == expected
    low, high = found["pooled"]["accuracy_interval"]
    assert low < expected["accuracy"] < high
    assert found["sites"]["c"]["accuracy_interval"] is None  # one lesion: nothing to draw from
    assert found["mean_balanced_accuracy_interval"] is None  # it would count c as certain
    without = report({name: sites[name] for name in ("a", "b")})
    low, high = without["mean_balanced_accuracy_interval"]
    assert low < np.mean([found["sites"][name]["balanced_accuracy"] for name in ("a", "b")]) < high
    right = draw(4, rows=20)
    certain = dataclasses.replace(right, predicted=right.target)  # all right: each draw gives the same
    assert report({"a": sites["a"], "d": certain})["mean_balanced_accuracy_interval"] is None


def test_a_held_out_site_is_not_pooled_and_one_without_a_model_has_null_figures():
    facts = {"a": {}, "b": {"held_out": True}, "c": {"held_out": True, "n_test": 7}}
    sites = {"a": draw(1, rows=30), "b": draw(2, rows=90)}
    found = report(sites, facts)
    assert found["pooled"]["n_test"] == 30
    assert found["sites"]["b"]["balanced_accuracy_interval"] is not None
    assert found["sites"]["c"] == {
        **facts["c"],
        **{f"{n}{s}": None for n in (*METRIC_NAMES, "overconfidence", "recall") for s in ("", "_interval")},
        "recall_lesions": None,
        "shown_probability": None,
    }


def test_no_rows_give_nulls():
    empty = Scored(np.zeros((0, 2)), np.zeros(0, np.int64), np.zeros(0, np.int64), None, ())
    found = report({"a": empty})
    assert found["pooled"]["n_test"] == 0
    assert found["pooled"]["balanced_accuracy_interval"] is found["mean_balanced_accuracy_interval"] is None


def test_a_site_judged_on_fewer_classes_is_named():
    """docs/guides/first-run.md: whose figures are over one class, over some classes, or over nothing."""

    def rows(*labels: int) -> Scored:
        n = len(labels)
        target = np.array(labels, np.int64)
        return Scored(np.full((n, 3), 1 / 3), target, target, None, tuple(map(str, range(n))))

    all_seen = (True, True, True)
    scored = {"a": rows(0, 1, 2), "b": rows(0, 0), "c": rows(0, 1), "d": rows()}
    seen = {"a": all_seen, "b": (True, False, False), "c": all_seen, "d": all_seen}
    b, c, d = thin_sites(scored, seen, ("mel", "nv", "bcc"), "val")
    assert b.startswith("site b has one class in its training rows, mel: it can predict no other")
    assert c == "site c has no val row of class bcc: its figures cover the 2 of 3 classes that it has"
    assert d == "site d has no val row, so it has no figures"
    assert {name: site["classes_tested"] for name, site in report(scored)["sites"].items()} == {
        "a": 3, "b": 1, "c": 2, "d": 0,
    }  # fmt: skip
    many = {f"s{i:02d}": rows(0) for i in range(100)}
    lines = thin_sites(many, dict.fromkeys(many, all_seen), ("mel", "nv", "bcc"), "test")
    assert len(lines) == 10 and lines[-1].startswith("91 more sites")


@pytest.mark.parametrize("turned", [False, True])
def test_sites_are_drawn_apart_also_where_they_have_equally_many_lesions(turned):
    """Six independent sites: the interval of their mean is about 1/sqrt(6) of a site's, however the errors line up.

    Sites whose lesions are drawn alike make it as wide as a site's own, or next to nothing where errors alternate.
    """
    right = np.arange(200) % 2 == 0
    sites = {}
    for number in range(6):
        predicted = (right ^ (turned and number % 2 == 1)).astype(int)
        probabilities = np.eye(2)[predicted] * 0.8 + 0.1
        lesions = tuple(f"{number}-{i:03}" for i in range(200))
        sites[f"site-{number}"] = Scored(probabilities, np.arange(200) // 100, predicted, None, lesions)
    widths = [np.ptp(interval(resample(scored)["open_accuracy"])) for scored in sites.values()]
    mean = np.mean([resample(scored)["open_accuracy"] for scored in sites.values()], axis=0)
    assert np.ptp(interval(mean)) == pytest.approx(np.mean(widths) / np.sqrt(6), rel=0.15)


def test_equal_lesions_are_drawn_alike_for_every_model():
    """So models are compared draw by draw, as a paired bootstrap needs."""
    first, second = draw(0, rows=90, lesions=30), draw(0, rows=90, lesions=30)
    second = dataclasses.replace(second, predicted=np.zeros(90, dtype=int))
    for one, other in zip(lesion_weights(first.lesions, 50), lesion_weights(second.lesions, 50), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_site_without_rows_does_not_change_what_orders_the_pooled_rows():
    """Nothing was scored there, so nothing is known of its vacuity; that of the others still orders the curve."""
    site, empty = draw(3), draw(4, softmax=True).take(np.array([], dtype=int))
    together = pooled([site, empty])
    np.testing.assert_array_equal(together.vacuity, site.vacuity)
    np.testing.assert_array_equal(resample(together)["aurc"], resample(site)["aurc"])
    assert pooled([site, draw(4, softmax=True)]).vacuity is None
    assert pooled([empty]).vacuity is None

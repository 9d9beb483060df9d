"""docs/methods.md, "readout" and "baseline rows"."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.federation.baselines import (
    COLOUR_STATISTICS,
    colour_statistics,
    pooled_baseline,
    site_baselines,
)

from edgefl_trainer.learning.linear_probe import (
    ProbeReport,
    ProbeRows,
    choose_readout,
    fit_predict,
    linear_probe,
    probe_sites,
)


def two_clouds(seed, rows=200, distance=3.0, width=8, share=0.5):
    rng = np.random.default_rng(seed)
    target = (rng.random(rows) < share).astype(np.int64)
    features = rng.normal(size=(rows, width))
    features[:, 0] += distance * target
    return features, target


def test_probe_reaches_the_bayes_rate_of_two_gaussians():
    """Two unit Gaussians at distance 3: Φ(1.5) = 0.933 balanced accuracy, at a class share of 0.1 too."""
    features, target = two_clouds(0, 4000, share=0.1)
    tune, truth = two_clouds(1, 4000, share=0.1)
    assert linear_probe(features, target, tune, truth) == pytest.approx(0.933, abs=0.02)


def test_probe_of_noise_is_chance():
    features, target = two_clouds(2, 2000, distance=0.0)
    tune, truth = two_clouds(3, 2000, distance=0.0)
    assert linear_probe(features, target, tune, truth) == pytest.approx(0.5, abs=0.04)


def test_probe_does_not_see_the_scale_of_a_feature():
    """Standardisation: a column times 1e-6 plus 1e3 is the same probe."""
    features, target = two_clouds(4, distance=1.0)
    tune, truth = two_clouds(5, distance=1.0)
    scale, offset = np.full(8, 1e-3), np.full(8, 10.0)
    plain = linear_probe(features, target, tune, truth)
    assert linear_probe(features * scale + offset, target, tune * scale + offset, truth) == pytest.approx(plain)


def test_a_site_of_one_class_answers_with_it():
    probabilities = fit_predict(np.ones((4, 2)), np.full(4, 1), np.zeros((3, 2)), 3)
    assert probabilities.tolist() == [[0.0, 1.0, 0.0]] * 3


def test_a_class_never_seen_has_probability_zero():
    features, target = two_clouds(6)
    probabilities = fit_predict(features, target * 2, features, 4)
    assert np.abs(probabilities[:, [1, 3]]).max() == 0.0
    assert probabilities.sum(axis=1) == pytest.approx(1.0)


def test_no_rows_to_fit_on_is_an_error_and_no_probe():
    empty = np.zeros((0, 2)), np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="no labelled row"):
        fit_predict(*empty, np.zeros((1, 2)), 2)
    assert linear_probe(*empty, np.zeros((1, 2)), np.zeros(1, dtype=np.int64)) is None


def rows_of(seed, distance, tune=100):
    features, target = two_clouds(seed, distance=distance)
    tune_features, tune_target = two_clouds(seed + 50, tune, distance)
    return ProbeRows(features_train=features, target_train=target, features_tune=tune_features, target_tune=tune_target)


def test_sites_are_probed_apart_and_pooled_and_the_better_readout_wins():
    sites = {"b": rows_of(7, 3.0), "a": rows_of(8, 3.0), "c": rows_of(9, 3.0, tune=0)}
    report = probe_sites(sites)
    assert list(report.sites) == ["a", "b", "c"]
    assert report.sites["c"] is None
    assert report.mean == pytest.approx((report.sites["a"] + report.sites["b"]) / 2)
    assert report.pooled is not None and report.pooled > 0.85
    weak = probe_sites({"a": rows_of(10, 0.5), "b": rows_of(11, 0.5)})
    assert choose_readout({"cls": weak, "mean": report}) == "mean"
    assert choose_readout({"cls": report, "mean": weak}) == "cls"


def test_a_site_of_one_class_is_named():
    one = rows_of(1, 0.5)
    thin = replace(one, target_tune=np.zeros_like(one.target_tune))
    report = probe_sites({"a": one, "b": thin})
    assert report.one_class == ("b",)


def test_a_tie_or_no_figure_takes_the_first_readout():
    nothing = ProbeReport(sites={}, mean=None, pooled=None)
    some = ProbeReport(sites={"a": 0.0}, mean=0.0, pooled=0.0)
    assert choose_readout({"cls": nothing, "mean": nothing}) == "cls"
    assert choose_readout({"cls": some, "mean": some}) == "cls"
    assert choose_readout({"cls": nothing, "mean": some}) == "mean"
    with pytest.raises(ValueError, match="at least one"):
        choose_readout({})


def test_colour_statistics_by_hand():
    """One image of two pixels a channel: mean, deviation, linear percentiles; a two-point distribution has no skew."""
    image = np.array([[[0, 255, 51], [255, 255, 102]]], dtype=np.uint8)[None]  # (1, 1, 2, 3)
    row = dict(zip(COLOUR_STATISTICS, colour_statistics(image)[0], strict=True))
    assert len(row) == 24
    assert (row["red.mean"], row["red.std"], row["red.p25"], row["red.p95"]) == pytest.approx((0.5, 0.5, 0.25, 0.95))
    assert (row["green.mean"], row["green.std"], row["green.p50"], row["green.skewness"]) == pytest.approx((1, 0, 1, 0))
    assert (row["blue.mean"], row["blue.p05"]) == pytest.approx((0.3, 0.2 + 0.05 * 0.2))


def test_skewness_is_the_third_standardised_moment():
    image = np.random.default_rng(0).integers(0, 256, (1, 9, 9, 3), dtype=np.uint8)
    pixels = image.reshape(-1, 3) / 255.0
    wanted = (((pixels - pixels.mean(0)) / pixels.std(0)) ** 3).mean(0)
    assert colour_statistics(image)[0, -3:] == pytest.approx(wanted)


def test_colour_statistics_see_no_position_and_no_chunk():
    """Shuffled pixels give the same row; 300 images span two chunks."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (300, 6, 6, 3), dtype=np.uint8)
    shuffled = images.reshape(300, 36, 3)[:, rng.permutation(36)].reshape(images.shape)
    assert colour_statistics(shuffled) == pytest.approx(colour_statistics(images))
    assert colour_statistics(images)[299] == pytest.approx(colour_statistics(images[299:])[0])
    assert colour_statistics(images[:0]).shape == (0, 24)


def test_site_baselines_learn_apart_and_pooled_ones_together():
    """Two sites whose classes lie the opposite way round: apart both are easy, pooled neither is."""
    features, labels = two_clouds(12, 800)
    features[400:, 0] = 3.0 - features[400:, 0]
    fit = {"y": np.arange(0, 300), "x": np.arange(400, 700), "empty": np.arange(0)}
    report = {"y": np.arange(300, 400), "x": np.arange(700, 800), "empty": np.arange(0, 10)}
    apart = site_baselines(features, labels, fit, report, 2)
    together = pooled_baseline(features, labels, fit, report, 2)
    assert list(apart) == list(together) == ["x", "y"]
    assert min(figures["balanced_accuracy"] for figures in apart.values()) > 0.85
    assert max(figures["balanced_accuracy"] for figures in together.values()) < 0.7
    assert [figures["n_test"] for figures in apart.values()] == [100, 100]


def test_rows_without_a_label_are_left_out():
    features, labels = two_clouds(13, 300)
    hidden = labels.copy()
    hidden[::2] = -1
    rows = {"a": np.arange(200)}, {"a": np.arange(200, 300)}
    seen = {"a": np.arange(1, 200, 2)}, {"a": np.arange(201, 300, 2)}
    assert site_baselines(features, hidden, *rows, 2) == site_baselines(features, labels, *seen, 2)


def test_unbalanced_head_follows_the_class_balance():
    features, labels = two_clouds(14, 3000, distance=1.0, share=0.05)
    rows = {"a": np.arange(1500)}, {"a": np.arange(1500, 3000)}
    balanced = site_baselines(features, labels, *rows, 2)["a"]
    plain = site_baselines(features, labels, *rows, 2, balanced=False)["a"]
    assert balanced["balanced_accuracy"] > plain["balanced_accuracy"] + 0.1
    assert plain["accuracy"] > balanced["accuracy"]

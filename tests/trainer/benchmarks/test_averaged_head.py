"""One linear head for all sites: what a regression weighs, how its penalty is chosen, what the table compares."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.causes import averaged_head
from benchmarks.causes.averaged_head import ONE, OWN, arms, one, one_of_drawn_rows, read_features, row_weights, table
from benchmarks.federation.federation_scores import mean_over_centres
from sklearn.linear_model import LogisticRegression

from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.sites import report_rows


@pytest.fixture(scope="module")
def federation(cached):
    return load_federation(["lesions:sites=2,images=60,px=36"], image_px=36, task="nevus", seed=0)


@pytest.fixture(scope="module")
def torn(federation):
    """Two sites whose features say the opposite of each other; the first has six times the training rows."""
    first, second = federation.sites
    few = {second: replace(federation.sites[second], train=of_both_classes(federation, second))}
    data = replace(federation, sites={**federation.sites, **few})
    features = np.random.default_rng(0).normal(size=(len(data.labels), 3)).astype(np.float32)
    for name, sign in ((first, 1), (second, -1)):
        site = data.sites[name]
        rows = np.concatenate([site.train, site.tune, report_rows(data, name).rows])
        features[rows, 0] += 5 * sign * (2 * data.labels[rows] - 1)
    return data, features


def of_both_classes(federation, name, each=3):
    """The first training rows of each class at a site."""
    rows = federation.sites[name].train
    return np.sort(np.concatenate([rows[federation.labels[rows] == k][:each] for k in (0, 1)]))


def test_sites_weigh_alike_and_so_do_the_classes_of_each():
    targets = [np.array([0, 0, 0, 0, 0, 1]), np.array([1, 0])]
    weights = row_weights(targets, sites_alike=True)
    assert weights.tolist() == pytest.approx([2 / 5] * 5 + [2, 2, 2])  # of 8, 4 for a site, 2 for a class
    assert row_weights(targets, sites_alike=False).tolist() == pytest.approx([3 / 5] * 5 + [3, 1, 1])


def test_a_site_of_few_rows_counts_as_much_as_another_where_sites_weigh_alike(torn):
    """Where two sites contradict each other, the one of more rows wins if each row counts, and neither else."""
    data, features = torn
    large, small = data.sites
    _, by_rows = one(data, features, sites_alike=False)
    _, alike = one(data, features, sites_alike=True)
    reached = [{name: mean_over_centres({name: arm[name]}).value for name in data.sites} for arm in (by_rows, alike)]
    assert reached[0][large] > 90 and reached[0][small] < 10
    assert reached[1][small] > reached[0][small] + 10


def test_the_penalty_is_the_best_on_tune_rows_and_reported_labels_choose_nothing(torn):
    """Every penalty fitted here by scikit-learn and judged on `tune`: the first of the best is chosen."""
    data, features = torn
    fit = np.concatenate([site.train for site in data.sites.values()])
    weights = row_weights([data.labels[site.train] for site in data.sites.values()], sites_alike=True)
    reached = {}
    for strength in averaged_head.STRENGTHS:
        model = LogisticRegression(C=strength, max_iter=1000).fit(features[fit], data.labels[fit], weights)
        recalls = []
        for site in data.sites.values():
            truth, said = data.labels[site.tune], model.predict(features[site.tune])
            recalls.append(np.mean([np.mean(said[truth == k] == k) for k in np.unique(truth)]))
        reached[strength] = np.mean(recalls)
    strength, found = one(data, features, sites_alike=True)
    assert strength == max(reached, key=reached.get)
    shown = np.concatenate([report_rows(data, name).rows for name in data.sites])
    labels = data.labels.copy()
    labels[shown] = 1 - labels[shown]
    again, other = one(replace(data, labels=labels), features, sites_alike=True)
    assert again == strength
    for name in data.sites:
        np.testing.assert_array_equal(found[name].probabilities, other[name].probabilities)


def test_every_line_stands_beside_one_for_each_site_and_one_for_all(torn):
    data, features = torn
    found = arms(data, features, rounds=2, epochs=1, seed=0)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(found).splitlines()]
    assert lines[0] == ["linear head", *data.sites, "mean", f"over {OWN}", f"over {ONE}"]
    assert len(lines) == 2 + len(found) and "averaged, rate 0.0005, round 2" in found
    shown = {line[0].split(", C =")[0]: line for line in lines[2:]}
    assert shown[OWN][-2] == "" and shown[ONE][-1] == ""
    gap = mean_over_centres(found[ONE][1]).value - mean_over_centres(found[OWN][1]).value
    assert shown[ONE][-2].startswith(f"{gap:+.1f} [") and gap < -20  # one head cannot serve both


def test_the_line_of_earlier_tables_draws_rows_and_keeps_its_penalty(torn, monkeypatch):
    """Its seed alone decides what is drawn; the penalty is scikit-learn's own, whatever the grid."""
    data, features = torn
    first = one_of_drawn_rows(data, features, 0)
    monkeypatch.setattr(averaged_head, "STRENGTHS", (1e-9,))
    again, other = one_of_drawn_rows(data, features, 0), one_of_drawn_rows(data, features, 1)
    for name in data.sites:
        np.testing.assert_array_equal(first[name].probabilities, again[name].probabilities)
        assert not np.array_equal(first[name].probabilities, other[name].probabilities)


def test_features_are_those_of_rows_in_use_with_mean_0_and_deviation_1_over_training_rows(federation):
    features = read_features(federation, "tiny", 0)
    fit = features[np.concatenate([site.train for site in federation.sites.values()])]
    np.testing.assert_allclose(fit.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(fit.std(axis=0), 1, atol=1e-2)
    used = [(site.train, site.tune, report_rows(federation, name).rows) for name, site in federation.sites.items()]
    known = np.unique(np.concatenate([rows for parts in used for rows in parts]))
    assert np.flatnonzero(np.isfinite(features).all(axis=1)).tolist() == known.tolist()

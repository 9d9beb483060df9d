"""A head learned step by step beside a regression: both losses reach the optimum that the regression has."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.causes import evidential_gap
from benchmarks.causes.head_recipe import head_scores, judged_on_tune, learned_head, loss_of, regression_scores, table

from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.sites import report_rows


@pytest.fixture(scope="module")
def told(cached):
    """A federation, and features of which the first alone tells the class."""
    data = load_federation(["lesions:sites=2,images=60,px=36"], image_px=36, task="nevus", seed=0)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(len(data.labels), 4)).astype(np.float32)
    features[:, 0] += 4 * data.labels
    return data, features


@pytest.mark.parametrize("loss", ["evidential", "cross-entropy"])
def test_a_head_learns_what_the_features_tell(told, loss):
    data, features = told
    found = head_scores(data, features, loss, 40, 0.05, 1e-2)
    for name, (learned, judged) in found.items():
        for rows, said in ((data.sites[name].train, learned), (report_rows(data, name).rows, judged)):
            assert (said.argmax(axis=1) == data.labels[rows]).mean() > 0.9


def test_reported_labels_change_no_head_and_no_regression(told):
    data, features = told
    shown = np.concatenate([report_rows(data, name).rows for name in data.sites])
    labels = data.labels.copy()
    labels[shown] = 1 - labels[shown]
    other = replace(data, labels=labels)
    pairs = (
        [head_scores(one, features, "evidential", 3, 5e-3, 1e-2) for one in (data, other)],
        [regression_scores(one, features) for one in (data, other)],
    )
    for first, second in pairs:
        for name in first:
            np.testing.assert_array_equal(first[name][1], second[name][1])


def test_the_table_compares_with_its_first_line(told):
    data, features = told
    arms = {"one": regression_scores(data, features), "the same": regression_scores(data, features)}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(data, arms).splitlines()[2:]]
    assert [line[0] for line in lines] == ["one", "the same"] and lines[0][3] == ""
    assert lines[1][3].startswith("+0.0 [+0.0")


def test_a_recipe_is_chosen_on_tune_rows_alone(told):
    data, features = told
    chosen = judged_on_tune(data)
    for name in data.sites:
        np.testing.assert_array_equal(report_rows(chosen, name).rows, data.sites[name].tune)
        assert not set(report_rows(data, name).rows) & set(report_rows(chosen, name).rows)
    found, whole = (head_scores(one, features, "evidential", 3, 5e-3, 1e-2) for one in (chosen, data))
    for name in data.sites:
        np.testing.assert_array_equal(found[name][0], whole[name][0])  # the same head
        assert len(found[name][1]) == len(data.sites[name].tune)


def test_the_kl_term_takes_evidence_by_its_weight():
    """On noise, where evidence is for wrong classes as often as not: the more weight, the less of it is left."""
    draws = torch.Generator().manual_seed(0)
    features, targets = torch.randn(200, 4, generator=draws), torch.randint(0, 3, (200,), generator=draws)
    left = []
    for weight in (0.0, 0.1, 1.0):
        how = ("evidential", 20, 5e-2, 0.0)
        head = learned_head(features, targets, torch.ones(3), *how, equal_draws=False, most_kl=weight)
        left.append(float(torch.nn.functional.softplus(head(features)).sum()))
    assert left[0] > 1.2 * left[1] > 1.44 * left[2]


def test_the_losses_between_the_two_are_those_of_their_definitions():
    """Sensoy et al. (arXiv 1806.01768) eq. 3, and the Brier score of a softmax, both written out in numpy."""
    rng = np.random.default_rng(0)
    logits, targets, prior = rng.normal(size=(5, 3)), rng.integers(0, 3, 5), np.array([0.5, 1.0, 1.5])
    alpha = np.exp(logits + 3) + prior
    likelihood = alpha[np.arange(5), targets] / alpha.sum(axis=1)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = {
        "evidential, logarithm": -np.log(likelihood).mean(),
        "squared error": ((shares - np.eye(3)[targets]) ** 2).sum(axis=1).mean(),
        "cross-entropy": -np.log(shares[np.arange(5), targets]).mean(),
    }
    for loss, value in expected.items():
        given = map(torch.from_numpy, (logits, np.exp(logits + 3), targets, prior))
        found = loss_of(loss, *given, 0.0)
        assert float(found) == pytest.approx(value), loss


@pytest.mark.parametrize("way", evidential_gap.WAYS, ids=lambda way: way.label)
def test_each_way_of_the_gap_is_judged_on_reported_rows_of_all_and_of_own_classes(told, way):
    """A class without a training row is never named where only own classes may be; with it known, the two agree."""
    data, features = told
    (name, *_) = data.sites
    both = evidential_gap.figures(data, features, name, way, 0)
    assert both[:2] == both[2:]  # the site has both classes
    site = data.sites[name]
    blind = replace(data, sites={name: replace(site, train=site.train[data.labels[site.train] == 0])})
    found = evidential_gap.figures(blind, features, name, way, 0)
    of_class = 100 * float((data.labels[report_rows(data, name).rows] == 0).mean())
    assert found[2] == pytest.approx(of_class) and found[3] == pytest.approx(50)

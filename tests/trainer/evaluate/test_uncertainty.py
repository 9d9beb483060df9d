"""What `benchmarks/uncertainty.py` compares: distances by scipy, an ensemble by its definition."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import mahalanobis
from uncertainty_measures import Rows, Said, fit_gaussians, together


def test_the_distance_is_that_to_the_nearest_class_under_one_covariance():
    """Lee et al., arXiv 1807.03888, eq. 1 and 2; the covariance shrunk as in docs/methods.md 1.8."""
    rng = np.random.default_rng(0)
    features, targets = rng.normal(size=(60, 4)), np.repeat([0, 2, 5], 20)
    features[targets == 2] += 3
    means = {k: features[targets == k].mean(axis=0) for k in (0, 2, 5)}
    inside = np.concatenate([features[targets == k] - mean for k, mean in means.items()])
    covariance = inside.T @ inside / 60
    inverse = np.linalg.inv(0.9 * covariance + 0.1 * np.trace(covariance) / 4 * np.eye(4))
    new = rng.normal(size=(5, 4)) * 4
    wanted = [min(mahalanobis(one, mean, inverse) ** 2 for mean in means.values()) for one in new]
    found = fit_gaussians(Rows(torch.from_numpy(features), torch.from_numpy(targets))).nearest(new)
    assert found == pytest.approx(wanted)


def test_members_that_agree_disagree_by_nothing_and_others_by_the_entropy_they_add():
    """Entropy of the mean less the mean entropy: 0 for equal members, ln 2 for two that are sure of other classes."""
    sure = [np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])]
    said = [Said(one, one.argmax(axis=1), {"entropy": np.zeros(1)}) for one in sure]
    apart, alike = together(said, (True, True)), together([said[0], said[0]], (True, True))
    assert apart.measures["2 heads, disagreement"] == pytest.approx(np.log(2))
    assert alike.measures["2 heads, disagreement"] == pytest.approx(0)
    assert alike.predicted.tolist() == [0] and apart.measures["2 heads, 1 - p"] == pytest.approx(0.5)

"""docs/methods.md, discounted evidence: distances by scipy, the discount by subjective logic's own formula."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import mahalanobis

from edgefl_trainer.learning.unusual_features import everything_usual, usual_features
from edgefl_trainer.models.head import dirichlet_summary, discounted, unusualness


def unusual(features: np.ndarray, tensors: dict) -> np.ndarray:
    mean, whitening = (torch.from_numpy(tensors[f"usual.{name}"]) for name in ("mean", "whitening"))
    return unusualness(torch.from_numpy(features.astype(np.float32)), mean, whitening).numpy()


@settings(max_examples=60)
@given(
    evidence=st.lists(st.floats(0, 1e4), min_size=2, max_size=5),
    distance=st.floats(0, 1e6),
)
def test_belief_is_multiplied_by_trust_and_the_rest_is_vacuity(evidence, distance):
    """Jøsang 2016: b' = t·b, u' = 1 − t·Σb, with t = 1 up to d² = 1 and 1/d² beyond."""
    before = torch.tensor([evidence], dtype=torch.float64)
    prior = torch.ones(len(evidence), dtype=torch.float64)
    after = discounted(before, torch.tensor([distance], dtype=torch.float64))
    trust = 1 / max(1, distance)
    strength = sum(evidence) + len(evidence)
    vacuity = dirichlet_summary(after, prior)[1]
    belief = after / len(evidence) * vacuity
    np.testing.assert_allclose(belief[0], trust * np.array(evidence) / strength, rtol=1e-9, atol=1e-12)
    assert float(vacuity) == pytest.approx(1 - trust * sum(evidence) / strength, abs=1e-9)
    if distance <= 1:
        assert torch.equal(after, before)


def test_distances_are_those_of_mahalanobis():
    """d² is proportional to scipy's squared Mahalanobis distance under the shrunk covariance."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 6)) @ rng.normal(size=(6, 6)) + 3
    covariance = np.cov(rows.T)
    shrunk = 0.9 * covariance + 0.1 * np.trace(covariance) / 6 * np.eye(6)
    points = rng.normal(size=(20, 6)) * 5
    squares = [mahalanobis(point, rows.mean(axis=0), np.linalg.inv(shrunk)) ** 2 for point in points]
    found = unusual(points, usual_features(rows.astype(np.float32)))
    np.testing.assert_allclose(found / found[0], np.array(squares) / squares[0], rtol=1e-4)


@pytest.mark.parametrize(("rows", "least"), [(100, 0.0), (1000, 0.01)])
def test_about_one_new_row_in_twenty_is_unusual(rows, least):
    """The limit holds for rows that it was not made of; for few rows it is wider, never narrower. Far away all are."""
    shares = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        mix = rng.normal(size=(40, 40))
        tensors = usual_features((rng.normal(size=(rows, 40)) @ mix).astype(np.float32))
        shares.append((unusual(rng.normal(size=(500, 40)) @ mix, tensors) > 1).mean())
        assert (unusual(6 * rng.normal(size=(500, 40)) @ mix, tensors) > 1).all()
    assert least <= np.mean(shares) <= 0.09


def test_of_few_rows_nothing_is_unusual():
    few = np.random.default_rng(0).normal(size=(39, 5)).astype(np.float32)
    for tensors in (usual_features(few), everything_usual(5)):
        assert (unusual(1e6 * np.ones((3, 5)), tensors) == 0).all()
    constant = usual_features(np.ones((60, 5), np.float32))
    assert np.isfinite(unusual(np.full((1, 5), 2.0), constant)).all()

"""What is usual at a site: the distance of a feature from those the site trained on, as tensors of its model.

    d²(f) = ‖A(f − m)‖², m the mean of the training features, AᵀA = Σ⁻¹/q, Σ = (1 − λ)·cov + λ·v·I, λ = 0.1

v is the mean variance, q the 95th percentile of the distances of rows from the mean and Σ of other rows: each half of
the training rows is measured by the other half, since rows lie too near to what was made of themselves. So d² > 1 says:
farther out than 95 % of new images like the training images. `models.head.discounted` takes evidence away beyond that.

Sources: Lee et al., "A simple unified framework for detecting out-of-distribution samples", arXiv 1807.03888 (with one
Gaussian for all classes here); docs/methods.md, discounted evidence; docs/decisions/0023.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.contract import Predictor, Site
from edgefl_trainer.learning.training_scores import training_features

SHRINKAGE = 0.1  # lambda
USUAL_SHARE = 0.95  # of new images like the training images, whose evidence stays whole
LEAST_ROWS = 40  # below which nothing is called unusual

Tensors = Mapping[str, NDArray[np.float32]]


def everything_usual(width: int) -> Tensors:
    """Return tensors under which no feature is unusual: d² = 0 everywhere."""
    return {
        "usual.mean": np.zeros(width, dtype=np.float32),
        "usual.whitening": np.zeros((width, width), dtype=np.float32),
    }


def usual_features(features: NDArray[np.float32]) -> Tensors:
    """Measure what is usual: m and A of the training features (n, D).

    Gives `usual.mean` (D,) and `usual.whitening` (D, D), lower triangular; `everything_usual` below 40 rows.
    """
    rows, width = features.shape
    if rows < LEAST_ROWS:
        return everything_usual(width)
    wide = features.astype(np.float64)
    order = np.random.default_rng(0).permutation(rows)
    halves = order[: rows // 2], order[rows // 2 :]
    unseen = [_distances(wide[there], *_gaussian(wide[here])) for here, there in (halves, halves[::-1])]
    limit = max(float(np.quantile(np.concatenate(unseen), USUAL_SHARE)), 1e-12)
    mean, whitening = _gaussian(wide)
    return {
        "usual.mean": mean.astype(np.float32),
        "usual.whitening": (whitening / np.sqrt(limit)).astype(np.float32),
    }


def with_usual(predictor: Predictor, site: Site) -> Predictor:
    """Let a model that discounts unusual features know those of its site; leave any other model as it is."""
    if not predictor.module.options.discounts or len(site.train) == 0:
        return predictor
    return replace(predictor, tensors={**predictor.tensors, **usual_features(training_features(site, predictor))})


def _gaussian(features: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean, and the lower triangular matrix that makes the shrunk covariance the identity."""
    covariance = np.cov(features.T)
    variance = max(float(np.trace(covariance)) / len(covariance), 1e-12)
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * np.eye(len(covariance))
    return features.mean(axis=0), np.linalg.inv(np.linalg.cholesky(shrunk))


def _distances(
    features: NDArray[np.float64], mean: NDArray[np.float64], whitening: NDArray[np.float64]
) -> NDArray[np.float64]:
    return np.asarray(np.square((features - mean) @ whitening.T).sum(axis=1))

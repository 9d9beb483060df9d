"""One pass over a site's training rows in the deterministic view: row order, no augmentation, no gradient."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_trainer.contract import Predictor, Site
from edgefl_trainer.learning.named_arrays import as_tensors

BATCH = 64


@dataclass(frozen=True)
class TrainingScores:
    """What a model says of every training row, in row order. None where the model has no such quantity."""

    probabilities: NDArray[np.float32]  # (n, K)
    vacuity: NDArray[np.float32] | None  # (n,)
    maps: NDArray[np.float32] | None  # (n, N)


def training_scores(site: Site, predictor: Predictor) -> TrainingScores:
    """Score the site's training rows."""
    tensors = as_tensors(predictor.tensors, site.device)
    parts: dict[str, list[NDArray[np.float32]]] = {}
    with torch.inference_mode():
        for images, _ in site.train.in_order(BATCH):
            for name, value in predictor.score_module(images.to(site.device), tensors).named().items():
                parts.setdefault(name, []).append(value.cpu().numpy())
    found = {name: np.concatenate(values) for name, values in parts.items()}
    return TrainingScores(found["probabilities"], found.get("vacuity"), found.get("map"))


def training_features(site: Site, predictor: Predictor) -> NDArray[np.float32]:
    """Return what the head reads of the site's training rows, (n, D)."""
    module = predictor.score_module
    tensors = as_tensors(predictor.tensors, site.device)
    parts = []
    with torch.inference_mode():
        for images, _ in site.train.in_order(BATCH):
            output = module.output(images.to(site.device), tensors, need_attention=False)
            parts.append(module.features(output, tensors).cpu().numpy())
    return np.concatenate(parts)


def class_means(values: NDArray[np.float32], targets: NDArray[np.int64]) -> dict[int, NDArray[np.float32]]:
    """Return the mean row of each class that has one, {class: (D,)}; sums in float64."""
    wide = values.astype(np.float64)
    return {int(k): wide[targets == k].mean(axis=0).astype(np.float32) for k in np.unique(targets)}

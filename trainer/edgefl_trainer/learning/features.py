"""Features of the frozen network: their statistics, and which readout to take, at one site or for all sites at once.

A self-supervised network's features are small and unequal in scale, so a fresh head learns slowly; standardised by the
statistics of the training rows it learns at once. Class token or mean of the patches: a linear probe on tune rows
decides. Where the head is private a site decides alone; where it is averaged, a warm phase before round 1 pools what
the sites found (`feature_reply`, `common_features`). docs/methods.md, readout and feature standardisation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Site, State
from edgefl_trainer.errors import TrainingError
from edgefl_trainer.learning.linear_probe import linear_probe
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.spec import Readout, readouts_of, settled_readout

PROBED: tuple[Readout, ...] = ("cls", "mean")  # what `auto` decides between, the first on a tie
BATCH = 256
LEAST_SHARE = 0.1  # of the median deviation
LEAST_IMAGES = 10  # below which a deviation says nothing


@dataclass(frozen=True)
class FeatureMoments:
    """First and second moment of one readout over some images."""

    count: int
    mean: NDArray[np.float64]  # (D,)
    square: NDArray[np.float64]  # (D,) mean of squares

    def statistics(self) -> dict[str, NDArray[np.generic]]:
        """Return `features.mean` and `features.std` as payload tensors.

        A feature that hardly varies over few images must not be blown up into certainty: deviations are at least a
        tenth of their median, and 1 where there are too few images to tell.
        """
        deviation = np.sqrt(np.maximum(self.square - self.mean**2, 0.0))
        floor = LEAST_SHARE * float(np.median(deviation))
        known = self.count >= LEAST_IMAGES and floor > 0
        spread = np.maximum(deviation, floor) if known else np.ones_like(deviation)
        return {"features.mean": self.mean.astype(np.float32), "features.std": spread.astype(np.float32)}


def frozen_features(backbone: Backbone, rows: Examples, device: torch.device) -> dict[Readout, NDArray[np.float32]]:
    """Compute every readout of the bare network, (rows, D) each."""
    parts: dict[Readout, list[NDArray[np.float32]]] = {name: [] for name in readouts_of(backbone.spec)}
    with torch.inference_mode():
        for images, _ in rows.in_order(BATCH):
            output = backbone(backbone.normalise(images.to(device)))
            for name in parts:
                parts[name].append(output.readout(name).float().cpu().numpy())
    width = backbone.spec.width
    return {name: np.concatenate(found) if found else np.zeros((0, width), np.float32) for name, found in parts.items()}


def moments(features: NDArray[np.float32]) -> FeatureMoments:
    """Compute moments in float64, so that a mean does not depend on how the images are spread; of no image, 0 and 1."""
    wide = features.astype(np.float64)
    if len(wide) == 0:
        return FeatureMoments(0, np.zeros(wide.shape[1]), np.ones(wide.shape[1]))
    return FeatureMoments(len(features), wide.mean(axis=0), (wide**2).mean(axis=0))


def probe_readouts(site: Site, features: Mapping[Readout, NDArray[np.float32]]) -> dict[Readout, float]:
    """Return a probe's balanced accuracy on tune rows, fitted on train rows; 0 where a site has too little to tell."""
    assert site.backbone is not None
    if len(site.tune) == 0 or len(np.unique(site.train.targets)) < 2:
        return dict.fromkeys(features, 0.0)
    tune = frozen_features(site.backbone, site.tune, site.device)
    found = {name: linear_probe(features[name], site.train.targets, tune[name], site.tune.targets) for name in features}
    return {name: 0.0 if figure is None else figure for name, figure in found.items()}


def best_readout(scores: Mapping[Readout, float]) -> Readout:
    """Choose the readout with the higher score; on a tie the first, of a vision transformer the class token."""
    return max(scores, key=lambda name: scores[name])


def own_features(site: Site, wanted: str, *, standardise: bool) -> State:
    """Decide for one site with a private head: its readout and, where used, its feature statistics.

    Of `wanted`, `cls` or `mean` stands and `auto` takes the one that probes better. Gives the value `readout` and,
    where used, `features.mean` and `features.std` (D,).
    """
    assert site.backbone is not None
    wanted = settled_readout(wanted, site.backbone.spec)
    if wanted != "auto" and not standardise:
        return State({}, {"readout": wanted})
    features = frozen_features(site.backbone, site.train, site.device)
    readout = best_readout(probe_readouts(site, features)) if wanted == "auto" else readout_named(wanted)
    return State(moments(features[readout]).statistics() if standardise else {}, {"readout": readout})


def feature_reply(site: Site, wanted: str = "auto", *, standardise: bool = True) -> Payload:
    """Answer a warm phase at a site, with no more than the server will read; with `auto` a probe decides.

    Gives moments (2, D) of the readouts in question over the training images, if features are standardised; their probe
    figures, if they decide; the number of training images.
    """
    assert site.backbone is not None
    wanted = settled_readout(wanted, site.backbone.spec)
    if wanted != "auto" and not standardise:
        return Payload({}, {"n_train": len(site.train)})
    features = frozen_features(site.backbone, site.train, site.device)
    asked = tuple(features) if wanted == "auto" else (readout_named(wanted),)
    found = {name: moments(features[name]) for name in asked if standardise}
    arrays = {f"moments.{name}": np.stack([one.mean, one.square]) for name, one in found.items()}
    scores = probe_readouts(site, features) if wanted == "auto" else {}
    probes = {f"probe.{name}": score for name, score in scores.items()}
    return Payload(arrays, {"n_train": len(site.train), **probes})


def common_features(replies: Mapping[str, Payload], wanted: str, *, standardise: bool) -> State:
    """Pool the replies of a warm phase (see `feature_reply`); gives what `own_features` gives, common to all sites.

    With `auto`, the readout is the one that probes better on the mean of the sites. A `TrainingError` where a figure of
    a probe is no share: without bounds one site would decide for all.
    """
    names = sorted(replies)
    readout = readout_named(wanted)
    if wanted == "auto":
        probes = {k: [_told(name, replies[name], f"probe.{k}") for name in names] for k in PROBED}
        readout = best_readout({k: float(np.mean(figures)) for k, figures in probes.items()})
    if not standardise:
        return State({}, {"readout": readout})
    counts = np.array([int(replies[name].scalars["n_train"]) for name in names])
    stacked = np.stack([replies[name].arrays[f"moments.{readout}"].astype(np.float64) for name in names])
    mean, square = (stacked * (counts / counts.sum())[:, None, None]).sum(axis=0)
    return State(FeatureMoments(int(counts.sum()), mean, square).statistics(), {"readout": readout})


def _told(site: str, reply: Payload, name: str) -> float:
    """Read a balanced accuracy that a reply tells."""
    figure = float(reply.scalars[name])
    if not 0 <= figure <= 1:
        raise TrainingError(f"the reply of {site} says {name} = {figure:g}; a balanced accuracy must be from 0 to 1.")
    return figure


def features_sent(head_norm: str) -> tuple[str, ...]:
    """Return what a warm phase adds to `Method.travels`: moments of features, unless the head reads them as they are.

    With `auto` it is the backbone that decides: those of supervised ones are read as they are, and none is sent.
    """
    return () if head_norm == "none" else ("features",)


def readout_named(value: object) -> Readout:
    """Return the readout that a broadcast or a state names; the class token for anything else."""
    named: Mapping[object, Readout] = {"mean": "mean", "pooled": "pooled"}
    return named.get(value, "cls")

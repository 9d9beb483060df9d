"""What each centre gets alone from features that nobody trains: a class-balanced logistic regression on its own labels.

Starts: `colours` (24 statistics of the picture's colours), `imagenet` (EfficientNet-lite0 as its package ships it, at
112 px) and `fedmae` (`derm-vit-tiny-84`, which six centres learned without labels; mean of its patches, 84 px). Each
centre's regression is judged on the `val` rows of every centre. Its penalty, one for all centres, is chosen on `tune`
rows. Scores lie in OUT, one file for each start, number of labels and draw, and in it one array for each learner and
judged centre, in half precision; what is there is not done again.

    python -m benchmarks.federation.frozen_starts --data manifest:fed_isic2019_84.zip --out runs/federation/frozen
"""

from itertools import product
from pathlib import Path

import click
import numpy as np
import torch
from jaxtyping import Float

from benchmarks.federation.baselines import colour_statistics
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.accuracy import balanced_accuracy
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import fit_predict
from edgefl_trainer.models.backbones import load_backbone

Features = Float[np.ndarray, "B D"]  # of every row of the data
NETWORKS = {"imagenet": ("package:efficientnet_lite0", 112, "pooled"), "fedmae": ("derm-vit-tiny-84", 84, "mean")}
LABELS, DRAWS = (2000, 60), (0, 1, 2)  # at most so many of a centre, in each of these draws
STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # inverse weights of the L2 penalty


def loaded(start: str, data: str, task: str, labels: int | None, draw: int) -> Federation:
    """The federation with at most `labels` training pictures of a centre, or all, at the size that the start takes."""
    px = NETWORKS[start][1] if start in NETWORKS else 84
    return load_federation([data], image_px=px, task=task, seed=draw, limit=labels)


def features_of(start: str, federation: Federation) -> Features:
    """Compute the features of every row, (rows, D)."""
    if start == "colours":
        return colour_statistics(federation.images)
    network, px, readout = NETWORKS[start]
    rows = Examples(federation.images, federation.labels, np.arange(len(federation.labels)))
    found = frozen_features(load_backbone(network, image_px=px), rows, torch.device("cpu"))
    return np.asarray(found[readout])  # type: ignore[index]


def best_strength(features: Features, federation: Federation) -> float:
    """Choose the penalty, one for all centres, by the mean of their balanced accuracies on `tune` rows."""

    def mean(strength: float) -> float:
        return float(np.mean([_on_tune(features, federation, name, strength) for name in federation.sites]))

    return max(STRENGTHS, key=mean)


def _on_tune(features: Features, federation: Federation, name: str, strength: float) -> float:
    site, labels = federation.sites[name], federation.labels
    fit, tune, classes = site.train, site.tune, len(federation.classes)
    found = fit_predict(features[fit], labels[fit], features[tune], classes, strength=strength)
    return balanced_accuracy(found.argmax(axis=1), labels[tune]) or 0.0


def scores(features: Features, federation: Federation, strength: float) -> dict[str, np.ndarray]:
    """Probabilities by ``LEARNER.JUDGED``, (rows, K)."""
    judged = {name: report_rows(federation, name).rows for name in federation.sites}
    together = np.concatenate(list(judged.values()))
    ends = np.cumsum([len(rows) for rows in judged.values()])[:-1]
    found: dict[str, np.ndarray] = {}
    for learner, site in federation.sites.items():
        fit, classes = site.train, len(federation.classes)
        every = fit_predict(features[fit], federation.labels[fit], features[together], classes, strength=strength)
        found |= {f"{learner}.{name}": part for name, part in zip(judged, np.split(every, ends), strict=True)}
    return found


@click.command()
@click.option("--data", required=True, metavar="SPEC", help="The federation.")
@click.option("--task", default="nevus", show_default=True, help="Classes of the data.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the scores.")
def main(data: str, task: str, out: Path) -> None:
    """Score every start."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        for start in ("colours", *NETWORKS):
            features = None
            for labels, draw in product(LABELS, DRAWS):
                file = out / f"{start}-{labels}-{draw}.npz"
                if file.exists():
                    continue
                federation = loaded(start, data, task, labels, draw)
                features = features_of(start, federation) if features is None else features
                strength = best_strength(features, federation)
                found = scores(features, federation, strength)
                # A third of the size; it changes 1 named class in 8,000, where the two are all but even.
                half = {name: values.astype(np.float16) for name, values in found.items()}
                np.savez_compressed(file, **half)  # type: ignore[arg-type]
                click.echo(f"wrote {file}, C = {strength}")
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

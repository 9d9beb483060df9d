"""Where the gap between the evidential loss and cross-entropy comes from: KL term, prior, squared error or evidence.

Each site learns a linear head on frozen features, standardised over its own training rows, by the recipe of `bench84`,
with classes as often as they come. The ways differ in the weight of the KL term, in the prior (eq. 3 of FedEvPrompt, or
one for each class), and in the loss: a logarithm for the squared error, a softmax for the evidence. Reported rows are
judged twice, in per cent, as the mean of the sites and of the seeds: with any class as the answer, and with the site's
own classes alone. A seed draws the head's first weights and the batches.

    edgefl-train partition --data manifest:fed_isic2019_84.zip --scheme pathological --sites 16 --classes-per-site 2 \\
        -o pathological.json
    python -m benchmarks.causes.evidential_gap --data manifest:fed_isic2019_84.zip --backbone derm-vit-tiny-84 \\
        --partition pathological.json --images-per-site 300
"""

from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from jaxtyping import Float
from sklearn.preprocessing import StandardScaler

from benchmarks.causes.head_recipe import DECAY, EPOCHS, RATE, learned_head, standardised
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.accuracy import balanced_accuracy
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.data.partitions.partition import read_partition
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.metrics import predicted_classes
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.losses import class_prior
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.head import EvidenceKind, evidence_of

COLUMNS = ["accuracy", "balanced", "accuracy, own classes", "balanced, own classes"]


@dataclass(frozen=True)
class Way:
    """How a head is learned."""

    label: str
    loss: str = "evidential"  # see `head_recipe.loss_of`
    evidence: EvidenceKind = "softplus"
    start: float = 0.0  # added to the logits, whose first bias is 1
    most_kl: float = 1.0  # weight of the KL term from the second epoch on
    skewed: bool = True  # whether the prior is that of eq. 3; else it is one for each class


WAYS = (
    Way("cross-entropy", loss="cross-entropy"),
    Way("evidential, as `bench84`"),
    Way("a tenth of the KL term", most_kl=0.1),
    Way("no KL term", most_kl=0.0),
    Way("a prior of ones", skewed=False),
    Way("a prior of ones, no KL term", most_kl=0.0, skewed=False),
    Way("prior of ones, logarithm, softplus", loss="evidential, logarithm", skewed=False),
    Way("prior of ones, logarithm, exp", loss="evidential, logarithm", evidence="exp", skewed=False),
    Way(
        "prior of ones, logarithm, exp from 55 on",
        loss="evidential, logarithm",
        evidence="exp",
        start=3.0,
        skewed=False,
    ),
    Way("prior of ones, logarithm, softplus from 55 on", loss="evidential, logarithm", start=54.0, skewed=False),
    Way("softmax, squared error", loss="squared error"),
)


def figures(federation: Federation, features: Float[np.ndarray, "B D"], name: str, way: Way, seed: int) -> list[float]:
    """Learn a site's head in one way; return the numbers of `COLUMNS` in per cent."""
    site, judged = federation.sites[name], report_rows(federation, name).rows
    scaler = StandardScaler().fit(features[site.train])
    fit, shown = (standardised(scaler, features[rows]) for rows in (site.train, judged))
    targets, labels = torch.from_numpy(federation.labels[site.train]), federation.labels[judged]
    counts = torch.bincount(targets, minlength=len(federation.classes))
    prior = class_prior(counts) if way.skewed else torch.ones(len(counts))
    recipe = (way.loss, EPOCHS, RATE, DECAY)
    head = learned_head(
        fit, targets, prior, *recipe,
        equal_draws=False, most_kl=way.most_kl, evidence=way.evidence, start=way.start, seed=seed,
    )  # fmt: skip
    logits = head(shown).double()
    if way.loss.startswith("evidential"):
        alpha = evidence_of(logits + way.start, way.evidence) + prior.double()
        said = (alpha / alpha.sum(dim=1, keepdim=True)).numpy()
    else:
        said = logits.softmax(dim=1).numpy()
    answers = said.argmax(axis=1), predicted_classes(said, None, (counts > 0).tolist())
    return [100 * one for named in answers for one in ((named == labels).mean(), balanced_accuracy(named, labels) or 0)]


@click.command()
@click.option("--data", "specs", required=True, multiple=True, metavar="SPEC", help="The federation; repeatable.")
@click.option("--task", default="all", show_default=True, help="Classes of the data.")
@click.option("--partition", type=click.Path(path_type=Path, exists=True), help="Deal the rows to other sites.")
@click.option("--backbone", required=True, metavar="NAME", help="The frozen network.")
@click.option("--images-per-site", default=300, show_default=True, metavar="N", help="Most training pictures.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(0, 1, 2), show_default=True, help="Repeatable.")
def main(
    specs: tuple[str, ...], task: str, partition: Path | None, backbone: str, images_per_site: int,
    seeds: tuple[int, ...],
) -> None:  # fmt: skip
    """Print what each way reaches, as Markdown; in brackets the seeds' smallest and largest mean."""
    try:
        network = load_backbone(backbone)
        dealt = None if partition is None else read_partition(partition)
        federation = load_federation(
            specs, image_px=network.spec.image_px, task=task, seed=0, limit=images_per_site, partition=dealt
        )
        rows = Examples(federation.images, federation.labels, np.arange(len(federation.labels)))
        features = np.asarray(frozen_features(network, rows, torch.device("cpu"))["mean"])
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    body = []
    for way in WAYS:
        means = [
            np.mean([figures(federation, features, name, way, seed) for name in federation.sites], axis=0)
            for seed in seeds
        ]
        told = zip(np.mean(means, axis=0), np.min(means, axis=0), np.max(means, axis=0), strict=True)
        body.append([way.label, *(f"{mean:.1f} ({low:.1f} to {high:.1f})" for mean, low, high in told)])
    click.echo(markdown(["head on frozen features", *COLUMNS], body, ""))


if __name__ == "__main__":
    main()

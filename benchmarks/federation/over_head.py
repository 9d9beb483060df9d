"""How far runs stand above a head alone on the frozen network that they learned on: paired over lesions.

The head is a class-balanced logistic regression of each centre on its own training rows, the run's, over the mean of
the patches; its penalty, one for all centres, is chosen on `tune` rows. Each centre's model and head answer the same
reported rows, and a difference is taken over the same draws of lesions. All RUNs share data and network, and those of a
seed their training rows. The runs of a row are averaged over their seeds, as the heads are.

    python -m benchmarks.federation.over_head runs/evp/centres/*/seed-* --over local-bt
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.federation.federation_scores import (
    Centres,
    accuracy,
    average,
    by_seed,
    difference,
    over_all_rows,
    reported,
    scored_rows,
    scores_of,
)
from benchmarks.federation.frozen_starts import Features, best_strength, scores
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.cnn import Backbone

HEAD = "head alone"
SHARED = ("data", "partition", "task", "classes", "colour", "labels", "images_per_site", "seed")  # alike in all runs


def heads_alone(runs: Sequence[FinishedRun]) -> list[Centres]:
    """Score each centre's reported rows with a regression on its network, of each run's own training rows.

    All runs share data and network (`alike`). The features are computed anew only where the pictures that a seed
    learned from are of other sizes or qualities, for its pictures are made like those.
    """
    found: list[Centres] = []
    features = taught = None
    for run in runs:
        settings, network = run.settings, network_of(run)
        if settings.partition or settings.classes or settings.labels != 1:
            raise ValueError(
                f"{run.folder} has a partition, classes or a share of labels, which a head here does not follow"
            )
        limit, colour = settings.images_per_site or None, settings.colour
        federation = load_federation(
            settings.data,
            image_px=network.spec.image_px,
            colour=colour,
            task=settings.task,
            seed=settings.seed,
            limit=limit,
        )
        if features is None or federation.taught != taught:
            features, taught = _features(network, federation), federation.taught
        probabilities = scores(features, federation, best_strength(features, federation))
        found.append(
            {name: scored_rows(probabilities[f"{name}.{name}"], federation, name) for name in federation.sites}
        )
    return found


def network_of(run: FinishedRun) -> Backbone:
    """Load the frozen network of a run; that of a kept run, beside which it does not lie, by its name."""
    settings = run.settings
    if run.sites:
        return run.backbone
    network = load_backbone(settings.backbone, image_px=settings.image_px or None, seed=settings.seed)
    if network.spec.sha256 != run.summary["backbone_sha256"]:
        raise ValueError(f"{settings.backbone} is not the network that {run.folder} learned on")
    return network


def _features(network: Backbone, federation: Federation) -> Features:
    rows = Examples(federation.images, federation.labels, np.arange(len(federation.labels)))
    readouts = frozen_features(network, rows, torch.device("cpu"))
    return np.asarray(readouts["mean"] if "mean" in readouts else readouts["pooled"])


def same_rows(runs: Sequence[FinishedRun]) -> None:
    """A `ValueError` where the runs are not made of the same rows."""
    for run in runs[1:]:
        for name in SHARED:
            if getattr(run.settings, name) != getattr(runs[0].settings, name):
                raise ValueError(f"{run.folder} and {runs[0].folder} differ in {name}")


def alike(runs: Sequence[FinishedRun]) -> None:
    """A `ValueError` where the runs are not made of the same rows and network."""
    same_rows(runs)
    for run in runs[1:]:
        if run.summary["backbone_sha256"] != runs[0].summary["backbone_sha256"]:
            raise ValueError(f"{run.folder} and {runs[0].folder} stand on different networks")


def rows_of(runs: Sequence[FinishedRun]) -> dict[str, dict[int, FinishedRun]]:
    """Return the runs of each row by seed; a `ValueError` where a row lacks a seed, or runs are not alike."""
    rows: dict[str, dict[int, FinishedRun]] = {}
    for run in runs:
        rows.setdefault(_row(run), {})[run.settings.seed] = run
    seeds = sorted({run.settings.seed for run in runs})
    lacking = [f"{row} seed {seed}" for row, found in rows.items() for seed in seeds if seed not in found]
    if lacking or sum(map(len, rows.values())) < len(runs):
        raise ValueError(
            f"every row needs one run of each seed; missing: {', '.join(lacking) or 'none, but one is twice'}"
        )
    for seed in seeds:
        alike([found[seed] for found in rows.values()])
    first = [rows[_row(runs[0])][seed] for seed in seeds]
    alike([replace(run, settings=replace(run.settings, seed=seeds[0])) for run in first])
    return {row: {seed: found[seed] for seed in seeds} for row, found in rows.items()}


def _row(run: FinishedRun) -> str:
    """The row of an experiment, whose runs lie in ROW/seed-N; of another run the method."""
    return run.folder.parent.name if run.folder.name == f"seed-{run.settings.seed}" else run.settings.method


def table(arms: Sequence[tuple[str, Sequence[Centres]]], beside: Sequence[int]) -> str:
    """Each arm with its difference to those that are named by their places; each mean is over seeds."""
    names = sorted(arms[0][1][0])
    body = []
    for place, (label, arm) in enumerate(arms):
        each = [f"{100 * np.mean([accuracy(one[name]) for one in arm]):.1f}" for name in names]
        pooled = f"{np.mean([over_all_rows(one).value for one in arm]):.1f}"
        told = [cell for other in beside for cell in (_apart(arm, arms[other][1]) if place != other else ("", ""))]
        body.append([label, *each, str(average(arm)), pooled, *told])
    over = [cell for other in beside for cell in (f"over {arms[other][0]}", "by seed")]
    return markdown(["on the same network", *names, "mean", "all rows", *over], body, "").strip()


def _apart(arm: Sequence[Centres], other: Sequence[Centres]) -> tuple[str, str]:
    each = [difference([one], [against]).value for one, against in zip(arm, other, strict=True)]
    return difference(arm, other).signed, by_seed(each)


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path, exists=True))
@click.option("--over", "others", multiple=True, metavar="ROW", help="Set each row beside this one, too.")
def main(folders: tuple[Path, ...], others: tuple[str, ...]) -> None:
    """Print the row of each RUN beside a head alone, as Markdown."""
    try:
        rows = rows_of([open_run(folder) for folder in folders])
        unknown = [row for row in others if row not in rows]
        if unknown:
            raise ValueError(f"no row {unknown[0]}; there are {', '.join(rows)}")
        first = next(iter(rows.values()))
        data = reported(next(iter(first.values())))
        arms = [(HEAD, heads_alone(list(first.values())))]
        for row, seeds in rows.items():
            arms.append((row, [scores_of(run, data, run.folder.parent / "scores") for run in seeds.values()]))
        labels = [label for label, _ in arms]
        click.echo(table(arms, [labels.index(label) for label in (HEAD, *others)]))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

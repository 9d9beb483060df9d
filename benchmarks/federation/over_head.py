"""How far runs stand above a head alone on the frozen network that they learned on: paired over lesions.

The head is a class-balanced logistic regression of each centre on its own training rows, the run's, over the mean of
the patches; its penalty, one for all centres, is chosen on `tune` rows. Each centre's model and head answer the same
reported rows, and a difference is taken over the same draws of lesions. All RUNs share data, network and training rows.

    python -m benchmarks.federation.over_head runs/evp/centres/*/seed-0
"""

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.federation.federation_scores import (
    Centres,
    difference,
    mean_over_centres,
    over_all_rows,
    reported,
    scored_rows,
    scores_of,
)
from benchmarks.federation.frozen_starts import best_strength, scores
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import load_federation
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.features import frozen_features

SHARED = ("data", "partition", "task", "classes", "colour", "labels", "images_per_site", "seed")  # alike in all runs


def head_alone(run: FinishedRun) -> Centres:
    """Score each centre's reported rows with its own regression on the run's network."""
    settings, px = run.settings, run.backbone.spec.image_px
    if settings.partition or settings.classes or settings.labels != 1:
        raise ValueError(
            f"{run.folder} has a partition, classes or a share of labels, which a head here does not follow"
        )
    limit, colour = settings.images_per_site or None, settings.colour
    federation = load_federation(
        settings.data, image_px=px, colour=colour, task=settings.task, seed=settings.seed, limit=limit
    )
    rows = Examples(federation.images, federation.labels, np.arange(len(federation.labels)))
    readouts = frozen_features(run.backbone, rows, torch.device("cpu"))
    features = np.asarray(readouts["mean"] if "mean" in readouts else readouts["pooled"])
    found = scores(features, federation, best_strength(features, federation))
    return {name: scored_rows(found[f"{name}.{name}"], federation, name) for name in federation.sites}


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
        if run.backbone.spec.sha256 != runs[0].backbone.spec.sha256:
            raise ValueError(f"{run.folder} and {runs[0].folder} stand on different networks")


def table(head: Centres, arms: Sequence[tuple[str, Centres]]) -> str:
    """The head, then each run with its difference."""
    names = sorted(head)
    body = []
    for label, arm in (("head alone", head), *arms):
        gap = difference([arm], [head])
        each = [f"{mean_over_centres({name: arm[name]}).value:.1f}" for name in names]
        told = "" if arm is head else gap.signed
        body.append([label, *each, str(mean_over_centres(arm)), f"{over_all_rows(arm).value:.1f}", told])
    return markdown(["on the same network", *names, "mean", "all rows", "over the head"], body, "").strip()


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path, exists=True))
def main(folders: tuple[Path, ...]) -> None:
    """Print each RUN beside a head alone, as Markdown."""
    try:
        runs = [open_run(folder) for folder in folders]
        alike(runs)
        data = reported(runs[0])
        arms = [(run.settings.method, scores_of(run, data, run.folder.parent / "scores")) for run in runs]
        click.echo(table(head_alone(runs[0]), arms))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

"""Take apart what prompts add to a frozen network: the features that they make, and the head that reads them.

Each RUN's own head is judged on the training rows it learned from and on the reported rows. Beside it a logistic
regression of each centre reads the same features: those that the run's prompts make, or the frozen ones where it has
none. Its penalty is chosen on `tune` rows. So two runs that differ in prompts alone differ in the regression by what
prompts do to the features, and a run's own head differs from its regression by how it was learned. All answers are
forced. Each head and each regression is set beside that of the first RUN, over the same draws of lesions.

    python -m benchmarks.causes.what_prompts_add runs/head runs/evp runs/head-ce runs/evp-ce
"""

from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.federation.federation_scores import Centres, difference, mean_over_centres, scored_rows
from benchmarks.federation.frozen_starts import best_strength
from benchmarks.federation.over_head import alike
from benchmarks.uncertainty.uncertainty_measures import Features, tensors_of
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.accuracy import balanced_accuracy
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.sites import load_data, report_rows
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.linear_probe import fit_predict


@dataclass(frozen=True)
class Taken:
    """A run, taken apart."""

    label: str
    learned: float  # its own heads on their training rows, balanced accuracy in per cent, mean of the centres
    own: Centres  # its own heads on reported rows
    fitted: float  # the regression on the same features, as `learned`
    refitted: Centres  # the same on reported rows


def taken(run: FinishedRun, federation: Federation) -> Taken:
    """Judge a run's heads, and what a regression makes of their features."""
    features = np.zeros((len(federation.labels), run.backbone.spec.width), np.float32)
    learned, own = [], dict[str, np.ndarray]()
    for name, site in federation.sites.items():
        predictor = run.predictor(name)
        judged_on = report_rows(federation, name).rows
        rows = np.concatenate([site.train, site.tune, judged_on])
        read = Features({"own": federation.images}, prompted=True).of(predictor, "own", federation.places(rows))
        features[rows] = read.numpy()
        judged = predictor.score_module.judge(read, tensors_of(predictor.tensors), None)
        answers = dict(zip(rows.tolist(), judged.probabilities.numpy(), strict=True))
        said = np.stack([answers[row] for row in site.train.tolist()]).argmax(axis=1)
        learned.append(100 * (balanced_accuracy(said, federation.labels[site.train]) or 0.0))
        own[name] = np.stack([answers[row] for row in judged_on.tolist()])
    strength, classes = best_strength(features, federation), len(federation.classes)
    fitted, refitted = [], dict[str, np.ndarray]()
    for name, site in federation.sites.items():
        labels = federation.labels
        rows = np.concatenate([site.train, report_rows(federation, name).rows])
        found = fit_predict(features[site.train], labels[site.train], features[rows], classes, strength=strength)
        said, refitted[name] = found[: len(site.train)].argmax(axis=1), found[len(site.train) :]
        fitted.append(100 * (balanced_accuracy(said, labels[site.train]) or 0.0))
    both = [
        {name: scored_rows(found[name], federation, name) for name in federation.sites} for found in (own, refitted)
    ]
    return Taken(run.folder.name, float(np.mean(learned)), both[0], float(np.mean(fitted)), both[1])


def table(parts: list[Taken]) -> str:
    """A line for each run."""
    head = ["run", "its head, training rows", "reported rows", "over the first"]
    head += ["regression, training rows", "reported rows", "over the first"]
    body = []
    for number, part in enumerate(parts):
        cells = [part.label]
        for learned, judged, first in (
            (part.learned, part.own, parts[0].own),
            (part.fitted, part.refitted, parts[0].refitted),
        ):
            gap = difference([judged], [first])
            told = gap.signed if number else ""
            cells += [f"{learned:.1f}", str(mean_over_centres(judged)), told]
        body.append(cells)
    return markdown(head, body, "").strip()


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="RUN…", type=click.Path(path_type=Path, exists=True))
def main(folders: tuple[Path, ...]) -> None:
    """Print each RUN taken apart, as Markdown."""
    try:
        runs = [open_run(folder) for folder in folders]
        alike(runs)
        federation = load_data(runs[0].settings, runs[0].backbone.spec.image_px)
        click.echo(table([taken(run, federation) for run in runs]))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

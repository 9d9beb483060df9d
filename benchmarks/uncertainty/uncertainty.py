"""Which uncertainty of a finished run is worth referring by: of its answers, and of pictures that it cannot know.

For each site, on its `tune` rows (which decide) and on its reported rows (which are told):

    risk        error among the 70 % and 90 % most certain rows, over the error among all (1: no better than chance)
    AURC        area under the risk-coverage curve
    AUROC       of the uncertainty, against pictures that are not of the task, and against diagnoses that the run did
                not learn: rows of the data whose class the run does not have, train and tune rows or reported ones
    threshold   what `refer_threshold` chooses on tune rows: share referred, and error among the rest

Measures of the run's model:

    vacuity           K/S after the discount by distance: what `edgefl score` refers by
    vacuity, no discount; dissonance
    entropy, 1 - p    of the probabilities that are shown, p the largest
    distance          d² of docs/methods.md 1.8: one Gaussian over all training rows
    Mahalanobis       min over classes, shared covariance, on what the head reads (Lee et al., arXiv 1807.03888)

and of heads learned anew on its prompted network, each from a seed of its own (Lakshminarayanan et al., arXiv
1612.01474): of the first one alone, and of the mean of all; disagreement is the entropy of the mean less the mean
entropy. They learn as the run's head did (draws of classes, epochs, rates, KL weights), but on its finished prompts and
without turned and mirrored pictures. So several are compared with one of them, too: "minus one new head".

Intervals draw lesions, 1,000 times; a foreign picture is a lesion of its own. Differences are paired: the same draws.
Several RUNs are seeds of one command: a figure is then their mean, draw by draw, and each seed's stands beside it. A
seed draws its own `tune` rows, so means of these have no interval.

Without RUN, a head alone is learned at each site of `--data` (`prompts=none`), and `--without` leaves classes out.

    python -m benchmarks.uncertainty.uncertainty runs/six-s* --foreign textures --foreign vqa_rad.zip --plot out.png
    python -m benchmarks.uncertainty.uncertainty --data manifest:fed_isic2019_84.zip --without BCC,VASC --foreign skin
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.uncertainty.uncertainty_figures import Part, figures_of_seeds
from benchmarks.uncertainty.uncertainty_measures import (
    Features,
    HeadRecipe,
    Rows,
    Said,
    bench84_recipe,
    fit_gaussians,
    frozen_model,
    head_recipe_of,
    learned_heads,
    said_by,
    together,
)
from benchmarks.uncertainty.uncertainty_shown import picture, tables
from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Predictor
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.data.partitions.partition import PARTITION_FILE, read_partition
from edgefl_trainer.data.sources.foreign import read_foreign
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.sites import load_data
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.cnn import Backbone

UNSEEN, LEAST_UNSEEN = "diagnoses not learned", 10  # rows at a site: of fewer an area says nothing


@dataclass(frozen=True)
class Study:
    """The rows that models learned from and are judged on, and the pictures that they are to know apart."""

    backbone: Backbone
    own: Federation
    whole: Federation  # with the rows of classes that were not learned
    learned: Sequence[str]  # classes; empty where none was left out
    features: Features
    recipe: HeadRecipe  # of heads that are learned anew


@dataclass(frozen=True)
class Seed:
    """What was learned from one seed: the models of a run, or none, where heads alone are learned."""

    study: Study
    models: Mapping[str, Predictor]
    number: int  # seed of the heads that are learned anew


class SiteModels:
    """A site's model, and heads that are learned anew on its network and prompts."""

    def __init__(self, model: Predictor | None, study: Study, site: str, heads: int, seed: int) -> None:
        """Take the model of a run; without one, a head is learned on the frozen network."""
        rows, own, self.features = study.own.sites[site], study.own, study.features
        train, tune = (own.places(part) for part in (rows.train, rows.tune))
        network = model or frozen_model(study.backbone, self.features, train, own.labels[rows.train], len(own.classes))
        taught, tuned = (
            Rows(self.features.of(network, "own", places), torch.from_numpy(own.labels[part]))
            for places, part in ((train, rows.train), (tune, rows.tune))
        )
        self.gaussians = fit_gaussians(taught)
        seeds = range(seed * (heads + 1), (seed + 1) * (heads + 1))
        new = learned_heads(network, taught, tuned, seeds if model is None else seeds[:-1], study.recipe)
        self.model, self.heads = (new[0], new[1:]) if model is None else (model, new)

    def said(self, source: str, places: NDArray[np.int64]) -> tuple[Said, ...]:
        """What the model says, then the first new head, then all new heads together."""
        features = self.features.of(self.model, source, places)
        new = [said_by(head, features) for head in self.heads]
        counts = (1, len(new)) if new else ()
        return (
            said_by(self.model, features, self.gaussians),
            *(together(new[:count], self.model.seen) for count in counts),
        )


def study_of_run(run: FinishedRun, foreign: Mapping[str, NDArray[np.uint8]]) -> Study:
    """The rows that a run had, and those of its data whose class it did not learn."""
    path, px = run.folder / PARTITION_FILE, run.backbone.spec.image_px
    own = load_data(run.settings, px, read_partition(path) if path.exists() else None)
    whole = load_federation(run.settings.data, image_px=px, colour=run.settings.colour)
    gathered = run.settings.task != "all"  # such a task has learned from all classes
    pictures = {"own": own.images, "whole": whole.images, **foreign}
    learned = () if gathered else run.classes
    return Study(run.backbone, own, whole, learned, Features(pictures, prompted=True), head_recipe_of(run))


def seed_of_run(run: FinishedRun, foreign: Mapping[str, NDArray[np.uint8]]) -> Seed:
    """A run as one seed among several."""
    models = {site: run.predictor(site) for site in run.sites}
    return Seed(study_of_run(run, foreign), models, run.settings.seed)


def study_of_data(
    specs: Sequence[str],
    backbone: Backbone,
    without: Sequence[str],
    limit: int,
    epochs: int,
    foreign: Mapping[str, NDArray[np.uint8]],
) -> Study:
    """The rows that `bench84` would take of some data, but for those of some classes."""
    px = backbone.spec.image_px
    whole = load_federation(specs, image_px=px)
    kept = [name for name in whole.classes if name not in without]
    own = load_federation(specs, image_px=px, classes=kept, limit=limit)
    pictures = {"own": own.images, "whole": whole.images, **foreign}
    return Study(backbone, own, whole, kept, Features(pictures, prompted=False), bench84_recipe(epochs))


def parts_of(study: Study, models: Mapping[str, Predictor], heads: int, seed: int) -> dict[str, dict[str, Part]]:
    """Score every site: of each its `tune` part and its `reported` part.

    Of foreign pictures every second one stands beside the tune rows, the others beside the reported ones.
    """
    own, whole = study.own, study.whole
    unknown = [i for i, name in enumerate(whole.classes) if study.learned and name not in study.learned]
    found: dict[str, dict[str, Part]] = {}
    for site in models or own.sites:
        click.echo(f"scoring {site}", err=True)
        scores, rows, everyone = (
            SiteModels(models.get(site), study, site, heads, seed),
            own.sites[site],
            whole.sites[site],
        )
        sources = [name for name in study.features.pictures if name not in ("own", "whole")]
        strangers = {name: scores.said(name, np.arange(len(study.features.pictures[name]))) for name in sources}
        kinds = {
            "tune": (rows.tune, np.concatenate([everyone.train, everyone.tune])),
            "reported": (rows.rows(own.report_split), everyone.rows(whole.report_split)),
        }
        found[site] = {}
        for number, (kind, (mine, theirs)) in enumerate(kinds.items()):
            half = slice(number, None, 2)
            outside = {
                source: (_numbered(source, len(one[0].predicted[half])), tuple(each.take(half) for each in one))
                for source, one in strangers.items()
            }
            unseen = theirs[np.isin(whole.labels[theirs], unknown)]
            if len(unseen) >= LEAST_UNSEEN:
                names = tuple(whole.lesions[i] for i in unseen)
                outside[UNSEEN] = names, scores.said("whole", whole.places(unseen))
            lesions = tuple(own.lesions[i] for i in mine)
            found[site][kind] = Part(own.labels[mine], lesions, scores.said("own", own.places(mine)), outside)
    return found


def _numbered(source: str, pictures: int) -> tuple[str, ...]:
    """A lesion for each picture."""
    return tuple(f"{source} {number}" for number in range(pictures))


def measured(seeds: Sequence[Seed], heads: int) -> dict[str, Any]:
    """All figures, each the mean of the seeds: rows → site (and `mean`) → measure → figure."""
    found: dict[str, Any] = {"heads": heads, "seeds": [seed.number for seed in seeds]}
    found["classes"] = list(seeds[0].study.own.classes)
    return found | figures_of_seeds([parts_of(seed.study, seed.models, heads, seed.number) for seed in seeds])


@click.command()
@click.argument("folders", metavar="[RUN]…", nargs=-1, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data", "specs", multiple=True, metavar="SPEC", help="Learn heads on this data, without a run.")
@click.option("--backbone", default="derm-vit-tiny-84", show_default=True, help="Of these heads.")
@click.option("--without", default="", metavar="A,B", help="Classes of the data that these heads do not learn.")
@click.option("--images-per-site", "limit", default=1200, show_default=True, help="That these heads learn from.")
@click.option("--epochs", type=int, help="Of these heads; those of a RUN learn as long as it did.  [default: 30]")
@click.option("--seed", "numbers", multiple=True, type=int, help="Of these heads; repeatable.  [default: 0]")
@click.option("--heads", default=5, show_default=True, metavar="N", help="Heads of the ensemble.")
@click.option("--foreign", multiple=True, metavar="textures|skin|PATH", help="Pictures not of the task; repeatable.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the risk-coverage curves.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    folders: tuple[Path, ...], specs: tuple[str, ...], backbone: str, without: str, limit: int, epochs: int | None,
    numbers: tuple[int, ...], heads: int, foreign: tuple[str, ...], plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure every uncertainty of finished RUNs, or of heads that are learned on data."""
    if folders and epochs is not None:
        raise click.UsageError("heads of a RUN learn for as many epochs as it did: leave out --epochs.")
    try:
        runs = [open_run(folder) for folder in folders]
        network = runs[0].backbone if runs else load_backbone(backbone, image_px=None, seed=0)
        colour = runs[0].settings.colour if runs else "none"
        strangers = {Path(source).stem: read_foreign(source, network.spec.image_px, colour) for source in foreign}
        if runs:
            seeds = [seed_of_run(run, strangers) for run in runs]
        else:
            study = study_of_data(specs, network, without.split(","), limit, epochs or 30, strangers)
            seeds = [Seed(study, {}, number) for number in numbers or (0,)]
        found = measured(seeds, heads)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(found) if as_json else "\n".join(tables(found)))
    if plot is not None:
        write_atomic(plot, picture(found))


if __name__ == "__main__":
    main()

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
entropy. They learn without turned and mirrored pictures, so compare several with one of them.

Intervals draw lesions, 1,000 times; a foreign picture is a lesion of its own. Differences are paired: the same draws.

Without RUN, a head alone is learned at each site of `--data` (`prompts=none`), and `--without` leaves classes out.

    python benchmarks/uncertainty.py RUN --foreign textures --foreign vqa_rad.zip --plot out.png
    python benchmarks/uncertainty.py --data manifest:fed_isic2019_84.zip --without BCC,VASC --foreign skin
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
from uncertainty_measures import (
    TODAY,
    Features,
    Rows,
    Said,
    Values,
    fit_gaussians,
    frozen_model,
    learned_heads,
    said_by,
    together,
)
from uncertainty_shown import CURVE, MODELS, picture, tables

from edgefl_protocol.durable import write_atomic
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Predictor
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.data.partition import PARTITION_FILE, read_partition
from edgefl_trainer.data.sources.foreign import read_foreign
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.engine.sites import load_data
from edgefl_trainer.evaluate.calibration import refer_threshold
from edgefl_trainer.evaluate.intervals import Scored, aurc_of_draws, interval, lesion_weights, weighted_figures
from edgefl_trainer.evaluate.risk_coverage import risk_at, told_apart
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.cnn import Backbone

DRAWS = 1000
COVERAGES = (0.7, 0.9, 1.0)
UNSEEN, LEAST_UNSEEN = "diagnoses not learned", 10  # rows at a site: of fewer an area says nothing
Draws = dict[str, dict[str, Values]]  # measure → figure → its value, then its draws, (1 + R,)


@dataclass(frozen=True)
class Study:
    """The rows that models learned from and are judged on, and the pictures that they are to know apart."""

    backbone: Backbone
    own: Federation
    whole: Federation  # with the rows of classes that were not learned
    learned: Sequence[str]  # classes; empty where none was left out
    features: Features
    epochs: int  # of heads that are learned anew


@dataclass(frozen=True)
class Part:
    """Rows of one kind at a site, with what is said of them and of the pictures that do not belong."""

    targets: NDArray[np.int64]
    lesions: tuple[str, ...]
    said: tuple[Said, ...]  # the model; then all together, where there are several
    outside: Mapping[str, tuple[tuple[str, ...], tuple[Said, ...]]]  # source → lesions, and what is said of them


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
        new = learned_heads(network, taught, tuned, seeds if model is None else seeds[:-1], study.epochs)
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


def study_of_run(run: FinishedRun, epochs: int, foreign: Mapping[str, NDArray[np.uint8]]) -> Study:
    """The rows that a run had, and those of its data whose class it did not learn."""
    path, px = run.folder / PARTITION_FILE, run.backbone.spec.image_px
    own = load_data(run.settings, px, read_partition(path) if path.exists() else None)
    whole = load_federation(run.settings.data, image_px=px, colour=run.settings.colour)
    gathered = run.settings.task != "all"  # such a task has learned from all classes
    pictures = {"own": own.images, "whole": whole.images, **foreign}
    return Study(run.backbone, own, whole, () if gathered else run.classes, Features(pictures, prompted=True), epochs)


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
    return Study(backbone, own, whole, kept, Features(pictures, prompted=False), epochs)


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


def draws_of(part: Part, thresholds: Mapping[str, float]) -> Draws:
    """Every figure of every measure: first the figure itself, then its draws."""
    weights = weights_of(part.lesions)
    strangers = {source: weights_of(names) for source, (names, _) in part.outside.items()}
    found: Draws = {}
    for number, said in enumerate(part.said):
        wrong = said.predicted != part.targets
        model = {
            name: values
            for name, values in weighted_figures(
                Scored(said.probabilities, part.targets, said.predicted, None, part.lesions), weights
            ).items()
            if name in ("ece", "brier", "accuracy", "balanced_accuracy")
        }
        found[MODELS[number]] = model
        for name, values in said.measures.items():
            risk = risk_at(values, wrong, weights, COVERAGES)
            figures = {"aurc": aurc_of_draws(values, wrong, weights)}
            for column, coverage in enumerate(COVERAGES[:-1]):
                figures[f"risk {coverage:.0%}"] = risk[:, column] / np.where(risk[:, -1] > 0, risk[:, -1], np.nan)
            for source, (_, others) in part.outside.items():
                figures[source] = told_apart(values, others[number].measures[name], weights, strangers[source])
            kept = values <= thresholds[name]
            counted = (weights * kept).sum(axis=1)
            figures["referred"] = 1 - counted / weights.sum(axis=1)
            figures["error of the rest"] = (weights * (kept & wrong)).sum(axis=1) / np.where(
                counted > 0, counted, np.nan
            )
            found[name] = figures
    return found


def weights_of(lesions: Sequence[str]) -> Values:
    """A row of ones, then the draws, (1 + R, n)."""
    return np.concatenate([np.ones((1, len(lesions))), *lesion_weights(lesions, DRAWS)])


def thresholds_of(tune: Part) -> dict[str, float]:
    """What the rule of docs/methods.md 1.8 chooses for each measure, on tune rows."""
    found = {}
    for said in tune.said:
        correct = said.predicted == tune.targets
        for name, values in said.measures.items():
            ceiling = 0.999 if "vacuity" in name else float(np.inf)
            found[name] = refer_threshold(values, correct, ceiling=ceiling)
    return found


def mean_over(sites: Sequence[Draws]) -> Draws:
    """The mean of every figure over the sites that have it."""
    names = {name: {figure for site in sites for figure in site[name]} for name in sites[0]}
    return {
        name: {
            figure: np.nanmean([site[name][figure] for site in sites if figure in site[name]], axis=0)
            for figure in sorted(figures)
        }
        for name, figures in names.items()
    }


def figures_of(draws: Draws) -> dict[str, dict[str, object]]:
    """Value and interval of every figure, and of its difference from that of vacuity as it is used today."""
    found: dict[str, dict[str, object]] = {}
    for name, figures in draws.items():
        found[name] = {}
        for figure, values in figures.items():
            less = values - draws[TODAY][figure] if figure in draws[TODAY] else None
            told = {"value": float(values[0]), "interval": interval(values[1:])}
            if less is not None and name != TODAY:
                told |= {"difference": float(less[0]), "difference_interval": interval(less[1:])}
            found[name][figure] = told
    return found


def measured(study: Study, models: Mapping[str, Predictor], heads: int, seed: int) -> dict[str, Any]:
    """All figures: rows → site (and `mean`) → measure → figure."""
    parts = parts_of(study, models, heads, seed)
    thresholds = {site: thresholds_of(both["tune"]) for site, both in parts.items()}
    found: dict[str, Any] = {"heads": heads, "seed": seed, "classes": list(study.own.classes)}
    for kind in ("tune", "reported"):
        draws = {site: draws_of(both[kind], thresholds[site]) for site, both in parts.items()}
        found[kind] = {
            name: figures_of(each) for name, each in (*draws.items(), ("mean", mean_over(list(draws.values()))))
        }
    found["rows"] = {site: {kind: len(part.targets) for kind, part in both.items()} for site, both in parts.items()}
    found["outside"] = {
        site: {source: len(names) for source, (names, _) in both["reported"].outside.items()}
        for site, both in parts.items()
    }
    found["curves"] = {site: curves_of(both["reported"]) for site, both in parts.items()}
    return found


def curves_of(part: Part) -> dict[str, list[float]]:
    """The risk at each coverage of `CURVE`, of each measure."""
    once = np.ones((1, len(part.targets)))
    return {
        name: [float(value) for value in risk_at(values, said.predicted != part.targets, once, CURVE)[0]]
        for said in part.said
        for name, values in said.measures.items()
    }


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data", "specs", multiple=True, metavar="SPEC", help="Learn heads on this data, without a run.")
@click.option("--backbone", default="derm-vit-tiny-84", show_default=True, help="Of these heads.")
@click.option("--without", default="", metavar="A,B", help="Classes of the data that these heads do not learn.")
@click.option("--images-per-site", "limit", default=1200, show_default=True, help="That these heads learn from.")
@click.option("--epochs", default=30, show_default=True, help="Of heads that are learned anew.")
@click.option("--seed", default=0, show_default=True, help="Of the heads.")
@click.option("--heads", default=5, show_default=True, metavar="N", help="Heads of the ensemble.")
@click.option("--foreign", multiple=True, metavar="textures|skin|PATH", help="Pictures not of the task; repeatable.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the risk-coverage curves.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    run: Path | None, specs: tuple[str, ...], backbone: str, without: str, limit: int, epochs: int, seed: int,
    heads: int, foreign: tuple[str, ...], plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure every uncertainty of a finished RUN, or of heads that are learned on data."""
    try:
        finished = open_run(run) if run is not None else None
        network = load_backbone(backbone, image_px=None, seed=0) if finished is None else finished.backbone
        colour = "none" if finished is None else finished.settings.colour
        strangers = {Path(source).stem: read_foreign(source, network.spec.image_px, colour) for source in foreign}
        if finished is None:
            study = study_of_data(specs, network, without.split(","), limit, epochs, strangers)
            found = measured(study, {}, heads, seed)
        else:
            models = {site: finished.predictor(site) for site in finished.sites}
            found = measured(study_of_run(finished, epochs, strangers), models, heads, seed)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(found) if as_json else "\n".join(tables(found)))
    if plot is not None:
        write_atomic(plot, picture(found))


if __name__ == "__main__":
    main()

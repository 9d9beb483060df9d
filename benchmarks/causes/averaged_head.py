"""What one linear head for all sites can reach on frozen features, and what averaging makes of it.

Three ways to fit the same head, class-balanced at each site, readout mean of patches or the only one there is:

    own       a logistic regression for each site
    one       one logistic regression on the rows of all sites at once: what no averaging can beat by much
    averaged  FedAvg of heads: AdamW on cross-entropy, E epochs a round, weighted by training rows

`own` minus `one` is what a single model costs where cameras differ; `one` minus `averaged` is what averaging costs.
Features are standardised over all sites. Judged on `test` rows, else `val`.

    python -m benchmarks.causes.averaged_head --backbone run:runs/fedmae --task nevus \\
        --data manifest:fed_isic2019_84.zip
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import load_federation
from edgefl_trainer.evaluate.metrics import site_metrics
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import fit_predict
from edgefl_trainer.models.backbones import load_backbone

BATCH = 32
Figures = dict[str, float]


@dataclass(frozen=True)
class SiteRows:
    """Standardised features (n, D) float32 and targets (n,) of one site's training rows and reported rows."""

    fit: np.ndarray
    target: np.ndarray
    shown: np.ndarray
    truth: np.ndarray


def read_sites(specs: Sequence[str], backbone_name: str, task: str, limit: int, seed: int) -> dict[str, SiteRows]:
    """The features of every site."""
    federation = load_federation(specs, image_px=84, task=task, seed=seed, limit=limit or None)
    backbone = load_backbone(backbone_name, image_px=federation.images.shape[1], seed=seed)
    found = {}
    for name, rows in federation.sites.items():
        halves: list[np.ndarray] = []
        for chosen in (rows.train, rows.rows(federation.report_split)):
            examples = Examples(federation.images, federation.labels, chosen)
            readouts = frozen_features(backbone, examples, torch.device("cpu"))
            halves += [readouts["mean"] if "mean" in readouts else next(iter(readouts.values())), examples.targets]
        found[name] = halves
    everything = np.concatenate([halves[0] for halves in found.values()])
    mean, std = everything.mean(axis=0), everything.std(axis=0) + 1e-6
    return {
        name: SiteRows((fit - mean) / std, target, (shown - mean) / std, truth)
        for name, (fit, target, shown, truth) in found.items()
    }


def judged(sites: Mapping[str, SiteRows], predicted: Mapping[str, np.ndarray]) -> Figures:
    """Balanced accuracy of each site and their mean."""
    figures = {}
    for name, site in sites.items():
        probabilities = predicted[name]
        value = site_metrics(probabilities, site.truth, predicted=probabilities.argmax(axis=1))["balanced_accuracy"]
        figures[name] = float("nan") if value is None else float(value)
    return {**figures, "mean": float(np.mean(list(figures.values())))}


def own(sites: Mapping[str, SiteRows], classes: int) -> Figures:
    """A regression for each site."""
    return judged(
        sites, {name: fit_predict(site.fit, site.target, site.shown, classes) for name, site in sites.items()}
    )


def one(sites: Mapping[str, SiteRows], classes: int, seed: int) -> Figures:
    """One regression for all: each site's classes drawn equally, as in training, then all rows together."""
    rng = np.random.default_rng(seed)
    drawn = {
        name: rng.choice(len(site.target), len(site.target), p=balanced(site.target)) for name, site in sites.items()
    }
    fit = np.concatenate([site.fit[drawn[name]] for name, site in sites.items()])
    target = np.concatenate([site.target[drawn[name]] for name, site in sites.items()])
    shown = np.concatenate([site.shown for site in sites.values()])
    ends = np.cumsum([len(site.shown) for site in sites.values()])[:-1]
    parts = np.split(fit_predict(fit, target, shown, classes, balanced=False), ends)
    return judged(sites, dict(zip(sites, parts, strict=True)))


def balanced(target: np.ndarray) -> np.ndarray:
    """Probabilities of rows that make every class equally likely."""
    weights: np.ndarray = 1.0 / np.bincount(target)[target]
    weights /= weights.sum()
    return weights


def averaged(
    sites: Mapping[str, SiteRows], classes: int, *, rounds: Sequence[int], epochs: int, rate: float, seed: int
) -> dict[int, Figures]:
    """FedAvg of heads; figures after each of `rounds`."""
    rng = np.random.default_rng(seed)
    width = next(iter(sites.values())).fit.shape[1]
    head = torch.zeros((classes, width + 1))
    total = sum(len(site.target) for site in sites.values())
    found = {}
    for round_ in range(1, max(rounds) + 1):
        mean = torch.zeros_like(head)
        for site in sites.values():
            mean += len(site.target) / total * local(head, site, epochs, rate, rng)
        head = mean
        if round_ in rounds:
            scores = {name: torch.from_numpy(site.shown) @ head[:, :-1].T + head[:, -1] for name, site in sites.items()}
            found[round_] = judged(sites, {name: value.softmax(dim=1).numpy() for name, value in scores.items()})
    return found


def local(head: torch.Tensor, site: SiteRows, epochs: int, rate: float, rng: np.random.Generator) -> torch.Tensor:
    """Some epochs at one site, classes drawn equally."""
    learned = head.clone().requires_grad_()
    optimizer = torch.optim.AdamW([learned], lr=rate, weight_decay=1e-2)
    features, target = torch.from_numpy(site.fit), torch.from_numpy(site.target)
    for _ in range(epochs):
        order = rng.choice(len(target), len(target), p=balanced(site.target))
        for start in range(0, len(order), BATCH):
            rows = torch.from_numpy(order[start : start + BATCH])
            loss = cross_entropy(features[rows] @ learned[:, :-1].T + learned[:, -1], target[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return learned.detach()


@click.command()
@click.option("--data", "specs", multiple=True, required=True, metavar="SPEC", help="Data SPEC; may be repeated.")
@click.option("--backbone", required=True, metavar="NAME", help="As in edgefl-train run.")
@click.option(
    "--task", default="nevus", show_default=True, type=click.Choice(["all", "nevus"]), help="What is learned."
)
@click.option(
    "--limit", default=1200, show_default=True, metavar="N", help="Most training images of a site, 0 for all."
)
@click.option(
    "--rounds", default=60, show_default=True, metavar="N", help="Rounds of averaging; 5 and 20 are shown too."
)
@click.option("--epochs", default=2, show_default=True, metavar="N", help="Local epochs of a round.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of split and draws.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def main(
    specs: tuple[str, ...],
    backbone: str,
    task: str,
    limit: int,
    rounds: int,
    epochs: int,
    seed: int,
    as_json: bool,
) -> None:
    """Measure what one head for all sites costs, by itself and through averaging."""
    try:
        sites = read_sites(specs, backbone, task, limit, seed)
    except EdgeflError as error:
        raise click.ClickException(str(error)) from error
    classes = int(max(site.target.max() for site in sites.values())) + 1
    rows: dict[str, Figures] = {"own": own(sites, classes), "one": one(sites, classes, seed)}
    shown = sorted({5, 20, rounds} & set(range(1, rounds + 1)))
    for rate in (5e-3, 5e-4):
        for round_, figures in averaged(sites, classes, rounds=shown, epochs=epochs, rate=rate, seed=seed).items():
            rows[f"averaged, rate {rate:g}, round {round_}"] = figures
    if as_json:
        click.echo(json.dumps(rows, allow_nan=False))
        return
    click.echo(f"{'head':<34}" + "".join(f"{name:>15}" for name in [*sites, "mean"]))
    for label, figures in rows.items():
        click.echo(f"{label:<34}" + "".join(f"{figures[name]:>15.3f}" for name in [*sites, "mean"]))


if __name__ == "__main__":
    main()

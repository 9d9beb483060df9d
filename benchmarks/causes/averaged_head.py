"""What one linear head for all sites can reach on frozen features, and what averaging makes of it.

Three ways to fit the same head, classes weighed equally at each site, readout mean of patches or the only one there is:

    own       a logistic regression for each site
    one       one logistic regression on the rows of all sites at once, where each site counts once or each row does
    averaged  FedAvg of heads: AdamW on cross-entropy, E epochs a round, weighted by training rows

A regression minimises a penalised loss and not the figure that is shown, so none is a bound of what averaging reaches.
Its penalty is the one of `frozen_starts.STRENGTHS` with the best mean over sites of balanced accuracy on `tune` rows:
one for the regressions of all sites together, one for each `one`. The lines with C = 1 are those of earlier tables,
whose penalty nobody chose; there `one` was fitted to rows drawn anew. Rates and rounds of averaging are all shown.

Features are standardised over all sites. Judged on `test` rows, else `val`. Differences are over the same draws of
lesions: from `own`, and from the `one` where each site counts once.

    python -m benchmarks.causes.averaged_head --backbone derm-vit-tiny-84 --data manifest:fed_isic2019_84.zip
"""

import warnings
from collections.abc import Mapping, Sequence

import click
import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy

from benchmarks.federation.federation_scores import Centres, accuracy, difference, mean_over_centres, scored_rows
from benchmarks.federation.frozen_starts import STRENGTHS, best_strength, scores
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.accuracy import balanced_accuracy
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.intervals import Scored
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import MAX_ITERATIONS, STRENGTH, fit_predict
from edgefl_trainer.models.backbones import load_backbone

BATCH = 32
OWN, ONE = "one for each site", "one for all, each site once"  # what the others are compared with
Features = Float[np.ndarray, "B D"]  # of every row of the data; NaN where a row is neither learned from nor judged
Rows = Int[np.ndarray, " R"]


def read_features(federation: Federation, backbone_name: str, seed: int) -> Features:
    """Compute the features of the rows that are learned from, tuned on and judged, standardised over all sites."""
    backbone = load_backbone(backbone_name, image_px=federation.images.shape[1], seed=seed)
    features = np.full((len(federation.labels), backbone.spec.width), np.nan, np.float32)
    for name, site in federation.sites.items():
        for rows in (site.train, site.tune, report_rows(federation, name).rows):
            examples = Examples(federation.images, federation.labels, rows)
            readouts = frozen_features(backbone, examples, torch.device("cpu"))
            features[rows] = readouts["mean"] if "mean" in readouts else next(iter(readouts.values()))
    fit = features[np.concatenate([site.train for site in federation.sites.values()])]
    return np.asarray((features - fit.mean(axis=0)) / (fit.std(axis=0) + 1e-6))


def own(federation: Federation, features: Features, strength: float) -> Centres:
    """A regression for each site."""
    found = scores(features, federation, strength)
    return {name: scored_rows(found[f"{name}.{name}"], federation, name) for name in federation.sites}


def one(federation: Federation, features: Features, *, sites_alike: bool) -> tuple[float, Centres]:
    """Fit one regression to the rows of all sites; return the chosen inverse penalty and the scores.

    Args:
        federation: the sites.
        features: of its rows.
        sites_alike: the rows of each site weigh as much together as another's; else as much as they are many.
    """
    fit = np.concatenate([site.train for site in federation.sites.values()])
    weights = row_weights([federation.labels[site.train] for site in federation.sites.values()], sites_alike)
    tune = {name: site.tune for name, site in federation.sites.items()}
    best, strength, model = -1.0, STRENGTHS[0], None
    for tried in STRENGTHS:
        regression = LogisticRegression(C=tried, max_iter=MAX_ITERATIONS)
        with warnings.catch_warnings():
            # As in `fit_predict`: a not quite settled fit is still a fair one.
            warnings.simplefilter("ignore", ConvergenceWarning)
            regression.fit(features[fit], federation.labels[fit], sample_weight=weights)
        reached = [
            balanced_accuracy(regression.predict(features[rows]), federation.labels[rows]) or 0.0
            for rows in tune.values()
        ]
        if np.mean(reached) > best:
            best, strength, model = float(np.mean(reached)), tried, regression
    assert model is not None
    found = {}
    for name in federation.sites:
        rows = report_rows(federation, name).rows
        said = np.zeros((len(rows), len(federation.classes)))
        said[:, model.classes_] = model.predict_proba(features[rows])
        found[name] = scored_rows(said, federation, name)
    return strength, found


def row_weights(targets: Sequence[Rows], sites_alike: bool) -> Float[np.ndarray, " R"]:
    """Weights of the sites' rows, one site after the other, with mean 1; the classes of a site weigh equally."""
    total = sum(len(target) for target in targets)
    shares = [1 / len(targets) if sites_alike else len(target) / total for target in targets]
    return np.concatenate([total * share * balanced(target) for share, target in zip(shares, targets, strict=True)])


def one_of_drawn_rows(federation: Federation, features: Features, seed: int) -> Centres:
    """One regression for all as in earlier tables: each site's classes drawn equally, all rows together, C = 1."""
    rng = np.random.default_rng(seed)
    drawn = [
        rng.choice(site.train, len(site.train), p=balanced(federation.labels[site.train]))
        for site in federation.sites.values()
    ]
    fit = np.concatenate(drawn)
    found = {}
    for name in federation.sites:
        shown = features[report_rows(federation, name).rows]
        said = fit_predict(features[fit], federation.labels[fit], shown, len(federation.classes), balanced=False)
        found[name] = scored_rows(said, federation, name)
    return found


def balanced(target: Rows) -> Float[np.ndarray, " R"]:
    """Probabilities of rows that make every class equally likely."""
    weights: np.ndarray = 1.0 / np.bincount(target)[target]
    weights /= weights.sum()
    return weights


def averaged(
    federation: Federation, features: Features, *, rounds: Sequence[int], epochs: int, rate: float, seed: int
) -> dict[int, Centres]:
    """FedAvg of heads; the scores after each of `rounds`."""
    rng = np.random.default_rng(seed)
    head = torch.zeros((len(federation.classes), features.shape[1] + 1))
    sites = federation.sites
    total = sum(len(site.train) for site in sites.values())
    found: dict[int, Centres] = {}
    for round_ in range(1, max(rounds) + 1):
        mean = torch.zeros_like(head)
        for site in sites.values():
            learned = local(head, features[site.train], federation.labels[site.train], epochs, rate, rng)
            mean += len(site.train) / total * learned
        head = mean
        if round_ in rounds:
            found[round_] = {name: _scored(head, federation, features, name) for name in sites}
    return found


def _scored(head: torch.Tensor, federation: Federation, features: Features, name: str) -> Scored:
    shown = torch.from_numpy(features[report_rows(federation, name).rows])
    said = (shown @ head[:, :-1].T + head[:, -1]).softmax(dim=1)
    return scored_rows(said.numpy(), federation, name)


def local(
    head: torch.Tensor, fit: Features, targets: Rows, epochs: int, rate: float, rng: np.random.Generator
) -> torch.Tensor:
    """Some epochs at one site, classes drawn equally."""
    learned = head.clone().requires_grad_()
    optimizer = torch.optim.AdamW([learned], lr=rate, weight_decay=1e-2)
    features, target = torch.from_numpy(fit), torch.from_numpy(targets)
    for _ in range(epochs):
        order = rng.choice(len(target), len(target), p=balanced(targets))
        for start in range(0, len(order), BATCH):
            rows = torch.from_numpy(order[start : start + BATCH])
            loss = cross_entropy(features[rows] @ learned[:, :-1].T + learned[:, -1], target[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return learned.detach()


def arms(
    federation: Federation, features: Features, *, rounds: int, epochs: int, seed: int
) -> dict[str, tuple[str, Centres]]:
    """Every way: how it was done, and the scores of each site."""
    strength = best_strength(features, federation)
    found = {OWN: (f"C = {strength:g}", own(federation, features, strength))}
    for label, alike in ((ONE, True), ("one for all, each row once", False)):
        strength, centres = one(federation, features, sites_alike=alike)
        found[label] = (f"C = {strength:g}", centres)
    for rate in (5e-3, 5e-4):
        shown = sorted({5, 20, rounds} & set(range(1, rounds + 1)))
        learned = averaged(federation, features, rounds=shown, epochs=epochs, rate=rate, seed=seed)
        found |= {f"averaged, rate {rate:g}, round {round_}": ("", centres) for round_, centres in learned.items()}
    found[f"{OWN}, unchosen"] = (f"C = {STRENGTH:g}", own(federation, features, STRENGTH))
    found["one for all, rows drawn, unchosen"] = (f"C = {STRENGTH:g}", one_of_drawn_rows(federation, features, seed))
    return found


def table(found: Mapping[str, tuple[str, Centres]]) -> str:
    """A line for each way, with its differences from `OWN` and from `ONE`."""
    names, body = list(found[OWN][1]), []
    for label, (how, arm) in found.items():
        each = [f"{100 * accuracy(arm[name]):.1f}" for name in names]
        gaps = ["" if label == other else difference([arm], [found[other][1]]).signed for other in (OWN, ONE)]
        body.append([f"{label}, {how}" if how else label, *each, str(mean_over_centres(arm)), *gaps])
    return markdown(["linear head", *names, "mean", f"over {OWN}", f"over {ONE}"], body, "").strip()


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
def main(
    specs: tuple[str, ...], backbone: str, task: str, limit: int, rounds: int, epochs: int, seed: int
) -> None:  # fmt: skip
    """Print what one head for all sites costs, by itself and through averaging, as Markdown."""
    try:
        federation = load_federation(specs, image_px=84, task=task, seed=seed, limit=limit or None)
        features = read_features(federation, backbone, seed)
        click.echo(table(arms(federation, features, rounds=rounds, epochs=epochs, seed=seed)))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

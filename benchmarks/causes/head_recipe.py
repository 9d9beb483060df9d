"""What the recipe of FedEvPrompt's head costs beside a logistic regression, on frozen features and without prompts.

Each centre learns a linear head on the mean of the patches, standardised over its own training rows, with classes drawn
equally: AdamW, by the evidential loss or by cross-entropy, as `bench84` has it and with other epochs, rates and weight
decays. Pictures are neither turned nor mirrored, so an epoch costs nothing. Beside them stands a class-balanced
logistic regression whose penalty, one for all centres, is chosen on `tune` rows. All answers are forced. Differences
are over the same draws of lesions. `--judge-on tune` is for choosing a recipe: the table then holds `tune` rows alone.

    python -m benchmarks.causes.head_recipe --data manifest:fed_isic2019_84.zip --backbone derm-vit-taught-84
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

import click
import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from benchmarks.federation.federation_scores import Centres, difference, mean_over_centres, scored_rows
from benchmarks.federation.frozen_starts import best_strength
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.accuracy import balanced_accuracy
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.learning.linear_probe import fit_predict
from edgefl_trainer.losses import evidential_loss
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.head import EvidenceKind, evidence_of, init_head

BATCH = 32
RATE, DECAY, EPOCHS = 5e-3, 1e-2, 10  # of `bench84`
LOSSES = ("evidential", "cross-entropy")
RECIPES = (  # epochs, rate, weight decay
    (EPOCHS, RATE, DECAY),
    *((epochs, RATE, DECAY) for epochs in (40, 160)),
    *((EPOCHS, RATE, decay) for decay in (1.0, 10.0)),
    *((epochs, RATE / 10, DECAY) for epochs in (EPOCHS, 40)),
)
Scores = dict[str, tuple[np.ndarray, np.ndarray]]  # of each centre: of its training rows, of its reported rows


def head_scores(
    federation: Federation, features: Float[np.ndarray, "B D"], loss: str, epochs: int, rate: float, decay: float
) -> Scores:
    """Learn each centre's head; return what it says."""
    found = {}
    for name, site in federation.sites.items():
        scaler = StandardScaler().fit(features[site.train])
        fit, shown = (standardised(scaler, features[rows]) for rows in (site.train, report_rows(federation, name).rows))
        targets, classes = torch.from_numpy(federation.labels[site.train]), len(federation.classes)
        head = learned_head(fit, targets, torch.ones(classes), loss, epochs, rate, decay, equal_draws=True)
        said = [head(rows).softmax(dim=1).numpy() for rows in (fit, shown)]
        found[name] = (said[0], said[1])
    return found


def standardised(scaler: StandardScaler, features: Float[np.ndarray, "B D"]) -> Float[Tensor, "B D"]:
    """Scale features as those of the training rows are scaled."""
    return torch.from_numpy(scaler.transform(features).astype(np.float32))


def learned_head(
    fit: Float[Tensor, "B D"], targets: Int[Tensor, " B"], prior: Float[Tensor, " K"], loss: str,
    epochs: int, rate: float, decay: float, *, equal_draws: bool, most_kl: float = 1.0,
    evidence: EvidenceKind = "softplus", start: float = 0.0, seed: int = 0,
) -> Callable[[Float[Tensor, "R D"]], Float[Tensor, "R K"]]:  # fmt: skip
    """Learn a head on standardised features; return what gives logits of others, without a gradient.

    `most_kl` is the weight of the KL term from the second epoch on; in `bench84` it is 1. Evidence is that of logits
    with `start` added, so that it can begin above the prior.
    """
    draws = torch.Generator().manual_seed(seed)
    shares = 1.0 / torch.bincount(targets)[targets] if equal_draws else torch.ones(len(targets))
    weight, bias = (one.requires_grad_() for one in init_head(len(prior), fit.shape[1], draws))
    optimizer = torch.optim.AdamW([weight, bias], lr=rate, weight_decay=decay)
    for epoch in range(epochs):
        for batch in torch.split(torch.multinomial(shares, len(targets), equal_draws, generator=draws), BATCH):
            logits = fit[batch] @ weight.T + bias
            given = evidence_of(logits + start, evidence)
            value = loss_of(loss, logits, given, targets[batch], prior, most_kl * min(1, epoch))
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
    return lambda rows: (rows @ weight.T + bias).detach()


def loss_of(
    loss: str, logits: Float[Tensor, "B K"], evidence: Float[Tensor, "B K"], targets: Int[Tensor, " B"],
    prior: Float[Tensor, " K"], kl_weight: float,
) -> Float[Tensor, ""]:  # fmt: skip
    """Compute a batch's loss.

    `evidential` and `evidential, logarithm` read evidence, with the squared error of FedEvPrompt and with the negative
    logarithm of the mean (Sensoy et al., arXiv 1806.01768, eq. 5 and 3); the others read a softmax of the logits.
    """
    if loss == "evidential":
        return evidential_loss(evidence, targets, prior, kl_weight)
    if loss == "evidential, logarithm":
        alpha = evidence + prior.to(logits)
        return cross_entropy(alpha.log(), targets)  # the softmax of ln(alpha) is the mean alpha / S
    if loss == "squared error":
        truth = one_hot(targets, logits.shape[1]).to(logits)
        return mse_loss(logits.softmax(dim=1), truth, reduction="sum") / len(targets)
    return cross_entropy(logits, targets)


def regression_scores(federation: Federation, features: Float[np.ndarray, "B D"]) -> Scores:
    """Fit each centre's regression; return what it says."""
    strength, found = best_strength(features, federation), {}
    for name, site in federation.sites.items():
        rows = np.concatenate([site.train, report_rows(federation, name).rows])
        labels, classes = federation.labels[site.train], len(federation.classes)
        said = fit_predict(features[site.train], labels, features[rows], classes, strength=strength)
        found[name] = (said[: len(labels)], said[len(labels) :])
    return found


def judged_on_tune(federation: Federation) -> Federation:
    """The same centres with their `tune` rows in the place of the reported ones, which nobody then sees."""
    nothing = np.empty(0, np.int64)
    sites = {name: replace(site, val=site.tune, test=nothing) for name, site in federation.sites.items()}
    return replace(federation, sites=sites)


def table(federation: Federation, arms: Mapping[str, Scores]) -> str:
    """A line for each way; the first is what the others are compared with."""
    body: list[list[str]] = []
    first: Centres = {}
    for label, found in arms.items():
        labels = {name: federation.labels[site.train] for name, site in federation.sites.items()}
        learned = np.mean([balanced_accuracy(found[name][0].argmax(axis=1), labels[name]) or 0.0 for name in found])
        judged = {name: scored_rows(found[name][1], federation, name) for name in found}
        first = first or judged
        gap = difference([judged], [first])
        told = "" if judged is first else gap.signed
        body.append([label, f"{100 * learned:.1f}", str(mean_over_centres(judged)), told])
    return markdown(["head on frozen features", "training rows", "judged rows", "over the first"], body, "").strip()


@click.command()
@click.option("--data", required=True, metavar="SPEC", help="The federation.")
@click.option("--task", default="nevus", show_default=True, help="Classes of the data.")
@click.option("--backbone", required=True, metavar="NAME", help="The frozen network.")
@click.option("--images-per-site", default=1200, show_default=True, metavar="N", help="Most training pictures.")
@click.option(
    "--judge-on", type=click.Choice(["reported", "tune"]), default="reported", show_default=True, help="Rows."
)
@click.option("--loss", "losses", type=click.Choice(LOSSES), multiple=True, default=LOSSES, help="Repeatable.")
@click.option(
    "--recipe",
    "recipes",
    metavar="EPOCHS RATE DECAY",
    type=(int, float, float),
    multiple=True,
    default=RECIPES,
    help="A way of learning; repeatable.  [default: those of the page]",
)
def main(
    data: str, task: str, backbone: str, images_per_site: int, judge_on: str, losses: tuple[str, ...],
    recipes: tuple[tuple[int, float, float], ...],
) -> None:  # fmt: skip
    """Print what each way of learning a head reaches, as Markdown."""
    try:
        network = load_backbone(backbone)
        federation = load_federation(
            [data], image_px=network.spec.image_px, task=task, seed=0, limit=images_per_site or None
        )
        if judge_on == "tune":
            federation = judged_on_tune(federation)
        rows = Examples(federation.images, federation.labels, np.arange(len(federation.labels)))
        features = np.asarray(frozen_features(network, rows, torch.device("cpu"))["mean"])
        arms = {"logistic regression": regression_scores(federation, features)}
        for loss, (epochs, rate, decay) in product(losses, recipes):
            label = f"{loss}, {epochs} epochs, rate {rate:g}, decay {decay:g}"
            arms[label] = head_scores(federation, features, loss, epochs, rate, decay)
        click.echo(table(federation, arms))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

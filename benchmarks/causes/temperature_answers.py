"""What a site's temperature does to the answers of an evidential head, on frozen features and without prompts.

Each centre learns a linear head as `bench84` has it: classes as often as they come, with the skewed prior of eq. 3, or
drawn equally, with a prior of ones. Its `tune` rows choose a temperature, once the likeliest of all, once the likeliest
that keeps the answers (docs/methods.md 1.8). The judged rows then show what each costs: right answers and balanced
accuracy, each in per cent with answers forced, the share of pictures that get no answer, the calibration error in
points, and the class of the largest prior, how often it is named over how often it is there.

    python -m benchmarks.causes.temperature_answers --data manifest:fed_isic2019_84.zip --backbone derm-vit-tiny-84
"""

from collections.abc import Callable, Sequence

import click
import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.preprocessing import StandardScaler

from benchmarks.causes.head_recipe import DECAY, EPOCHS, RATE, learned_head, standardised
from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.pictures.suspicious import NO_CLASS
from edgefl_protocol.rules.accuracy import balanced_accuracy
from edgefl_protocol.rules.bounds import TEMPERATURE_BOUNDS
from edgefl_trainer.contract import Examples
from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.calibration import fit_temperature, negative_log_likelihood, softplus_evidence
from edgefl_trainer.evaluate.metrics import expected_calibration_error, predicted_classes
from edgefl_trainer.evaluate.tables.text import markdown
from edgefl_trainer.learning.features import frozen_features
from edgefl_trainer.losses import class_prior
from edgefl_trainer.models.backbones import load_backbone

Fit = Callable[[Float[np.ndarray, "B K"], Int[np.ndarray, " B"], Float[np.ndarray, " K"], Sequence[bool]], float]
COLUMNS = ["temperatures", "right", "balanced", "no answer", "calibration error", "largest prior, named / there"]


def likeliest(
    logits: Float[np.ndarray, "B K"], targets: Int[np.ndarray, " B"], prior: Float[np.ndarray, " K"], _: Sequence[bool]
) -> float:
    """Choose the likeliest temperature, whatever becomes of the answers."""
    low, high = TEMPERATURE_BOUNDS
    grid = np.geomspace(low, high, 49).tolist()
    return float(min(grid, key=lambda one: negative_log_likelihood(logits, targets, prior, softplus_evidence, one)))


def keeps_answers(
    logits: Float[np.ndarray, "B K"], targets: Int[np.ndarray, " B"], prior: Float[np.ndarray, " K"],
    seen: Sequence[bool],
) -> float:  # fmt: skip
    """Choose as a run does."""
    return fit_temperature(logits, targets, prior, softplus_evidence, seen=seen)


def none(*_: object) -> float:
    """Leave the logits as they are."""
    return 1.0


FITS: dict[str, Fit] = {"none": none, "the likeliest": likeliest, "the likeliest that keeps the answers": keeps_answers}


def figures(
    federation: Federation, features: Float[np.ndarray, "B D"], name: str, *, equal_draws: bool
) -> list[list[float]]:
    """Learn a centre's head; return the numbers of `COLUMNS` for each of `FITS`."""
    site, judged = federation.sites[name], report_rows(federation, name).rows
    scaler = StandardScaler().fit(features[site.train])
    fit, tune, shown = (standardised(scaler, features[rows]) for rows in (site.train, site.tune, judged))
    targets = torch.from_numpy(federation.labels[site.train])
    counts = torch.bincount(targets, minlength=len(federation.classes))
    prior = torch.ones(len(counts)) if equal_draws else class_prior(counts)
    head = learned_head(fit, targets, prior, "evidential", EPOCHS, RATE, DECAY, equal_draws=equal_draws)
    weights, seen = prior.double().numpy(), (counts > 0).tolist()
    rarest, labels, found = int(np.where(seen, weights, -1.0).argmax()), federation.labels[judged], []
    for fit_one in FITS.values():
        chosen = fit_one(head(tune).double().numpy(), federation.labels[site.tune], weights, seen)
        alpha = softplus_evidence(head(shown).double().numpy() / chosen) + weights
        said = alpha / alpha.sum(axis=1, keepdims=True)
        forced = predicted_classes(said, None, seen)
        named = predicted_classes(said, len(weights) / alpha.sum(axis=1), seen)
        right, error = forced == labels, expected_calibration_error(said.max(axis=1), said.argmax(axis=1) == labels)
        shares = (right.mean(), balanced_accuracy(forced, labels) or 0.0, (named == NO_CLASS).mean(), error or 0.0)
        found.append(
            [chosen, *(100 * float(one) for one in shares), (forced == rarest).sum(), (labels == rarest).sum()]
        )
    return found


def lines(federation: Federation, features: Float[np.ndarray, "B D"], *, equal_draws: bool) -> list[list[str]]:
    """Make a row for each way of choosing a temperature, means of the centres."""
    centres = [figures(federation, features, name, equal_draws=equal_draws) for name in federation.sites]
    body = []
    for place, label in enumerate(FITS):
        rows = np.array([centre[place] for centre in centres])
        warm = f"{rows[:, 0].min():.2f} to {rows[:, 0].max():.2f}"
        named = "" if equal_draws else f"{rows[:, 5].sum():,.0f} / {rows[:, 6].sum():,.0f}"
        body.append([label, warm, *(f"{value:.1f}" for value in rows[:, 1:5].mean(axis=0)), named])
    return body


@click.command()
@click.option("--data", required=True, metavar="SPEC", help="The federation.")
@click.option("--task", default="all", show_default=True, help="Classes of the data.")
@click.option("--backbone", required=True, metavar="NAME", help="The frozen network.")
@click.option("--images-per-site", default=1200, show_default=True, metavar="N", help="Most training pictures.")
def main(data: str, task: str, backbone: str, images_per_site: int) -> None:
    """Print what each way of choosing a temperature does to the answers, as Markdown."""
    try:
        network = load_backbone(backbone)
        federation = load_federation(
            [data], image_px=network.spec.image_px, task=task, seed=0, limit=images_per_site or None
        )
        rows = Examples(federation.images, federation.labels, np.arange(len(federation.labels)))
        features = np.asarray(frozen_features(network, rows, torch.device("cpu"))["mean"])
        for equal_draws, draws in ((False, "as they come"), (True, "drawn equally")):
            body = lines(federation, features, equal_draws=equal_draws)
            click.echo(markdown([f"classes {draws}", *COLUMNS], body, ""))
    except (EdgeflError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()

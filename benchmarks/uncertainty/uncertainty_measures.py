"""Measures of uncertainty of one model, and of several together: what `uncertainty.py` compares."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol.errors import EdgeflError
from edgefl_protocol.rules.draws import Balance
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.calibration import fit_temperature, softplus_evidence
from edgefl_trainer.evaluate.metrics import entropy_nats, predicted_classes
from edgefl_trainer.learning.evidential import PRESETS, EvidentialRecipe
from edgefl_trainer.learning.unusual_features import SHRINKAGE, everything_usual, usual_features
from edgefl_trainer.losses import class_prior, evidential_loss
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.head import evidence_of, init_head
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions

BATCH = 64
TODAY = "vacuity"  # the measure that refers today
ONE_HEAD = "one new head"  # begins the names of its measures
NO_EVIDENCE = "the run has no evidence: name a run with an evidential loss"
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Said:
    """What one model, or several together, say of some pictures: answers, and measures by name."""

    probabilities: Values  # (n, K)
    predicted: NDArray[np.int64]  # (n,)
    measures: Mapping[str, Values]  # (n,) each

    def take(self, rows: slice) -> "Said":
        """Return some of the pictures."""
        return Said(
            self.probabilities[rows],
            self.predicted[rows],
            {name: values[rows] for name, values in self.measures.items()},
        )


@dataclass(frozen=True)
class Rows:
    """Some rows of a site: what the head reads of them, and their classes."""

    features: torch.Tensor  # (n, D)
    targets: torch.Tensor  # (n,)


@dataclass(frozen=True)
class HeadRecipe:
    """How a head is learned anew."""

    balance: Balance  # how rows are drawn
    kl_weights: tuple[float, ...]  # of the KL term, one for each epoch
    rate: float
    weight_decay: float
    batch: int


@dataclass(frozen=True)
class ClassGaussians:
    """A Gaussian for each class of a site's training rows, with one covariance."""

    means: Values  # (k, D)
    whitening: Values  # (D, D)

    def nearest(self, features: Values) -> Values:
        """Squared Mahalanobis distance from the nearest class, (n,)."""
        apart = (features[:, None] - self.means) @ self.whitening.T
        return np.asarray(np.square(apart).sum(axis=2).min(axis=1))


def fit_gaussians(rows: Rows) -> ClassGaussians:
    """Fit them; the covariance is shrunk by a tenth towards its mean variance, as in `unusual_features`."""
    features, targets = rows.features.double().numpy(), rows.targets.numpy()
    classes = np.unique(targets)
    means = np.stack([features[targets == k].mean(axis=0) for k in classes])
    inside = features - means[np.searchsorted(classes, targets)]
    covariance = inside.T @ inside / len(inside)
    shrunk = (1 - SHRINKAGE) * covariance + SHRINKAGE * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    return ClassGaussians(means, np.linalg.inv(np.linalg.cholesky(shrunk)))


class Features:
    """What heads read of pictures: of a site's prompted network, or of a frozen one, which sees each picture once."""

    def __init__(self, pictures: Mapping[str, NDArray[np.uint8]], *, prompted: bool) -> None:
        """Name the pictures of each source; those of the federation are `own`."""
        self.pictures, self.prompted = pictures, prompted
        self.kept: dict[tuple[str, int], torch.Tensor] = {}

    def of(self, predictor: Predictor, source: str, places: NDArray[np.int64]) -> torch.Tensor:
        """Return what the predictor's head reads of these pictures, (n, D)."""
        module, tensors = predictor.score_module.eval(), tensors_of(predictor.tensors)
        missing = [int(i) for i in places if self.prompted or (source, int(i)) not in self.kept]
        for start in range(0, len(missing), BATCH):
            batch = missing[start : start + BATCH]
            with torch.inference_mode():
                output = module.output(
                    torch.from_numpy(self.pictures[source][batch]), tensors, need_attention=False
                ).readout(module.options.readout, module.options.prompted)
            self.kept |= {(source, i): row for i, row in zip(batch, output.to(torch.float32), strict=True)}
        raw = torch.stack([self.kept[source, int(i)] for i in places])
        return module.standardised(raw, tensors)


def frozen_model(
    backbone: Backbone, features: Features, train: NDArray[np.int64], targets: NDArray[np.int64], classes: int
) -> Predictor:
    """Make a site's model without prompts and head: statistics, prior and what is usual are the site's."""
    options = ScoreOptions(readout="mean", head_norm="standardise", prompts=(), discount="unusual")
    counts = np.bincount(targets, minlength=classes)
    width = backbone.spec.width
    blank = {"features.mean": np.zeros(width, np.float32), "features.std": np.ones(width, np.float32)}
    predictor = Predictor(ScoreModule(backbone, options), blank, tuple(bool(count) for count in counts))
    raw = features.of(predictor, "own", train)
    own = {"features.mean": raw.mean(dim=0).numpy(), "features.std": raw.std(dim=0).numpy()}
    own["prior"] = class_prior(torch.from_numpy(counts)).to(torch.float32).numpy()
    predictor = replace(predictor, tensors=own)
    return replace(predictor, tensors={**own, **usual_features(features.of(predictor, "own", train).numpy())})


def tensors_of(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}


def said_by(predictor: Predictor, features: torch.Tensor, gaussians: ClassGaussians | None = None) -> Said:
    """The measures of one model; Mahalanobis distances where its Gaussians are named."""
    module, tensors = predictor.score_module, tensors_of(predictor.tensors)
    whole = tensors | tensors_of(everything_usual(features.shape[1]))
    with torch.inference_mode():
        shown, undiscounted = (module.judge(features, each, None) for each in (tensors, whole))
        distance = ((features - tensors["usual.mean"]) @ tensors["usual.whitening"].T).square().sum(dim=1)
    if shown.vacuity is None or undiscounted.vacuity is None or shown.dissonance is None:
        raise EdgeflError(NO_EVIDENCE, "run")
    probabilities = shown.probabilities.double().numpy()
    measures = {
        TODAY: shown.vacuity.double().numpy(),
        "vacuity, no discount": undiscounted.vacuity.double().numpy(),
        "dissonance": shown.dissonance.double().numpy(),
        "entropy": entropy_nats(probabilities),
        "1 - p": 1 - probabilities.max(axis=1),
        "distance": distance.double().numpy(),
    }
    if gaussians is not None:
        measures["Mahalanobis"] = gaussians.nearest(features.double().numpy())
    predicted = predicted_classes(shown.probabilities.numpy(), shown.vacuity.numpy(), predictor.seen)
    return Said(probabilities, predicted, measures)


def head_recipe_of(run: FinishedRun) -> HeadRecipe:
    """How the run learned its own head: its draws, its rates, and the weight of its KL term in each of its epochs.

    Raises:
        EdgeflError: the run's method learns no evidential head.
    """
    settings = run.settings
    recipe = getattr(settings.build_method(), "recipe", None)
    if not isinstance(recipe, EvidentialRecipe) or recipe.loss != "evidential":
        raise EdgeflError(NO_EVIDENCE, "run")
    return head_recipe(recipe, settings.balance, settings.rounds, settings.epochs)


def bench84_recipe(epochs: int) -> HeadRecipe:
    """How `bench84` learns a head, for some epochs: classes as they come, the KL term in full from the second epoch."""
    return head_recipe(EvidentialRecipe(**PRESETS["bench84"]["hyper"]), "none", 1, epochs)


def head_recipe(recipe: EvidentialRecipe, balance: Balance, rounds: int, epochs: int) -> HeadRecipe:
    """What a recipe says of the head, over all epochs of all rounds."""
    weights = [recipe.kl_weight(round_, epoch, epochs) for round_ in range(1, rounds + 1) for epoch in range(epochs)]
    return HeadRecipe(balance, tuple(weights), recipe.lr_head, recipe.weight_decay, recipe.batch)


def learned_heads(
    predictor: Predictor, train: Rows, tune: Rows, seeds: Iterable[int], recipe: HeadRecipe
) -> list[Predictor]:
    """Learn fresh heads, one for each seed, on what the site's network says of the training rows.

    AdamW, without augmentation; each head has a temperature of its own.
    """
    found, options, prior = [], predictor.score_module.options, predictor.tensors["prior"]
    weights, rows = torch.from_numpy(np.array(prior)), len(train.targets)
    shares = 1.0 / torch.bincount(train.targets)[train.targets]
    for seed in seeds:
        draws = torch.Generator().manual_seed(seed)
        weight, bias = init_head(len(prior), train.features.shape[1], draws)
        head = (weight.requires_grad_(), bias.requires_grad_())
        optimizer = torch.optim.AdamW(head, lr=recipe.rate, weight_decay=recipe.weight_decay)
        for kl_weight in recipe.kl_weights:
            if recipe.balance == "class":
                order = torch.multinomial(shares, rows, replacement=True, generator=draws)
            else:
                order = torch.randperm(rows, generator=draws)
            for batch in torch.split(order, recipe.batch):
                evidence = evidence_of(train.features[batch] @ weight.T + bias, options.evidence)
                loss = evidential_loss(evidence, train.targets[batch], weights, kl_weight)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
        logits = (tune.features @ weight.T + bias).detach().double().numpy()
        warmth = fit_temperature(logits, tune.targets.numpy(), prior, softplus_evidence, seen=predictor.seen)
        own = {"head.weight": weight.detach().numpy(), "head.bias": bias.detach().numpy()}
        own["temperature"] = np.asarray(warmth, np.float32)
        found.append(replace(predictor, tensors={**predictor.tensors, **own}))
    return found


def together(members: Sequence[Said], seen: Sequence[bool]) -> Said:
    """The mean of several models, and its measures."""
    mean = np.mean([one.probabilities for one in members], axis=0)
    entropy = entropy_nats(mean)
    named = f"{len(members)} heads" if len(members) > 1 else ONE_HEAD
    measures = {f"{named}, entropy": entropy, f"{named}, 1 - p": 1 - mean.max(axis=1)}
    if len(members) > 1:
        each = np.mean([one.measures["entropy"] for one in members], axis=0)
        measures[f"{named}, disagreement"] = entropy - each
    return Said(mean, predicted_classes(mean, None, seen), measures)

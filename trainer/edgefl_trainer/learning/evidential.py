"""How every evidential method learns prompts and head on a frozen ViT at one site.

FedEvPrompt (arXiv 2411.10071) section 3: prefix prompts in every block, b-prompts slower than t-prompts, an evidential
head, the loss L_eps plus what a method adds (`learning.loss_terms`). Methods differ in what travels and in their
terms, so the step is a plain function here and its settings are one dataclass that each method holds as `recipe`.
docs/methods.md: prefix prompts, prior, evidential loss, readout and feature standardisation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from edgefl_protocol.rules.bounds import FEDEVPROMPT
from edgefl_protocol.rules.class_prior import counts_shown
from edgefl_protocol.rules.dead_evidence import NO_EVIDENCE, dead_warning
from edgefl_protocol.rules.defaults import FedEvPromptDefaults as Default
from edgefl_protocol.rules.defaults import usual_head_norm, usual_prompt_length
from edgefl_protocol.rules.draws import Augment
from edgefl_protocol.rules.rates import AnnealClock, kl_weight, rate_setting
from edgefl_protocol.sentences import counted
from edgefl_trainer.bounds import check_ranges
from edgefl_trainer.contract import Arrays, Declaration, Predictor, Presets, Site, State
from edgefl_trainer.errors import SettingError, TrainingError
from edgefl_trainer.learning.batches import LabelledBatch, autocast, labelled_batches
from edgefl_trainer.learning.epochs import run_epochs
from edgefl_trainer.learning.loss_terms import Step, Term, TermShares
from edgefl_trainer.learning.named_arrays import as_tensors, moments_of, restore_moments
from edgefl_trainer.learning.unusual_features import everything_usual
from edgefl_trainer.losses import class_prior, evidential_loss
from edgefl_trainer.models.head import EvidenceKind, dirichlet_summary, evidence_of, init_head
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.spec import BackboneSpec, Readout, ViTSpec, require_vit, settled_readout
from edgefl_trainer.models.vit import PrefixPlace, PromptInit, ViTOutput, init_prompts
from edgefl_trainer.rollout import WHOLE, Rollout, travelling_map

HEAD_TENSORS = ("head.weight", "head.bias")
STATISTICS = ("features.mean", "features.std")
MOST_VACUOUS = 0.9  # mean vacuity of the last epoch, from which a person is told


@dataclass(frozen=True, kw_only=True)
class EvidentialRecipe:
    """Hyper-parameters of local learning; symbols of FedEvPrompt in the comments."""

    paper: ClassVar[str] = "arXiv 2411.10071"

    lr_b: float = Default.lr_b  # mu1, learning rate of the b-prompts
    lr_t: float = Default.lr_t  # mu2, learning rate of the t-prompts
    lr_head: float = Default.lr_head  # learning rate of the head, higher where features are standardised (ours)
    # weight decay of AdamW and SGD: the share by which weights shrink, times the rate
    weight_decay: float = Default.weight_decay
    # optimiser of prompts and head; sgd has no momentum (default ours)
    optimizer: Literal["adamw", "adam", "sgd"] = Default.optimizer
    batch: int = Default.batch  # images of a step (default ours)
    # which prompts learn: b- and t-prompts (bt), one set at lr_b (g), or none, the head alone
    prompts: Literal["bt", "g", "none"] = Default.prompts
    b_blocks: int = Default.b_blocks  # l, blocks with b-prompts; the others hold t-prompts
    prompt_length: int = Default.prompt_length  # P, prompts of a block; 0: 50·N/196, rounded (default ours)
    # first values of prompts: keys N(0, 0.02) and values 0 (normal), or U(-1, 1) (uniform) (ours)
    prompt_init: PromptInit = Default.prompt_init
    # where prompts join keys and values: behind the projection, or as tokens before it (ours)
    prefix: PrefixPlace = Default.prefix
    # loss of a batch: evidential, or cross-entropy over a softmax, without uncertainty (ce)
    loss: Literal["evidential", "ce"] = Default.loss
    evidence: EvidenceKind = Default.evidence  # function that makes evidence of a logit (default ours)
    # epochs until the KL term counts in full: its weight is min(1, t / anneal_epochs)
    anneal_epochs: int = Default.anneal_epochs
    anneal_clock: AnnealClock = Default.anneal_clock  # what t counts: epochs of the run, or of the round (ours)
    prior_floor: float = Default.prior_floor  # least share of a class in the prior, before it sums to K (ours)
    # what takes evidence from a finished model's answers: nothing, or features unlike those it learned from
    # (docs/decisions/0023)
    discount: Literal["none", "unusual"] = Default.discount
    # what the head reads: the class token (cls), or the mean of the patch tokens; auto: the better by a linear probe on
    # tune rows (ours)
    readout: Literal["auto", "cls", "mean"] = Default.readout
    # scaling of the features that the head reads; auto: standardise on self-supervised backbones (ours)
    head_norm: Literal["auto", "standardise", "none"] = Default.head_norm
    augment: Augment = Default.augment  # how training images vary; dihedral: turned by quarters and mirrored (ours)

    def __post_init__(self) -> None:
        check_ranges(self, FEDEVPROMPT)

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Tensors that hold the prompts, in block order."""
        return {"bt": ("prompts.b", "prompts.t"), "g": ("prompts.g",), "none": ()}[self.prompts]

    @property
    def trained(self) -> tuple[str, ...]:
        """Tensors that learn."""
        return (*self.prompt_names, *HEAD_TENSORS)

    def averaged_as(self, share: Literal["b", "bt", "g"], *, maps: bool) -> "EvidentialRecipe":
        """Return the recipe of a method that averages these prompts with the head, and with `maps` shares those.

        A `SettingError` where the recipe has no such prompts.
        """
        if self.prompts == "g" and share != "g":
            raise SettingError(
                "prompts is 'g', but this method shares one set of prompts with --set share=g: leave prompts out."
            )
        if self.prompts != "none":
            return replace(self, prompts="g" if share == "g" else "bt")
        if share != "bt" or maps:
            raise SettingError("prompts is 'none', so only the head can be shared: leave out share and kd.")
        return self

    def standardises(self, spec: BackboneSpec) -> bool:
        """Tell whether features are standardised before the head."""
        norm = usual_head_norm(spec.self_supervised) if self.head_norm == "auto" else self.head_norm
        return norm == "standardise"

    @property
    def rates(self) -> dict[str, float]:
        """Learning rate of each trained tensor."""
        return {name: getattr(self, rate_setting(name)) for name in self.trained}

    def kl_weight(self, round_: int, epoch: int, epochs: int) -> float:
        """Compute the weight of the KL term in an epoch, see `rules.rates.kl_weight`."""
        return kl_weight(epoch, (round_ - 1) * epochs, self.anneal_epochs, self.anneal_clock)

    def options(self, spec: BackboneSpec, readout: Readout, rollout: Rollout = WHOLE) -> ScoreOptions:
        """Say how a model of this recipe scores."""
        norm: Literal["standardise", "none"] = "standardise" if self.standardises(spec) else "none"
        return ScoreOptions(
            readout=readout,
            output="softmax" if self.loss == "ce" else "evidential",
            evidence=self.evidence,
            head_norm=norm,
            prompts=self.prompt_names,
            prefix_mode=rollout.prefix,
            rollout_from=rollout.start,
            prefix=self.prefix,
            discount=self.discount,
        )


def check_fits(recipe: EvidentialRecipe, spec: BackboneSpec, classes: int) -> None:
    """Refuse a task or backbone that this recipe cannot learn, before the first step.

    Raises:
        SettingError: fewer than two classes, prompts for a network that takes none, a readout that it does not offer,
            or more b-blocks than it has.
    """
    if classes < 2:
        raise SettingError(
            f"the task has {counted(classes, 'class', 'classes')}, and an evidential head needs at least two: take "
            "data with another class."
        )
    settled_readout(recipe.readout, spec)
    if recipe.prompts == "none":
        return
    depth = require_vit(spec, f"prompts={recipe.prompts}").depth
    if recipe.prompts == "g":
        return
    if depth < 2:
        raise SettingError("this backbone has one block, and prompts=bt needs two: name another, or set prompts=none.")
    if recipe.b_blocks >= depth:
        raise SettingError(
            f"b_blocks is {recipe.b_blocks}; allowed: 1 to {depth - 1} with this backbone: give --set "
            f"b_blocks={depth - 1}, or a backbone with more blocks."
        )


def initial_tensors(recipe: EvidentialRecipe, spec: BackboneSpec, classes: int, seed: int) -> dict[str, Tensor]:
    """Make the first prompts and head, the same at every site and at the server; raises as `check_fits`."""
    check_fits(recipe, spec, classes)
    generator = torch.Generator().manual_seed(seed)
    prompts = [] if recipe.prompts == "none" else _prompts(recipe, require_vit(spec, "prompts"), generator)
    head = init_head(classes, spec.width, generator)
    return dict(zip(recipe.trained, (*prompts, *head), strict=True))


def _prompts(recipe: EvidentialRecipe, spec: ViTSpec, generator: torch.Generator) -> list[Tensor]:
    """Fresh prompts by `prompt_names`."""
    length = recipe.prompt_length or usual_prompt_length(spec.tokens)
    blocks = (recipe.b_blocks, spec.depth - recipe.b_blocks) if recipe.prompts == "bt" else (spec.depth,)
    return [init_prompts(spec, count, length, recipe.prompt_init, generator) for count in blocks]


def site_prior(recipe: EvidentialRecipe, site: Site) -> Tensor:
    """Compute the prior W (K,) from the class frequencies that training shows the site's model.

    These are the site's training counts, or equal ones where `--balance class` draws the classes equally: correcting
    for the counts a second time would favour the rare classes (docs/methods.md, prior). A class without a row counts
    0, so its W is largest.
    A site without labelled rows, one that never trains, has W = 1.

    Raises:
        TrainingError: no floor keeps the prior of a site's only class above 0, where the loss has no value.
    """
    counts = site.train.counts(len(site.task.classes))
    if not counts.any():
        return torch.ones(len(counts), device=site.device)
    shown = counts_shown(counts, site.balance)
    prior = class_prior(shown, recipe.prior_floor).float().to(site.device)
    if not bool((prior > 0).all()):
        raise TrainingError(
            f"site {site.name} has images of one class only, and its prior W is then 0 with prior_floor=0: raise "
            "prior_floor."
        )
    return prior


def learn(
    recipe: EvidentialRecipe,
    site: Site,
    tensors: Mapping[str, Tensor],
    readout: Readout,
    round_: int,
    *,
    optimizer: torch.optim.Optimizer,
    terms: Sequence[Term] = (),
    rollout: Rollout = WHOLE,
    epochs: int | None = None,
    watch: Callable[[int, Step], None] | None = None,
) -> None:
    """Learn E epochs: step `tensors` in place, report loss, each term's share of it and dead evidence.

    Args:
        tensors: the trained ones as leaves that require gradients, `STATISTICS` as constants where they are used.
        optimizer: over the trained tensors, see `make_optimizer`.
        terms: what the method adds to the loss; attention stays fused where none needs maps.
        epochs: another number of epochs than E; the annealing clock still counts E for each round before.
        watch: is given the epochs that are left and every step.
    """
    assert site.backbone is not None
    module = ScoreModule(site.backbone, recipe.options(site.task.backbone, readout, rollout))
    prior = site_prior(recipe, site)
    need_maps = any(term.needs_maps for term in terms)
    count = site.task.epochs if epochs is None else epochs
    batches = partial(labelled_batches, site, recipe.batch, recipe.augment, round_)
    shares, raised = TermShares(terms), _Raised()  # of an epoch

    def loss_of(batch: LabelledBatch) -> Tensor:
        nonlocal raised
        images, target, epoch = batch
        kl_weight = recipe.kl_weight(round_, epoch, site.task.epochs)
        seen, loss, found = _forward(module, recipe, site, images, target, tensors, prior, kl_weight, need_maps)
        raised = _Raised(raised.dead + found.dead, raised.vacuity + found.vacuity)
        added = shares.added(seen, loss)
        if watch is not None:
            watch(count - 1 - epoch, seen)
        return loss + added

    for epoch, sums in enumerate(run_epochs(site, round_, range(count), batches, loss_of, optimizer)):
        dead, vacuity, raised = raised.dead / len(site.train), raised.vacuity / len(site.train), _Raised()
        told = shares.of_epoch(len(site.train))
        told |= {} if recipe.loss == "ce" else {"vacuity": vacuity}
        site.report({"summary": 1, "loss": sums.mean_of_images, "zero_evidence_share": dead, **told})
        if (warning := dead_warning(dead, round_, epoch)) is not None:
            site.report({"warning": f"{site.name}: {warning}; try --set evidence=softplus"})
        elif epoch == count - 1 and round_ == site.task.rounds and told.get("vacuity", 0.0) >= MOST_VACUOUS:
            site.report({"warning": _faint(site.name, vacuity, skewed=bool((prior != prior[0]).any()))})
    for line in shares.warnings(site.name):
        site.report({"warning": line})


def _faint(site: str, vacuity: float, *, skewed: bool) -> str:
    """Write that a site's pictures raise hardly any evidence at the end, and what keeps more."""
    named = ", so the prior decides which class is named" if skewed else ", so all classes are nearly as probable"
    return (
        f"{site}: hardly any evidence is left (mean vacuity {vacuity:.2f}){named}; fewer rounds, --select tune or a "
        "larger anneal_epochs keep more"
    )


def make_optimizer(
    recipe: EvidentialRecipe, tensors: Mapping[str, Tensor], state: State | None
) -> torch.optim.Optimizer:
    """Make the recipe's optimiser over the trained tensors; with `state`, its moments go on where they stopped."""
    learned = {name: tensors[name] for name in recipe.trained}
    groups = [{"params": [value], "lr": recipe.rates[name]} for name, value in learned.items()]
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[recipe.optimizer]
    optimizer: torch.optim.Optimizer = kind(groups, weight_decay=recipe.weight_decay)
    restore_moments(optimizer, learned, state)
    return optimizer


def optimizer_state(recipe: EvidentialRecipe, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> State:
    """Return the moments of `make_optimizer`'s optimiser; nothing of one that has none."""
    learned = {name: tensors[name] for name in recipe.trained}
    return State() if recipe.optimizer == "sgd" else moments_of(optimizer, learned)


def trainable(recipe: EvidentialRecipe, arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Make tensors to learn with: the trained ones as leaves with gradients, the others as constants."""
    tensors = as_tensors(arrays, device)
    for name in recipe.trained:
        tensors[name].requires_grad_(True)
    return tensors


def make_predictor(
    recipe: EvidentialRecipe, site: Site, arrays: Arrays, readout: Readout, rollout: Rollout = WHOLE
) -> Predictor:
    """Make what a site scores with: the learned tensors, its own prior, temperature 1 until calibrated."""
    assert site.backbone is not None
    module = ScoreModule(site.backbone, recipe.options(site.task.backbone, readout, rollout))
    own: dict[str, NDArray[np.float32]] = {"temperature": np.asarray(1.0, dtype=np.float32)}
    if recipe.loss == "evidential":
        own["prior"] = site_prior(recipe, site).cpu().numpy()
    names = (*recipe.trained, *STATISTICS)
    given = {name: np.asarray(arrays[name], dtype=np.float32) for name in names if name in arrays}
    if module.options.discounts:
        own |= everything_usual(site.task.backbone.width)  # until calibrated
    return Predictor(module, {**given, **own}, site.seen)


class _Raised(NamedTuple):
    """What evidence images raise, summed over them."""

    dead: float = 0.0  # images without any
    vacuity: float = 0.0


def _forward(
    module: ScoreModule,
    recipe: EvidentialRecipe,
    site: Site,
    images: Tensor,
    target: Tensor,
    tensors: Mapping[str, Tensor],
    prior: Float[Tensor, " K"],
    kl_weight: float,
    need_maps: bool,
) -> tuple[Step, Float[Tensor, ""], _Raised]:
    """One training forward: what terms see, L_eps or cross-entropy, and what evidence the images raise.

    The backbone runs under autocast, everything after it in float32.
    """
    with autocast(site):
        output = module.output(images, tensors, need_attention=need_maps)
    features = module.features(output, tensors)
    logits = module.logits(features, tensors)
    start = module.options.rollout_from
    maps = travelling_map(output.factors, start) if isinstance(output, ViTOutput) and need_maps else None
    if recipe.loss == "ce":
        return Step(features, logits.softmax(dim=-1), maps, target, tensors), cross_entropy(logits, target), _Raised()
    evidence = evidence_of(logits, recipe.evidence)
    probabilities, vacuity = dirichlet_summary(evidence, prior)
    dead = evidence.detach().sum(dim=1) <= NO_EVIDENCE
    raised = _Raised(float(dead.sum()), float(vacuity.detach().sum()))
    return (
        Step(features, probabilities, maps, target, tensors),
        evidential_loss(evidence, target, prior, kl_weight),
        raised,
    )


# What the presets mean for methods that learn so.
PRESETS: Presets = {
    "tiny": {
        "rounds": 2,
        "epochs": 1,
        "images_per_site": 120,
        "hyper": {"lr_head": 2e-3, "discount": "unusual"},
    },
    # 10 epochs where the paper has 75: ten times its rates for the prompts, chosen on tune rows. The KL term counts in
    # full from the second epoch, as in the paper from the eleventh of 75.
    "bench84": {
        "rounds": 5,
        "epochs": 2,
        "images_per_site": 1200,
        "hyper": {"lr_b": 2.5e-3, "lr_t": 5e-3, "lr_head": 5e-3, "anneal_epochs": 1, "discount": "unusual"},
    },
    "paper": {
        "rounds": 5,
        "epochs": 15,
        "hyper": {"evidence": "relu", "prompt_init": "uniform", "head_norm": "none", "augment": "none"},
    },
}


def rising_loss(hyper: Mapping[str, object], rounds: int, epochs: int) -> str:
    """Say until when the loss may rise for its KL term grows; "" where it has none, or one that counts nothing."""
    if "anneal_epochs" not in hyper or hyper["loss"] != "evidential":
        return ""
    each = hyper["anneal_clock"] == "round"
    last = min(int(str(hyper["anneal_epochs"])) + 1, epochs if each else rounds * epochs)
    if last == 1:
        return ""
    until = f"epoch {last} of {'each round' if each else 'the run'}"
    return f"the loss may rise until {until}: the weight of its KL term grows till then (--set anneal_epochs)"


DECLARES = Declaration(presets=lambda backbone, hyper: PRESETS, told_before=rising_loss)

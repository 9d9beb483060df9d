"""How every evidential method learns prompts and head on a frozen ViT at one site.

FedEvPrompt (arXiv 2411.10071) section 3: prefix prompts in every block, b-prompts slower than t-prompts, an evidential
head, the loss L_eps plus lambda times a distillation term. Methods differ in what travels, not in this step, so the
step is a plain function here and its settings are one dataclass that each method holds as `recipe`.
docs/methods.md: prefix prompts, prior, evidential loss, readout and feature standardisation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from edgefl_trainer.augment import dihedral
from edgefl_trainer.contract import Arrays, Predictor, Site, State
from edgefl_trainer.errors import SettingError
from edgefl_trainer.learning import steps
from edgefl_trainer.losses import class_prior, evidential_loss, rollout_distillation
from edgefl_trainer.models.head import EvidenceKind, evidence_of, init_head
from edgefl_trainer.models.scoring import ScoreModule, ScoreOptions
from edgefl_trainer.models.vit import BackboneSpec, PromptInit, Readout, init_prompts, prefix_length
from edgefl_trainer.rollout import PrefixMode, max_normalise, rollout_from_factors

TRAINED = ("prompts.b", "prompts.t", "head.weight", "head.bias")
STATISTICS = ("features.mean", "features.std")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class EvidentialRecipe:
    """Hyper-parameters of local learning; symbols of FedEvPrompt in the comments."""

    lr_b: float = 2.5e-4  # mu1, b-prompts
    lr_t: float = 5e-4  # mu2, t-prompts
    lr_head: float = 5e-4  # mu2 unless features are standardised, where a larger step pays
    weight_decay: float = 1e-2
    batch: int = 32
    b_blocks: int = 3  # l: blocks with b-prompts, the others hold t-prompts
    prompt_length: int = 0  # P; 0: 50·N/196, rounded
    prompt_init: PromptInit = "normal"
    evidence: EvidenceKind = "softplus"
    anneal_epochs: int = 10  # the KL weight is min(1, t / anneal_epochs)
    anneal_clock: Literal["run", "round"] = "run"  # t counts epochs over the whole run, or from each round's start
    prior_floor: float = 1e-2
    readout: Literal["auto", "cls", "mean"] = "auto"  # auto: by a linear probe on tune rows
    head_norm: Literal["auto", "standardise", "none"] = "auto"  # auto: standardise on self-supervised backbones
    augment: Literal["none", "dihedral"] = "dihedral"

    def __post_init__(self) -> None:
        for name in ("lr_b", "lr_t", "lr_head", "weight_decay", "prior_floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise SettingError(f"{name} is {getattr(self, name)}; allowed: 0 to 1.")
        for name, least in (("batch", 1), ("b_blocks", 1), ("prompt_length", 0), ("anneal_epochs", 1)):
            if getattr(self, name) < least:
                raise SettingError(f"{name} is {getattr(self, name)}; allowed: {least} or more.")

    def standardises(self, spec: BackboneSpec) -> bool:
        """Whether features are standardised before the head."""
        return spec.self_supervised if self.head_norm == "auto" else self.head_norm == "standardise"

    def kl_weight(self, round_: int, epoch: int, epochs: int) -> float:
        """lambda_KL = min(1, t / anneal_epochs), t from 0."""
        t = epoch if self.anneal_clock == "round" else (round_ - 1) * epochs + epoch
        return min(1.0, t / self.anneal_epochs)

    def options(self, spec: BackboneSpec, readout: Readout, mode: PrefixMode = "renormalise") -> ScoreOptions:
        """How a model of this recipe scores."""
        norm: Literal["standardise", "none"] = "standardise" if self.standardises(spec) else "none"
        return ScoreOptions(readout=readout, evidence=self.evidence, head_norm=norm, prefix_mode=mode)


@dataclass(frozen=True)
class Distillation:
    """The federation's rollout maps as one training step needs them (docs/methods.md, distillation)."""

    weight: float  # lambda
    peer_means: Float[Tensor, "K N"]
    peer_counts: Float[Tensor, " K"]
    gram: Float[Tensor, "N N"]


def check_fits(recipe: EvidentialRecipe, spec: BackboneSpec, classes: int) -> None:
    """Refuse a task or backbone that this recipe cannot learn, before the first step.

    Raises:
        SettingError: fewer than two classes, or more b-blocks than the network has.
    """
    if classes < 2:
        raise SettingError(
            f"the task has {classes} class; an evidential head needs at least two: widen --classes or the data."
        )
    if recipe.b_blocks >= spec.depth:
        raise SettingError(f"b_blocks is {recipe.b_blocks}; allowed: 1 to {spec.depth - 1} with this backbone.")


def initial_tensors(recipe: EvidentialRecipe, spec: BackboneSpec, classes: int, seed: int) -> dict[str, Tensor]:
    """Prompts and head before the first step: the same at every site and at the server.

    Raises:
        SettingError: see `check_fits`.
    """
    check_fits(recipe, spec, classes)
    generator = torch.Generator().manual_seed(seed)
    length = recipe.prompt_length or prefix_length(spec.tokens)
    b = init_prompts(spec, recipe.b_blocks, length, recipe.prompt_init, generator)
    t = init_prompts(spec, spec.depth - recipe.b_blocks, length, recipe.prompt_init, generator)
    weight, bias = init_head(classes, spec.width, generator)
    return {"prompts.b": b, "prompts.t": t, "head.weight": weight, "head.bias": bias}


def site_prior(recipe: EvidentialRecipe, site: Site) -> Tensor:
    """(K,) W from the class frequencies that training shows the site's model.

    These are the site's training counts, or equal ones where `--balance class` draws the classes equally: correcting
    for the counts a second time would favour the rare classes (docs/methods.md, prior). Classes without a row keep 0.
    """
    counts = site.train.counts(len(site.task.classes))
    shown = (counts > 0).astype(np.int64) if site.balance == "class" else counts
    return class_prior(torch.from_numpy(shown), recipe.prior_floor).float().to(site.device)


def learn(
    recipe: EvidentialRecipe,
    site: Site,
    tensors: Mapping[str, Tensor],
    readout: Readout,
    round_: int,
    *,
    optimizer: torch.optim.Optimizer,
    distillation: Distillation | None = None,
    mode: PrefixMode = "renormalise",
) -> None:
    """E local epochs: steps `tensors` in place and reports loss, share of the distillation term and dead evidence.

    Args:
        recipe: hyper-parameters.
        site: whose training rows are learned.
        tensors: `TRAINED` as leaves that require gradients, `STATISTICS` as constants where they are used.
        readout: feature the head reads.
        round_: train round, from 1.
        optimizer: over the trained tensors, see `make_optimizer`.
        distillation: the peers' maps; None leaves the term out and the attention fused.
        mode: how rollout treats the prefix columns.
    """
    assert site.backbone is not None
    module = ScoreModule(site.backbone, recipe.options(site.task.backbone, readout, mode))
    prior = site_prior(recipe, site)
    epochs = site.task.epochs
    per_epoch = -(-len(site.train) // recipe.batch)
    largest_share = 0.0
    for epoch in range(epochs):
        rng = site.rng("augment", round_, epoch)
        kl_weight = recipe.kl_weight(round_, epoch, epochs)
        totals = np.zeros(3)
        for step, (images, target) in enumerate(site.batches(site.train, recipe.batch, round_, epoch)):
            views = dihedral(images, rng) if recipe.augment == "dihedral" else images
            evidence, maps = _evidence_and_maps(module, recipe, site, views, tensors, distillation is not None)
            loss = evidential_loss(evidence, target, prior, kl_weight)
            term = loss.new_zeros(())
            if distillation is not None and maps is not None:
                raw = rollout_distillation(
                    maps, target, distillation.peer_means, distillation.peer_counts, distillation.gram
                )
                term = distillation.weight * raw
            value = steps.check_finite(loss + term, site, round_, step)
            optimizer.zero_grad(set_to_none=True)
            (loss + term).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            dead = float((evidence.detach().sum(dim=1) <= 1e-6).float().mean())
            totals += len(images) * np.array([value, float(term.detach()) / max(1e-12, float(loss.detach())), dead])
            site.report(
                {"epoch": epoch + 1, "step": step + 1, "steps": per_epoch, "loss": value, "images": len(images)}
            )
        loss_mean, share, dead_mean = (totals / len(site.train)).tolist()
        site.report({"summary": 1, "loss": loss_mean, "kd_share": share, "zero_evidence_share": dead_mean})
        largest_share = max(largest_share, share)
        _warn_dead(site, round_, epoch, dead_mean)
    if distillation is not None and largest_share < 1e-4:
        site.report({"warning": f"{site.name}: distillation stays at {largest_share:.1e} of the loss: it does nothing"})


def make_optimizer(
    recipe: EvidentialRecipe, tensors: Mapping[str, Tensor], state: State | None
) -> torch.optim.Optimizer:
    """AdamW over the trained tensors; with `state`, its moments go on where they stopped."""
    rates = {
        "prompts.b": recipe.lr_b,
        "prompts.t": recipe.lr_t,
        "head.weight": recipe.lr_head,
        "head.bias": recipe.lr_head,
    }
    groups = [{"params": [tensors[name]], "lr": rates[name]} for name in TRAINED]
    optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay)
    if state is not None and "optimizer.step" in state.values:
        for name in TRAINED:
            moments = {key: torch.from_numpy(np.array(state.arrays[f"optimizer.{key}.{name}"])) for key in MOMENTS}
            step = torch.tensor(float(state.values["optimizer.step"]))
            optimizer.state[tensors[name]] = {
                "step": step,
                **{k: v.to(tensors[name].device) for k, v in moments.items()},
            }
    return optimizer


def optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> State:
    """The moments of `make_optimizer`'s AdamW under stable names."""
    arrays = {}
    for name in TRAINED:
        moments = optimizer.state[tensors[name]]
        arrays.update({f"optimizer.{key}.{name}": moments[key].detach().cpu().numpy().copy() for key in MOMENTS})
    return State(arrays, {"optimizer.step": int(optimizer.state[tensors["head.bias"]]["step"])})


def trainable(arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
    """Tensors to learn with: the trained ones as leaves with gradients, the others as constants."""
    tensors = steps.as_tensors(arrays, device)
    for name in TRAINED:
        tensors[name].requires_grad_(True)
    return tensors


def make_predictor(
    recipe: EvidentialRecipe, site: Site, arrays: Arrays, readout: Readout, mode: PrefixMode = "renormalise"
) -> Predictor:
    """What a site scores with: the learned tensors, its own prior, temperature 1 until calibrated."""
    assert site.backbone is not None
    module = ScoreModule(site.backbone, recipe.options(site.task.backbone, readout, mode))
    own: dict[str, NDArray[np.float32]] = {
        "prior": site_prior(recipe, site).cpu().numpy(),
        "temperature": np.asarray(1.0, dtype=np.float32),
    }
    given = {name: np.asarray(arrays[name], dtype=np.float32) for name in (*TRAINED, *STATISTICS) if name in arrays}
    seen = tuple(bool(count) for count in site.train.counts(len(site.task.classes)))
    return Predictor(module, {**given, **own}, seen)


def _evidence_and_maps(
    module: ScoreModule, recipe: EvidentialRecipe, site: Site, images: Tensor, tensors: Mapping[str, Tensor], maps: bool
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B N"] | None]:
    """One training forward: the backbone under autocast, everything after it in float32."""
    with torch.autocast(site.device.type, dtype=site.autocast, enabled=site.autocast is not None):
        output = module.vit(
            module.vit.normalise(images),
            module.prompts(tensors),
            need_attention=maps,
            prefix_mode=module.options.prefix_mode,
        )
    evidence = evidence_of(module.logits(output.readout(module.options.readout), tensors), recipe.evidence)
    return evidence, max_normalise(rollout_from_factors(output.factors)) if maps else None


def _warn_dead(site: Site, round_: int, epoch: int, dead: float) -> None:
    """Say that a head raises no evidence; the first epoch of a run may still be so."""
    if dead > 0.5 and (round_, epoch) > (1, 0):
        site.report(
            {"warning": f"{site.name}: {dead:.0%} of the images raise no evidence; try --set evidence=softplus"}
        )

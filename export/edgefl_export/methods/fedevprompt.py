"""What devices need for learning FedEvPrompt: its step, its record, and the trainer's step that the gate compares.

    loss = L_eps + λ·L_KD   (FedEvPrompt eq. 2, 4 and 7; the trainer's own loss functions)
    gradient with respect to prompts and head only
    AdamW with decoupled decay (arXiv 1711.05101, Algorithm 2, PyTorch's form)

Nothing is drawn at random and nothing is remembered, so the step can be traced, and a device that gives the same inputs
learns the same weights. The KL weight, λ, the learning rates and the decay are inputs; the network is a constant. The
reference is the trainer's own: its losses, its term, PyTorch's AdamW. The method: `edgefl_trainer.methods.fedevprompt`;
on a device: `edgefl_client.learning.fedevprompt`. Source: docs/methods.md, 1.3 to 1.6; docs/design.md, section 9.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from edgefl_export.errors import ExportError, refused_settings
from edgefl_export.graphs.training import TRACED_BATCH
from edgefl_export.methods.learned_method import LearnedMethod, PreparedStep, Traceable, Weights
from edgefl_export.parity.score_parity import parity_images
from edgefl_export.parity.step_parity import STEPS, WARM_STEPS, Arrays, batch_size, check_steps
from edgefl_protocol.bundle.fedevprompt_plan import (
    COUNTS,
    FIRST_MOMENT,
    MEANS,
    RATE,
    SECOND_MOMENT,
    SETTINGS,
    STEP,
    FedEvPromptPlan,
    PromptForm,
    constants,
    fresh_state,
)
from edgefl_protocol.bundle.learning_plan import GRAPH, NEXT
from edgefl_protocol.rules.dead_evidence import NO_EVIDENCE
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.learning.adamw import BETAS, EPSILON
from edgefl_trainer.learning.loss_terms import Step
from edgefl_trainer.learning.maps.sharing import Distillation, MapSharing
from edgefl_trainer.losses import evidential_loss, rollout_distillation
from edgefl_trainer.methods.fedevprompt import FedEvPrompt
from edgefl_trainer.models.head import dirichlet_summary, evidence_of
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.vit import ViTOutput
from edgefl_trainer.rollout import bilinear_gram, nearest_gram, travelling_map

DECAY = 1.0  # in the gate, an input: a graph that leaves the plan's 0.01 out differs by half of what is allowed
GATE_KD_WEIGHT = 1e-4  # in the gate at least, an input: at 1e-6 a graph whose distillation has no gradient passes


@dataclass(frozen=True)
class FedEvPromptStep:
    """What a step holds fixed: the network with its options, what learns, and the distance between maps."""

    module: ScoreModule
    trained: tuple[str, ...]
    gram: Float[Tensor, "N N"]

    def loss(
        self, image: UInt8[Tensor, "B S S 3"], target: Int[Tensor, " B"], tensors: Mapping[str, Tensor]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
        """Return the batch's loss L_eps + λ·L_KD, λ·L_KD alone, and the share of images without evidence.

        Args:
            image: pixels, channels last, (B, S, S, 3).
            target: class index of each image, (B,).
            tensors: the scoring tensors but temperature, and `kl_weight`, `kd_weight`, `peers.means` (K, N),
                `peers.counts` (K,).
        """
        output = self.module.output(image, tensors, need_attention=True)
        assert isinstance(output, ViTOutput)
        logits = self.module.logits(self.module.features(output, tensors), tensors)
        maps = travelling_map(output.factors)
        evidence = evidence_of(logits, self.module.options.evidence)
        own = evidential_loss(evidence, target, tensors["prior"], tensors["kl_weight"].to(torch.float64))
        peers = rollout_distillation(maps, target, tensors[MEANS], tensors[COUNTS], self.gram)
        shared = tensors["kd_weight"] * peers
        dead = (evidence.detach().sum(dim=1) <= NO_EVIDENCE).to(torch.float32).mean()
        return own + shared, shared, dead

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take one step: `train_step.onnx`.

        Args:
            tensors: `image` and `target`, those of `loss`, the moments and step count under `optimizer.`, a rate of
                each trained tensor and `weight_decay`.

        Returns:
            `loss`, `kd` and `dead`, then everything that learning changes, as `next.NAME`.
        """
        leaves = {name: tensors[name].detach().requires_grad_(True) for name in self.trained}
        loss, shared, dead = self.loss(tensors["image"], tensors["target"], {**tensors, **leaves})
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        result = {"loss": loss.detach(), "kd": shared.detach(), "dead": dead}
        count = tensors[STEP] + 1
        for name, gradient in zip(self.trained, gradients, strict=True):
            value, first, second = adamw(
                tensors[name],
                gradient,
                (tensors[FIRST_MOMENT + name], tensors[SECOND_MOMENT + name]),
                count,
                tensors[RATE + name],
                tensors["weight_decay"],
            )
            result[NEXT + name] = value
            result[NEXT + FIRST_MOMENT + name], result[NEXT + SECOND_MOMENT + name] = first, second
        result[NEXT + STEP] = count
        return result


def adamw(
    value: Float[Tensor, "*axes"],
    gradient: Float[Tensor, "*axes"],
    moments: tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"]],
    count: Int[Tensor, ""],
    rate: Float[Tensor, ""],
    decay: Float[Tensor, ""],
) -> tuple[Float[Tensor, "*axes"], Float[Tensor, "*axes"], Float[Tensor, "*axes"]]:
    """Take a step of AdamW with one tensor; returns the value and its two moments after the step.

    Args:
        moments: running means of the gradient and of its square.
        count: number of this step, from 1.
        decay: weight decay; a step shrinks values by rate·decay.
    """
    first = BETAS[0] * moments[0] + (1 - BETAS[0]) * gradient
    second = BETAS[1] * moments[1] + (1 - BETAS[1]) * gradient * gradient
    # 1 − 0.999^t loses four of float32's seven digits in the first steps.
    exponent = count.to(torch.float64)
    corrections = [1 - torch.pow(torch.full_like(exponent, beta), exponent) for beta in BETAS]
    scale = second.sqrt() / corrections[1].sqrt().to(torch.float32) + EPSILON
    size = (rate.to(torch.float64) / corrections[0]).to(torch.float32)
    return value * (1 - rate * decay) - size * (first / scale), first, second


def fits(run: FinishedRun, predictor: Predictor) -> bool:
    """Return whether a run learned as devices do: FedEvPrompt with the evidential loss."""
    method = run.settings.build_method()
    return isinstance(method, FedEvPrompt) and method.recipe.loss == "evidential"


def training_plan(run: FinishedRun, predictor: Predictor) -> FedEvPromptPlan:
    """Return how a device goes on learning what a run has learned.

    Raises:
        ExportError: a setting that devices cannot have.
    """
    method = run.settings.build_method()
    assert isinstance(method, FedEvPrompt)  # `fits`
    recipe, maps = method.recipe, method.maps
    if recipe.optimizer != "adamw":
        raise ExportError(
            f"the run's optimizer is {recipe.optimizer}, but a device learns with adamw: leave --with-training out, "
            "or export a run with --set optimizer=adamw"
        )
    if maps.rollout_from or maps.kd_batch != "mean":
        raise ExportError(
            "the run's maps leave blocks out (rollout_from) or its distances are summed (kd_batch), which no device "
            "can do: leave --with-training out, or export a run with neither"
        )
    with refused_settings():
        return FedEvPromptPlan(
            trained=recipe.trained,
            rates=recipe.rates,
            weight_decay=recipe.weight_decay,
            batch=recipe.batch,
            epochs=run.settings.epochs,
            epochs_before=run.settings.rounds * run.settings.epochs,
            anneal_epochs=recipe.anneal_epochs,
            anneal_clock=recipe.anneal_clock,
            kd_weight=maps.kd_weight,
            kd_peers=maps.kd_peers,
            prior_floor=recipe.prior_floor,
            balance=run.settings.balance,
            augment=recipe.augment,
            seed=run.settings.seed,
            form=prompt_form(predictor, maps),
        )


def prompt_form(predictor: Predictor, sharing: MapSharing) -> PromptForm:
    """Return what stands in the training graph of a site's model, for a device to hold against its federation's task.

    Raises:
        ValueError: it reads a feature that FedEvPrompt does not offer.
    """
    module, tensors = predictor.score_module, predictor.tensors
    options = module.options
    return PromptForm(
        network=module.vit.spec.sha256,
        prompts="g" if "prompts.g" in options.prompts else "bt",
        b_blocks=tensors["prompts.b"].shape[0] if "prompts.b" in tensors else 0,
        prompt_length=tensors[options.prompts[0]].shape[2],
        prefix=options.prefix,
        evidence=options.evidence,
        readout=options.readout,  # type: ignore[arg-type]  # checked there
        head_norm=options.head_norm,
        rollout=options.prefix_mode,
        kd_metric=sharing.kd_metric,
    )


def prepare(run: FinishedRun, predictor: Predictor, weights: Weights) -> PreparedStep:
    """See `LearnedMethod`."""
    return prepared(training_plan(run, predictor), predictor, weights)


def prepared(plan: FedEvPromptPlan, predictor: Predictor, weights: Weights) -> PreparedStep:
    """Return the step of a model under a record."""
    step = step_of(plan, predictor)
    side = step.module.vit.spec.image_px
    example = {
        "image": torch.zeros((TRACED_BATCH, side, side, 3), dtype=torch.uint8),
        "target": torch.zeros(TRACED_BATCH, dtype=torch.int64),
        **example_inputs(step, plan, weights),
    }
    graph = Traceable(step=step, example=example, outputs=plan.outputs, free={"image": "batch", "target": "batch"})
    return PreparedStep(
        plan=plan,
        graphs={GRAPH: graph},
        check=lambda graphs: check_steps(graphs[GRAPH], FedEvPromptTrainerSteps(step, plan, weights)),
    )


def step_of(plan: FedEvPromptPlan, predictor: Predictor) -> FedEvPromptStep:
    """Return the step that a device takes with a model under a record."""
    module = predictor.score_module.cpu().eval()
    gram = (bilinear_gram if plan.form.kd_metric == "bilinear" else nearest_gram)(module.vit.spec.grid)
    return FedEvPromptStep(module, plan.trained, gram.float())


def example_inputs(step: FedEvPromptStep, plan: FedEvPromptPlan, weights: Weights) -> dict[str, Tensor]:
    """Return a value of every input of the graph but image and target, in the graph's order."""
    classes, tokens = len(weights["prior"]), step.module.vit.spec.tokens
    peers = {MEANS: np.full((classes, tokens), 0.5, np.float32), COUNTS: np.ones(classes, np.float32)}
    numbers = {name: np.asarray(0.5, np.float32) for name in SETTINGS}
    values = {**fresh_state(plan, weights), **rate_inputs(plan), **numbers, **peers, **constants(plan, weights)}
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


def rate_inputs(plan: FedEvPromptPlan) -> Arrays:
    """Return the plan's learning rates as the graph takes them."""
    return {RATE + name: np.asarray(rate, np.float32) for name, rate in plan.rates.items()}


class FedEvPromptTrainerSteps:
    """The trainer's own step with PyTorch's AdamW, a `Reference`: every step has other settings that a round can have.

    Args:
        plan: how it learns; a small distillation weight is raised.
    """

    tries = 1

    def __init__(self, step: FedEvPromptStep, plan: FedEvPromptPlan, weights: Weights) -> None:
        self._module, self._gram, self._plan = step.module, step.gram, plan
        self._tensors = {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}
        for name in plan.trained:
            self._tensors[name].requires_grad_(True)
        groups = [{"params": [self._tensors[name]], "lr": plan.rates[name]} for name in plan.trained]
        self._optimizer = torch.optim.AdamW(groups, weight_decay=plan.weight_decay)
        rng, classes = np.random.default_rng(0), len(weights["prior"])
        self._targets = [rng.integers(0, classes, batch_size(index)) for index in range(WARM_STEPS + STEPS)]
        means = rng.random((classes, step.module.vit.spec.tokens), np.float32)
        held = np.arange(classes, dtype=np.float32) % 3  # some classes no peer holds
        means = np.where(held[:, None] > 0, means / means.max(axis=1, keepdims=True), 0).astype(np.float32)
        self._fixed = {**constants(plan, weights), **rate_inputs(plan), MEANS: means, COUNTS: held}

    def batch(self, index: int) -> Arrays:
        """See `Reference`: drawn pictures and labels."""
        image = parity_images(self._module.vit.spec.image_px, batch_size(index), seed=index)
        weight = max(self._plan.kd_weight, GATE_KD_WEIGHT)
        settings = {"kl_weight": min(1.0, 0.1 * (index + 1)), "kd_weight": weight, "weight_decay": DECAY}
        numbers = {name: np.asarray(value, np.float32) for name, value in settings.items()}
        return {"image": image, "target": self._targets[index], **numbers, **self._fixed}

    def step(self, given: Arrays, *, need_maps: bool = True) -> float:
        """See `Reference`; without `need_maps`, distillation is left out."""
        tensors, module = self._tensors, self._module
        output = module.output(torch.from_numpy(given["image"]), tensors, need_attention=need_maps)
        features = module.features(output, tensors)
        evidence = evidence_of(module.logits(features, tensors), module.options.evidence)
        wanted = torch.from_numpy(given["target"])
        loss = evidential_loss(evidence, wanted, tensors["prior"], float(given["kl_weight"]))
        if need_maps:
            assert isinstance(output, ViTOutput)
            maps = travelling_map(output.factors)
            seen = Step(features, dirichlet_summary(evidence, tensors["prior"])[0], maps, wanted, tensors)
            means, counts = (torch.from_numpy(given[name]) for name in (MEANS, COUNTS))
            loss = loss + Distillation(float(given["kd_weight"]), means, counts, self._gram)(seen)
        for group in self._optimizer.param_groups:
            group["weight_decay"] = float(given["weight_decay"])
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def state(self) -> Arrays:
        """See `Reference`: tensors, moments and step count."""
        found: dict[str, NDArray[np.generic]] = {}
        for name in self._plan.trained:
            moments = self._optimizer.state[self._tensors[name]]
            found[name] = self._tensors[name].detach().numpy().copy()
            found[FIRST_MOMENT + name] = moments["exp_avg"].numpy().copy()
            found[SECOND_MOMENT + name] = moments["exp_avg_sq"].numpy().copy()
            found[STEP] = np.asarray(int(moments["step"]), np.int64)
        return found

    def restore(self, state: Arrays) -> None:
        """See `Reference`: never called, for no step is tried twice."""

    def quantity(self, name: str) -> str:
        """See `Reference`: each tensor for itself."""
        return name


LEARNED = LearnedMethod(offers="fedevprompt with the evidential loss", fits=fits, prepare=prepare)

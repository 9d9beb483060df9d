"""What makes a bundle one that a device can learn with: `train_step.onnx` and `training.json` of a finished run.

A run of FedEvPrompt gives its own step; a run that scores with a convolutional network gives FedCLF's
(`contrast_members`). Guarantees: the graph passed its gate with the values that the bundle carries; rates, annealing
and distillation are those of the run, so a device learns as the site did. Source: docs/design.md, sections 7 and 9.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_export.contrast_members import build_contrast
from edgefl_export.errors import ExportError, refused_settings
from edgefl_export.training_gates import StepParity, check_training, rate_inputs
from edgefl_export.training_graph import TRACED_BATCH, export_training_graph
from edgefl_export.training_step import FedEvPromptStep
from edgefl_protocol.bundle.training_plan import (
    COUNTS,
    GRAPH,
    MEANS,
    RECORD,
    SETTINGS,
    PromptForm,
    TrainingPlan,
    constants,
    fresh_state,
)
from edgefl_trainer.contract import Predictor
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.learning.attention_buffer import MapSharing
from edgefl_trainer.learning.evidential import EvidentialRecipe
from edgefl_trainer.methods.fedevprompt import FedEvPrompt
from edgefl_trainer.models.cnn import FrozenCNN
from edgefl_trainer.rollout import bilinear_gram, nearest_gram


@dataclass(frozen=True)
class TrainingMembers:
    """Files of a bundle by name, and the figures of the gate."""

    files: Mapping[str, bytes]
    parity: tuple[StepParity, ...]


def learned_method(run: FinishedRun) -> FedEvPrompt:
    """The method of a run that a device can learn.

    Args:
        run: the opened run directory.

    Raises:
        ExportError: the run's method has no training step for devices.
    """
    method = run.settings.build_method()
    if not isinstance(method, FedEvPrompt) or method.recipe.loss != "evidential":
        raise ExportError(
            f"the run's method is {run.settings.method}; a device can learn fedevprompt with the evidential loss, or "
            "fedclf on a convolutional network: leave --with-training out, or export such a run"
        )
    if method.recipe.optimizer != "adamw":
        raise ExportError(
            f"the run's optimizer is {method.recipe.optimizer}; a device learns with adamw: leave --with-training out, "
            "or export a run with --set optimizer=adamw"
        )
    return method


def training_plan(run: FinishedRun, predictor: Predictor) -> TrainingPlan:
    """How a device goes on learning what a run has learned.

    Args:
        run: the opened run directory.
        predictor: the site's model, whose form stands in the graph.

    Raises:
        ExportError: the run's method has no training step for devices, or a setting that they cannot have.
    """
    method = learned_method(run)
    recipe, maps = method.recipe, method.maps
    with refused_settings():
        return TrainingPlan(
            trained=recipe.trained,
            rates=_rates(recipe),
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
    """What stands in the training graph of a site's model, for a device to hold against its federation's settings.

    Args:
        predictor: the site's model.
        sharing: tells how maps are compared.

    Raises:
        ValueError: it reads a feature that FedEvPrompt does not offer.
    """
    module, tensors = predictor.module, predictor.tensors
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


def training_step(predictor: Predictor, plan: TrainingPlan) -> FedEvPromptStep:
    """The step that a device takes.

    Args:
        predictor: the site's model.
        plan: how it learns.
    """
    module = predictor.module.cpu().eval()
    gram = (bilinear_gram if plan.form.kd_metric == "bilinear" else nearest_gram)(module.vit.spec.grid)
    return FedEvPromptStep(module, plan.trained, gram.float())


def build_training(run: FinishedRun, site: str, weights: Mapping[str, NDArray[np.float32]]) -> TrainingMembers:
    """Trace, check and pack the training step of a site.

    Args:
        run: the opened run directory.
        site: whose model it is.
        weights: the bundle's tensors by name.

    Returns:
        The members to add.

    Raises:
        ExportError: the method has no such step, or the graph cannot be made or fails its gate.
    """
    predictor = run.predictor(site)
    if isinstance(predictor.module.backbone, FrozenCNN):
        files, figures = build_contrast(run, predictor.module.backbone)
        return TrainingMembers(files, tuple(figures))
    plan = training_plan(run, predictor)
    step = training_step(predictor, plan)
    graph = trace_step(step, plan, weights)
    parity = check_training(graph, step, plan, weights)
    return TrainingMembers({GRAPH: graph, RECORD: plan.to_bytes()}, tuple(parity))


def trace_step(step: FedEvPromptStep, plan: TrainingPlan, weights: Mapping[str, NDArray[np.float32]]) -> bytes:
    """`train_step.onnx` of FedEvPrompt.

    Args:
        step: what learns.
        plan: its record.
        weights: the bundle's tensors by name.

    Raises:
        ExportError: the exporter cannot make it.
    """
    side = step.module.vit.spec.image_px
    given = {
        "image": torch.zeros((TRACED_BATCH, side, side, 3), dtype=torch.uint8),
        "target": torch.zeros(TRACED_BATCH, dtype=torch.int64),
        **example_inputs(step, plan, weights),
    }

    def one_step(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return step(tensors["image"], tensors["target"], tensors)

    return export_training_graph(one_step, given, plan.outputs, {"image": "batch", "target": "batch"})


def example_inputs(
    step: FedEvPromptStep, plan: TrainingPlan, weights: Mapping[str, NDArray[np.float32]]
) -> dict[str, torch.Tensor]:
    """A value of every input of the graph but image and target, in the graph's order."""
    classes, tokens = len(weights["prior"]), step.module.vit.spec.tokens
    peers = {MEANS: np.full((classes, tokens), 0.5, np.float32), COUNTS: np.ones(classes, np.float32)}
    numbers = {name: np.asarray(0.5, np.float32) for name in SETTINGS}
    values = {**fresh_state(plan, weights), **rate_inputs(plan), **numbers, **peers, **constants(plan, weights)}
    return {name: torch.from_numpy(np.array(value)) for name, value in values.items()}


def _rates(recipe: EvidentialRecipe) -> dict[str, float]:
    """Rate of each trained tensor, as the trainer's optimiser has it."""
    rates = {"prompts.b": recipe.lr_b, "prompts.g": recipe.lr_b, "prompts.t": recipe.lr_t}
    return {name: rates.get(name, recipe.lr_head) for name in recipe.trained}

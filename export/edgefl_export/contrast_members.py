"""What makes a bundle one with which a device learns FedCLF: its two graphs and `training.json`.

Any run that scores with a convolutional network will do: a head on it, or the network fine-tuned. How FedCLF learns is
taken from the run that learned the backbone, where that was FedCLF, and is the method's default otherwise. The bundle
holds the network's form, not its values: they come with the federation's broadcast. Guarantees: the graphs passed their
gate. Source: docs/design.md, sections 7 and 9; docs/decisions/0027.
"""

from pathlib import Path

import torch

from edgefl_export.contrast_gates import check_contrast
from edgefl_export.contrast_step import FedCLFStep
from edgefl_export.errors import ExportError, refused_settings
from edgefl_export.training_gates import StepParity
from edgefl_export.training_graph import TRACED_BATCH, export_training_graph
from edgefl_protocol.bundle.contrast_plan import (
    ENCODED,
    ENCODER,
    FIRST,
    NEGATIVES,
    SECOND,
    SETTINGS,
    VIEW,
    FedCLFPlan,
    begun,
)
from edgefl_protocol.bundle.training_plan import GRAPH, RECORD
from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_trainer.contract import Task
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe
from edgefl_trainer.learning.unlabelled.self_supervised import Learner, Split, tensors_of
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import weights_of
from edgefl_trainer.models.cnn import FrozenCNN
from edgefl_trainer.models.spec import CNNSpec


def build_contrast(run: FinishedRun, backbone: FrozenCNN) -> tuple[dict[str, bytes], list[StepParity]]:
    """Trace, check and pack FedCLF's step on a network.

    Args:
        run: the opened run directory.
        backbone: the network that the bundle scores with.

    Returns:
        The members to add, and the figures of the gate.

    Raises:
        ExportError: the network has no such step, or a graph cannot be made or fails its gate.
    """
    method, settings = contrast_method(run)
    spec = backbone.spec
    model = network(method.contrast, spec, settings.seed, backbone)
    plan = contrast_plan(method, settings, spec, model)
    graph, encoder = contrast_graphs(model, plan, spec)
    parity = check_contrast(graph, encoder, model, plan, (spec.mean, spec.std))
    return {GRAPH: graph, ENCODER: encoder, RECORD: plan.to_bytes()}, parity


def contrast_method(run: FinishedRun) -> tuple[FedCLF, RunSettings]:
    """How FedCLF learned the run's backbone, or would learn on from it.

    Args:
        run: the opened run directory.

    Raises:
        ExportError: the run that learned the backbone is not there, or asks for what devices do not do.
    """
    kind, _, place = run.settings.backbone.partition(":")
    found, settings = FedCLF(), run.settings
    if kind == "run":
        config = Path(place) / "config.toml"
        if not config.exists():
            raise ExportError(
                f"{place}, the run that learned the backbone, is not there: its config.toml says how a device goes on "
                "learning; put it back, or leave --with-training out"
            )
        learned = read_settings(config)
        before = learned.build_method()
        if isinstance(before, FedCLF):
            found, settings = before, learned
    if found.noise.dp_noise:
        raise ExportError("devices add no privacy noise to features (dp_noise): leave --with-training out")
    return found, settings


def network(recipe: ContrastRecipe, spec: CNNSpec, seed: int, backbone: FrozenCNN | None = None) -> Learner:
    """A network as FedCLF begins with it: the backbone's values, where there are any, and a fresh projection.

    Args:
        recipe: tells the projection.
        spec: of the backbone.
        seed: of fresh values.
        backbone: whose values are taken.
    """
    initial = {} if backbone is None else weights_of(backbone.network)
    task = Task(name="pixels", classes=(), backbone=spec, rounds=1, epochs=1, seed=seed, initial=initial)
    return recipe.build(task).requires_grad_(True)


def contrast_plan(method: FedCLF, settings: RunSettings, spec: CNNSpec, model: Learner) -> FedCLFPlan:
    """The record of a network and of how it learns.

    Args:
        method: hyper-parameters.
        settings: epochs and seed. How a head's run balanced its classes says nothing here: this method has no labels.
        spec: of the backbone.
        model: the network.

    Raises:
        ExportError: a setting that devices cannot have.
    """
    recipe, sgd = method.contrast, method.contrast.sgd
    arrays = tensors_of(model)
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters()}
    counters = [name for name, value in arrays.items() if value.dtype.kind == "i"]
    others = [name for name in arrays if name not in parameters and name not in counters]
    kept = Split.of(model, "local").kept
    with refused_settings():
        return FedCLFPlan(
            parameters=parameters,
            statistics={name: arrays[name].shape for name in others},
            counters=tuple(counters),
            norm=tuple(name for name in arrays if name in kept),
            view_px=sgd.side(spec),
            lr=sgd.lr,
            momentum=sgd.momentum,
            weight_decay=sgd.weight_decay,
            batch=sgd.batch,
            bn=sgd.bn,
            queue=recipe.queue,
            temperature=recipe.temperature,
            key_momentum=recipe.key_momentum,
            momentum_encoder=recipe.momentum_encoder,
            negatives=method.negatives,
            epochs=settings.epochs,
            balance="none",
            seed=settings.seed,
        )


def contrast_graphs(model: Learner, plan: FedCLFPlan, spec: CNNSpec) -> tuple[bytes, bytes]:
    """`train_step.onnx` and `encode.onnx`.

    Args:
        model: the network.
        plan: its record.
        spec: tells how pixels are normalised.

    Raises:
        ExportError: the exporter cannot make a graph.
    """
    step = FedCLFStep.of(model, plan, spec.mean, spec.std)
    state = {name: torch.from_numpy(value) for name, value in begun(plan, dict(tensors_of(model))).items()}
    views = torch.zeros((TRACED_BATCH, 3, plan.view_px, plan.view_px))
    numbers = {name: torch.tensor(0.5) for name in SETTINGS}
    given = {FIRST: views, SECOND: views, NEGATIVES: torch.zeros((TRACED_BATCH + 2, FEATURES)), **state, **numbers}
    free = {FIRST: "batch", SECOND: "batch", NEGATIVES: "bank"}
    graph = export_training_graph(step, given, plan.outputs, free)
    learned = {name: state[name] for name in plan.parameters}
    encoder = export_training_graph(step.encoded, {VIEW: views, **learned}, (ENCODED,), {VIEW: "batch"}, "encode")
    return graph, encoder

"""What devices need for learning FedCLF: its step, its record, and the trainer's step that the gate compares.

    q = unit(f_q(first)) ;  theta_k <- m theta_k + (1 - m) theta_q ;  k+ = unit(f_k(second))
    loss = -log exp(q.k+/tau) / (exp(q.k+/tau) + sum_n exp(q.n/tau))        the trainer's own loss (FedCLF eq. 6)
    v <- mu v + (g + wd theta) ;  theta_q <- theta_q - rate v               SGD with momentum, PyTorch's form

Batch norm normalises with the statistics of the batch, and both encoders' running statistics move as PyTorch's do.
Nothing is drawn at random and nothing is remembered: what a device gives twice, it gets twice. Any run that scores with
a convolutional network will do: a head on it, or the network fine-tuned. How FedCLF learns is taken from the run that
learned the backbone, where that was FedCLF, and is the method's default otherwise. The bundle holds the network's form,
not its values: they come with the federation's broadcast. The gate's reference is the trainer's own objective on
PyTorch's modules, with PyTorch's SGD. The method: `edgefl_trainer.methods.fedclf`; on a device:
`edgefl_client.learning.fedclf`. Source: docs/methods.md, FedCLF; docs/design.md, sections 7 and 9; docs/decisions/0027.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from edgefl_export.errors import ExportError, refused_settings
from edgefl_export.graphs.convolutions import moments
from edgefl_export.graphs.training import TRACED_BATCH
from edgefl_export.methods.learned_method import LearnedMethod, PreparedStep, Traceable, Weights
from edgefl_export.parity.step_parity import (
    TENSORS,
    Arrays,
    StepParity,
    batch_size,
    check_steps,
    distance,
    noisy_views,
    refuse,
    run_step,
)
from edgefl_protocol.bundle.fedclf_plan import (
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
from edgefl_protocol.bundle.learning_plan import GRAPH, NEXT
from edgefl_protocol.rules.feature_rows import FEATURES
from edgefl_protocol.rules.slow_encoder import BUFFER, SLOW, key_momentum
from edgefl_trainer.augment import normalised
from edgefl_trainer.contract import Predictor, Task
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.settings import RunSettings, read_settings
from edgefl_trainer.learning.unlabelled.contrast import ContrastRecipe, FeatureRing, MomentumContrast, slow_copy, unit
from edgefl_trainer.learning.unlabelled.self_supervised import LearningNetwork, Split, tensors_of
from edgefl_trainer.losses import contrastive_loss
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.models.backbones import weights_of
from edgefl_trainer.models.cnn import FrozenCNN
from edgefl_trainer.models.spec import CNNSpec

TRIES = 8  # draws of pictures of one step of the gate

Tensors = Mapping[str, Tensor]
Pixels = Float[Tensor, "B 3 px px"]
_Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]


@dataclass(frozen=True)
class FedCLFStep:
    """What a step holds fixed: the network's form, how pixels are normalised, and the temperature."""

    model: LearningNetwork
    plan: FedCLFPlan
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(
        cls, model: LearningNetwork, plan: FedCLFPlan, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> "FedCLFStep":
        """Return the step of a network on the CPU, which is left as it is; mean and deviation are the channels'."""
        bare = deepcopy(model).train()
        for layer in _norms(bare).values():  # it neither reads nor moves running statistics of its own
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        return cls(bare, plan, mean, std)

    def features(self, views: Pixels, tensors: Tensors) -> tuple[Float[Tensor, "B F"], dict[str, Tensor]]:
        """Return what a network says of views in [0, 1] with their batch's statistics, and its statistics after it."""
        mean, std = (views.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        moved: dict[str, Tensor] = {}
        hooks = [
            layer.register_forward_pre_hook(_follower(name, layer.momentum, tensors, moved))
            for name, layer in _norms(self.model).items()
        ]
        given = {name: tensors[name] for name in self.plan.parameters}
        try:
            found: Tensor = functional_call(self.model, given, ((views - mean) / std,))
        finally:
            for hook in hooks:
                hook.remove()
        return found, moved

    def encoded(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return features of unit length: `encode.onnx`."""
        statistics = {name: torch.zeros(self.plan.shape(name)) for name in (*self.plan.statistics, *self.plan.counters)}
        return {ENCODED: unit(self.features(tensors[VIEW], {**statistics, **tensors})[0])}

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        """Take one step, `train_step.onnx`, with the tensors that `FedCLFPlan.inputs` names.

        Returns `loss`, `keys`, then everything that learning changes as `next.NAME`.
        """
        plan = self.plan
        leaves = {name: tensors[name].detach().requires_grad_(True) for name in plan.parameters}
        said, moved = self.features(tensors[FIRST], {**tensors, **leaves})
        with torch.no_grad():
            m = tensors["key_momentum"]
            slow = {name: tensors[SLOW + name] * m + tensors[name] * (1 - m) for name in plan.parameters}
            theirs = {name: tensors[SLOW + name] for name in (*plan.statistics, *plan.counters)}
            answered, followed = self.features(tensors[SECOND], {**theirs, **slow})
            keys = unit(answered)
        loss = contrastive_loss(unit(said), keys, tensors[NEGATIVES], plan.temperature)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        learned: dict[str, Tensor] = {**moved}
        for name, gradient in zip(plan.parameters, gradients, strict=True):
            change = tensors[BUFFER + name] * tensors["momentum"] + (gradient + tensors["weight_decay"] * tensors[name])
            learned[BUFFER + name] = change
            learned[name] = tensors[name] - tensors["rate"] * change
        learned.update({SLOW + name: value for name, value in {**slow, **followed}.items()})
        return {"loss": loss.detach(), "keys": keys, **{NEXT + name: learned[name].detach() for name in plan.state}}


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def _follower(name: str, momentum: float | None, tensors: Tensors, moved: dict[str, Tensor]) -> _Hook:
    """Return what moves one layer's running statistics by the batch that enters it."""
    if momentum is None:
        raise ExportError(f"batch norm {name} averages over all batches equally, which no training step here can do")

    def follow(layer: nn.Module, arguments: tuple[Float[Tensor, "B C H W"], ...]) -> None:
        image = arguments[0].detach()
        count = image.shape[0] * image.shape[2] * image.shape[3]
        mean, variance = moments(image)
        for part, now in (("running_mean", mean), ("running_var", variance * (count / (count - 1)))):
            own = f"{name}.{part}"
            moved[own] = tensors[own] * (1 - momentum) + now * momentum
        counter = f"{name}.num_batches_tracked"
        moved[counter] = tensors[counter] + 1

    return follow


def contrast_method(run: FinishedRun) -> tuple[FedCLF, RunSettings]:
    """Return how FedCLF learned the run's backbone, or would learn on from it.

    Raises:
        ExportError: the run that learned the backbone is not there, or asks for what devices do not do.
    """
    kind, _, place = run.settings.backbone.partition(":")
    found, settings = FedCLF(), run.settings
    if kind == "run":
        config = Path(place) / "config.toml"
        if not config.exists():
            raise ExportError(
                f"{place}, the run that learned the backbone, does not exist: its config.toml says how a device "
                "continues learning; put it back, or leave --with-training out"
            )
        learned = read_settings(config)
        before = learned.build_method()
        if isinstance(before, FedCLF):
            found, settings = before, learned
    if found.noise.dp_noise:
        raise ExportError("devices add no privacy noise to features (dp_noise): leave --with-training out")
    return found, settings


def network(recipe: ContrastRecipe, spec: CNNSpec, seed: int, backbone: FrozenCNN | None = None) -> LearningNetwork:
    """Return a network as FedCLF begins with it: the backbone's values, where there are any, and a fresh projection."""
    initial = {} if backbone is None else weights_of(backbone.network)
    task = Task(name="pixels", classes=(), backbone=spec, rounds=1, epochs=1, seed=seed, initial=initial)
    return recipe.build(task).requires_grad_(True)


def contrast_plan(method: FedCLF, settings: RunSettings, spec: CNNSpec, model: LearningNetwork) -> FedCLFPlan:
    """Return the record of a network and of how it learns.

    Args:
        settings: epochs and seed. How a head's run balanced its classes says nothing here: this method has no labels.

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
            **{
                name: getattr(sgd, name)
                for name in ("lr", "momentum", "weight_decay", "batch", "bn", "optimizer_state")
            },
            **{name: getattr(recipe, name) for name in ("queue", "temperature", "key_momentum", "momentum_encoder")},
            negatives=method.negatives,
            epochs=settings.epochs,
            balance="none",
            seed=settings.seed,
        )


def prepare(run: FinishedRun, predictor: Predictor, weights: Weights) -> PreparedStep:
    """See `LearnedMethod`."""
    backbone = predictor.module.backbone
    assert isinstance(backbone, FrozenCNN)  # `fits`
    method, settings = contrast_method(run)
    model = network(method.contrast, backbone.spec, settings.seed, backbone)
    return prepared(contrast_plan(method, settings, backbone.spec, model), model, backbone.spec)


def prepared(plan: FedCLFPlan, model: LearningNetwork, spec: CNNSpec) -> PreparedStep:
    """Return the step of a network under a record; the network is left as it is."""
    step = FedCLFStep.of(model, plan, spec.mean, spec.std)
    state = {name: torch.from_numpy(value) for name, value in begun(plan, dict(tensors_of(model))).items()}
    views = torch.zeros((TRACED_BATCH, 3, plan.view_px, plan.view_px))
    numbers = {name: torch.tensor(0.5) for name in SETTINGS}
    given = {FIRST: views, SECOND: views, NEGATIVES: torch.zeros((TRACED_BATCH + 2, FEATURES)), **state, **numbers}
    free = {FIRST: "batch", SECOND: "batch", NEGATIVES: "bank"}
    learned = {VIEW: views, **{name: state[name] for name in plan.parameters}}
    return PreparedStep(
        plan=plan,
        graphs={
            GRAPH: Traceable(step=step, example=given, outputs=plan.outputs, free=free),
            ENCODER: Traceable(
                step=step.encoded, example=learned, outputs=(ENCODED,), free={VIEW: "batch"}, name="encode"
            ),
        },
        check=lambda graphs: check_contrast(
            graphs[GRAPH], graphs[ENCODER], FedCLFTrainerSteps(deepcopy(model), plan, spec)
        ),
    )


def check_contrast(graph: bytes, encoder: bytes, trainer: "FedCLFTrainerSteps") -> Sequence[StepParity]:
    """Run the gate of both graphs: the steps, then features of `encode.onnx` against the slow encoder's."""
    figures = check_steps(graph, trainer)
    session = onnxruntime.InferenceSession(encoder, providers=["CPUExecutionProvider"])
    views = trainer.batch(0)[SECOND]
    said = run_step(session, {VIEW: views, **trainer.slow_parameters()})[ENCODED]
    features = StepParity("features", distance(trainer.features(views), said), TENSORS)
    refuse([features])
    return [features, *figures]


class FedCLFTrainerSteps:
    """The trainer's own step, a `Reference`: its objective, PyTorch's modules and SGD. The network changes in place."""

    tries = TRIES

    def __init__(self, model: LearningNetwork, plan: FedCLFPlan, spec: CNNSpec, seed: int = 0, held: int = 256) -> None:
        self.model, self.slow, self._pixels = model.train(), slow_copy(model, {}), (spec.mean, spec.std)
        self._rng = np.random.default_rng(seed)
        drawn = self._rng.normal(size=(held, FEATURES)).astype(np.float32)
        self._negatives = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        queue = FeatureRing(held, torch.device("cpu"))
        queue.push(torch.from_numpy(self._negatives))
        bank = FeatureRing(plan.queue, torch.device("cpu"))
        self._plan, m = plan, key_momentum(plan.key_momentum, 0)
        self._objective = MomentumContrast(
            self.model, self.slow, m, plan.temperature, bank, queue, None, keeps_local=False
        )
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay
        )

    def batch(self, index: int) -> Arrays:
        """See `Reference`: two noisy views of drawn pictures."""
        first, second = noisy_views(self._rng, batch_size(index), self._plan.view_px)
        return self.inputs(first, second, self._plan.lr * (1 - 0.05 * index))

    def inputs(self, first: NDArray[np.float32], second: NDArray[np.float32], rate: float) -> Arrays:
        """Return what a step takes beside the state: two views of each picture, (B, 3, px, px), and a rate."""
        plan = self._plan
        pace = dict(
            zip(SETTINGS, (rate, plan.momentum, plan.weight_decay, key_momentum(plan.key_momentum, 0)), strict=True)
        )
        numbers = {name: np.asarray(value, np.float32) for name, value in pace.items()}
        return {FIRST: first, SECOND: second, NEGATIVES: self._negatives, **numbers}

    def step(self, given: Arrays) -> float:
        """See `Reference`."""
        for group in self._optimizer.param_groups:
            group["lr"] = float(given["rate"])
        views = tuple(normalised(torch.from_numpy(given[name]), *self._pixels) for name in (FIRST, SECOND))
        loss = self._objective(views)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())

    def features(self, views: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what the slow encoder says of views with the statistics of their batch; moves its running ones."""
        with torch.no_grad():
            found: NDArray[np.float32] = unit(self.slow(normalised(torch.from_numpy(views), *self._pixels))).numpy()
        return found

    def slow_parameters(self) -> Arrays:
        """Return the slow encoder's parameters by their names in `encode.onnx`."""
        return {name: value for name, value in _arrays(self.slow).items() if name in self._plan.parameters}

    def state(self) -> Arrays:
        """See `Reference`."""
        slow = {SLOW + name: value for name, value in _arrays(self.slow).items()}
        moved = {
            BUFFER + name: self._optimizer.state[value]["momentum_buffer"].numpy().copy()
            for name, value in self.model.named_parameters()
            if value.requires_grad
        }
        found = {**_arrays(self.model), **slow, **moved}
        return {name: found[name] for name in self._plan.state}

    def restore(self, state: Arrays) -> None:
        """See `Reference`."""
        for module, prefix in ((self.model, ""), (self.slow, SLOW)):
            values = {name: torch.from_numpy(state[prefix + name].copy()) for name in self._plan.network}
            module.load_state_dict(values, strict=False)
        for name, value in self.model.named_parameters():
            if BUFFER + name in state:
                self._optimizer.state[value]["momentum_buffer"] = torch.from_numpy(state[BUFFER + name].copy())

    def quantity(self, name: str) -> str:
        """See `Reference`: tensors of a kind together, for a network has hundreds."""
        own = name.removeprefix(BUFFER).removeprefix(SLOW)
        if name.startswith(BUFFER):
            return "momentum buffers"
        if own in self._plan.counters:
            return "counters"
        return ("slow " if name != own else "") + ("parameters" if own in self._plan.parameters else "statistics")


def _arrays(module: nn.Module) -> Arrays:
    return {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}


LEARNED = LearnedMethod(
    offers="fedclf on a convolutional network",
    fits=lambda run, predictor: isinstance(predictor.module.backbone, FrozenCNN),
    prepare=prepare,
)

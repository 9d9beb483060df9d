"""One training step of FedCLF as a pure function of tensors: views, negatives and state in, loss and new state out.

    q = unit(f_q(first)) ;  theta_k <- m theta_k + (1 - m) theta_q ;  k+ = unit(f_k(second))
    loss = -log exp(q.k+/tau) / (exp(q.k+/tau) + sum_n exp(q.n/tau))        the trainer's own loss (FedCLF eq. 6)
    v <- mu v + (g + wd theta) ;  theta_q <- theta_q - rate v               SGD with momentum, PyTorch's form

Batch norm normalises with the statistics of the batch, and both encoders' running statistics move as PyTorch's do.
Nothing is drawn at random and nothing is remembered: what a device gives twice, it gets twice. Source: docs/methods.md,
FedCLF; docs/design.md, section 9.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from edgefl_export.convolutions import moments
from edgefl_export.errors import ExportError
from edgefl_protocol.bundle.contrast_plan import BUFFER, ENCODED, FIRST, NEGATIVES, NEXT, SECOND, VIEW, FedCLFPlan
from edgefl_protocol.rules.slow_encoder import SLOW
from edgefl_trainer.learning.unlabelled.contrast import unit
from edgefl_trainer.learning.unlabelled.self_supervised import Learner
from edgefl_trainer.losses import contrastive_loss

Tensors = Mapping[str, Tensor]
Pixels = Float[Tensor, "B 3 px px"]


@dataclass(frozen=True)
class FedCLFStep:
    """What a step holds fixed: the network's form, how pixels are normalised, and the temperature."""

    model: Learner
    plan: FedCLFPlan
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, model: Learner, plan: FedCLFPlan, mean: tuple[float, ...], std: tuple[float, ...]) -> "FedCLFStep":
        """The step of a network.

        Args:
            model: on the CPU; left as it is.
            plan: names its tensors.
            mean: of the channels.
            std: of the channels.
        """
        bare = deepcopy(model).train()
        for layer in _norms(bare).values():  # it neither reads nor moves running statistics of its own
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        return cls(bare, plan, mean, std)

    def features(self, views: Pixels, tensors: Tensors) -> tuple[Float[Tensor, "B F"], dict[str, Tensor]]:
        """What a network says of views with the statistics of their batch.

        Args:
            views: in [0, 1].
            tensors: of a network, by name.

        Returns:
            Features of any length; the running statistics and counters after this batch.
        """
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
        """`encode.onnx`: features of unit length.

        Args:
            tensors: `views` and the parameters.
        """
        statistics = {name: torch.zeros(self.plan.shape(name)) for name in (*self.plan.statistics, *self.plan.counters)}
        return {ENCODED: unit(self.features(tensors[VIEW], {**statistics, **tensors})[0])}

    def __call__(self, tensors: Tensors) -> dict[str, Tensor]:
        """`train_step.onnx`: one step.

        Args:
            tensors: as `FedCLFPlan.inputs` names them.

        Returns:
            `loss`, `keys`, then everything that learning changes as `next.NAME`.
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


def _follower(name: str, momentum: float | None, tensors: Tensors, moved: dict[str, Tensor]) -> "_Hook":
    """Moves one layer's running statistics by the batch that enters it."""
    if momentum is None:
        raise ExportError(f"batch norm {name} averages over all batches alike, which no training step here does")
    return _Hook(name, momentum, tensors, moved)


@dataclass(frozen=True)
class _Hook:
    name: str
    momentum: float
    tensors: Tensors
    moved: dict[str, Tensor]

    def __call__(self, layer: nn.Module, arguments: tuple[Float[Tensor, "B C H W"], ...]) -> None:
        image = arguments[0].detach()
        count = image.shape[0] * image.shape[2] * image.shape[3]
        mean, variance = moments(image)
        old = {part: self.tensors[f"{self.name}.{part}"] for part in ("running_mean", "running_var")}
        unbiased = variance * (count / (count - 1))
        for part, now in (("running_mean", mean), ("running_var", unbiased)):
            self.moved[f"{self.name}.{part}"] = old[part] * (1 - self.momentum) + now * self.momentum
        counter = f"{self.name}.num_batches_tracked"
        self.moved[counter] = self.tensors[counter] + 1

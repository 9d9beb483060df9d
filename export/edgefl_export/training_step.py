"""One training step of FedEvPrompt as a pure function of tensors: state and batch in, loss and new state out.

    loss = L_eps + λ·L_KD   (FedEvPrompt eq. 2, 4 and 7; the trainer's own loss functions)
    gradient with respect to prompts and head only
    AdamW with decoupled decay (arXiv 1711.05101, Algorithm 2, PyTorch's form)

Nothing is drawn at random and nothing is remembered, so the step can be traced, and a device that gives the same inputs
learns the same weights. The KL weight, λ, the learning rates and the decay are inputs; the network is a constant.
Source: docs/methods.md, 1.3 to 1.6; docs/design.md, section 9.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from edgefl_protocol.bundle.training_plan import FIRST_MOMENT, NEXT, RATE, SECOND_MOMENT, STEP
from edgefl_trainer.losses import evidential_loss, rollout_distillation
from edgefl_trainer.models.head import evidence_of
from edgefl_trainer.models.scoring import ScoreModule
from edgefl_trainer.models.vit import ViTOutput
from edgefl_trainer.rollout import max_normalise, rollout_from_factors

BETAS = (0.9, 0.999)
EPSILON = 1e-8
NO_EVIDENCE = 1e-6  # summed over the classes, at most: the image teaches a ReLU head nothing


@dataclass(frozen=True)
class FedEvPromptStep:
    """What a step holds fixed: the network with its options, what learns, and the distance between maps."""

    module: ScoreModule
    trained: tuple[str, ...]
    gram: Float[Tensor, "N N"]

    def loss(
        self, image: UInt8[Tensor, "B S S 3"], target: Int[Tensor, " B"], tensors: Mapping[str, Tensor]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
        """The batch's loss.

        Args:
            image: pixels, channels last, (B, S, S, 3).
            target: class index of each image, (B,).
            tensors: the scoring tensors but temperature, and `kl_weight`, `kd_weight`, `peers.means` (K, N),
                `peers.counts` (K,).

        Returns:
            L_eps + λ·L_KD; λ·L_KD alone; the share of images without evidence.
        """
        output = self.module.output(image, tensors, need_attention=True)
        assert isinstance(output, ViTOutput)
        logits = self.module.logits(self.module.features(output, tensors), tensors)
        maps = max_normalise(rollout_from_factors(output.factors))
        evidence = evidence_of(logits, self.module.options.evidence)
        own = evidential_loss(evidence, target, tensors["prior"], tensors["kl_weight"].to(torch.float64))
        peers = rollout_distillation(maps, target, tensors["peers.means"], tensors["peers.counts"], self.gram)
        shared = tensors["kd_weight"] * peers
        dead = (evidence.detach().sum(dim=1) <= NO_EVIDENCE).to(torch.float32).mean()
        return own + shared, shared, dead

    def __call__(
        self, image: UInt8[Tensor, "B S S 3"], target: Int[Tensor, " B"], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """One step.

        Args:
            image: as for `loss`.
            target: as for `loss`.
            tensors: those of `loss`, the moments and step count under `optimizer.`, a rate of each trained tensor and
                `weight_decay`.

        Returns:
            `loss`, `kd` and `dead`, then everything that learning changes, as `next.NAME`.
        """
        leaves = {name: tensors[name].detach().requires_grad_(True) for name in self.trained}
        loss, shared, dead = self.loss(image, target, {**tensors, **leaves})
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
    """AdamW of one tensor.

    Args:
        value: before the step.
        gradient: of the loss.
        moments: running means of the gradient and of its square.
        count: number of this step, from 1.
        rate: learning rate.
        decay: weight decay; a step shrinks values by rate·decay.

    Returns:
        The value and the two moments after the step.
    """
    first = BETAS[0] * moments[0] + (1 - BETAS[0]) * gradient
    second = BETAS[1] * moments[1] + (1 - BETAS[1]) * gradient * gradient
    # 1 − 0.999^t loses four of float32's seven digits in the first steps.
    exponent = count.to(torch.float64)
    corrections = [1 - torch.pow(torch.full_like(exponent, beta), exponent) for beta in BETAS]
    scale = second.sqrt() / corrections[1].sqrt().to(torch.float32) + EPSILON
    size = (rate.to(torch.float64) / corrections[0]).to(torch.float32)
    return value * (1 - rate * decay) - size * (first / scale), first, second

"""The training loop of every method: batches, the loss of each, a step of the optimiser, and what a person is told.

A recipe gives what differs: the batches of an epoch, the loss of one batch, the optimiser, and where it changes from
step to step the rate. It reads the sums of each epoch and writes the epoch's summary itself.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from edgefl_protocol.rules.rates import epochs_done
from edgefl_trainer.contract import Site
from edgefl_trainer.errors import TrainingError

Batch = TypeVar("Batch", bound=tuple[Any, ...])
"""What a loss reads; the first of it has one row for each image."""


@dataclass
class EpochSums:
    """What one epoch learned from, step by step."""

    losses: list[float] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # seconds in which there was nothing to learn from

    @property
    def mean_of_images(self) -> float:
        """Mean loss of an image: each batch weighs by its size."""
        total = 0.0
        for loss, count in zip(self.losses, self.images, strict=True):
            total += count * loss
        return total / sum(self.images)

    @property
    def mean_of_steps(self) -> float:
        """Mean loss of a step: each batch weighs the same."""
        return float(np.mean(self.losses))


def run_epochs(
    site: Site,
    round_: int,
    epochs: Sequence[int],
    batches: Callable[[int], tuple[int, Iterable[Batch]]],
    loss_of: Callable[[Batch], Float[Tensor, ""]],
    optimizer: torch.optim.Optimizer,
    *,
    rate: Callable[[float], float] | None = None,
    take_step: Callable[[], object] | None = None,
    tells_wait: bool = False,
) -> Iterator[EpochSums]:
    """Learn epoch after epoch, and give the sums of each as it ends; the site is told of each step.

    Args:
        round_: train round, from 1.
        epochs: their numbers, for draws and schedule.
        batches: of an epoch, and before them how many; the next one is asked for when a step is done.
        loss_of: of one batch; steps nothing.
        optimizer: its groups may name a `rate_share`, the factor of their rate.
        rate: learning rate after some epochs of the whole run, with fractions; None leaves the optimiser's as they are.
        take_step: once there are gradients, in place of `optimizer.step`.
        tells_wait: whether the seconds without a batch are told, too.

    Raises:
        TrainingError: a loss that is not finite.
    """
    for epoch in epochs:
        sums, asked = EpochSums(), perf_counter()
        steps, of_epoch = batches(epoch)
        for step, batch in enumerate(of_epoch):
            sums.waits.append(perf_counter() - asked)
            if rate is not None:
                now = rate(epochs_done(round_, site.task.epochs, epoch, step, steps))
                for group in optimizer.param_groups:
                    group["lr"] = now * group.get("rate_share", 1.0)
            loss = loss_of(batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            (take_step or optimizer.step)()
            sums.losses.append(check_finite(loss, site, round_, step))
            sums.images.append(len(batch[0]))
            told = {"epoch": epoch + 1, "step": step + 1, "steps": steps, "loss": sums.losses[-1]}
            waited = {"wait_seconds": sums.waits[-1]} if tells_wait else {}
            site.report({**told, "images": sums.images[-1], **waited})
            asked = perf_counter()
        yield sums


def check_finite(loss: Float[Tensor, ""], site: Site, round_: int, step: int) -> float:
    """Return the loss as a number; a `TrainingError` that names site, round and step where it is not finite.

    `step` counts from 0; the sentence counts from 1, as the progress display does.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainingError(
            f"the loss of site {site.name} is {value} in round {round_}, step {step + 1}: "
            "lower the learning rate and name another --out; the rounds before are kept."
        )
    return value

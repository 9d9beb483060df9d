"""The slow encoder of momentum contrast over the rounds of a federation: how fast it follows, and where it lives.

    every step    theta_k <- m theta_k + (1 - m) theta_q                                    MoCo, eq. 2
    `averaged`    it travels and is averaged like the encoder
    `local`       it stays at its site
    `reset`       each round begins with a copy of the encoder

Momentum of SGD (`optimizer_state`) begins each round at zero (`reset`), or stays at its site (`keep`).

With `bn=local`, tensors of batch norm stay at their site in both networks (FedBN, arXiv 2102.07623). In states and
payloads a tensor of the slow encoder has the encoder's name with `momentum.` in front, and in states SGD's momentum of
a tensor that of the tensor with `optimizer.momentum_buffer.`, which never travels. Sources: MoCo (arXiv
1911.05722); docs/methods.md, FedCLF.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from numpy.typing import NDArray

SLOW: Final = "momentum."
BUFFER: Final = "optimizer.momentum_buffer."
SHORT_RUN: Final = 20_000  # local steps of a run, below which the slow encoder follows faster
MomentumEncoder = Literal["averaged", "local", "reset"]
BatchNorm = Literal["averaged", "local"]
OptimizerState = Literal["reset", "keep"]


def local_steps(rounds: int, epochs: int, steps: int) -> int:
    """Count the steps that one site takes in a run where it takes part in every round.

    Args:
        rounds: R of the run.
        epochs: E of a round.
        steps: of an epoch: its batches.
    """
    return rounds * epochs * steps


def key_momentum(asked: float, whole: int) -> float:
    """Give m: what was asked for, else 0.99 for short runs and 0.999 for long ones.

    Args:
        asked: 0 for the usual one.
        whole: of the run, see `local_steps`.
    """
    return asked or (0.99 if whole < SHORT_RUN else 0.999)


def round_begins(
    broadcast: Mapping[str, NDArray[Any]], own: Mapping[str, NDArray[Any]], momentum_encoder: MomentumEncoder
) -> dict[str, NDArray[Any]]:
    """Give the tensors a round begins with: what stayed at the site is its own, the rest came with the broadcast.

    A tensor of the slow encoder that is missing in the result is a copy of the encoder's, and SGD's momentum zero.
    """
    both = {**{name: value for name, value in broadcast.items() if not name.startswith(BUFFER)}, **own}
    outlives = momentum_encoder != "reset"
    return {name: value for name, value in both.items() if outlives or not name.startswith(SLOW)}


def leaving(network: Sequence[str], kept: Collection[str], momentum_encoder: MomentumEncoder) -> tuple[str, ...]:
    """Name the tensors that leave a site after a round; `kept` stay: batch norm's with `bn=local`."""
    slow = [SLOW + name for name in network] if momentum_encoder == "averaged" else []
    return tuple(name for name in (*network, *slow) if name.removeprefix(SLOW) not in kept)


def staying(
    network: Sequence[str],
    kept: Collection[str],
    momentum_encoder: MomentumEncoder,
    learned: Collection[str] = (),
) -> tuple[str, ...]:
    """Name the tensors that a site remembers until its next round; arguments as of `leaving`.

    Args:
        learned: parameters whose momentum of SGD stays, with `optimizer_state=keep`.
    """
    slow = [SLOW + name for name in network] if momentum_encoder != "reset" else []
    gone = set(leaving(network, kept, momentum_encoder))
    return (*(name for name in (*network, *slow) if name not in gone), *(BUFFER + name for name in learned))

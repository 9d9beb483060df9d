"""What changes over a run: learning rates, and the weight of a loss term that is let in slowly.

Sources: SGDR (arXiv 1608.03983) eq. 5 without restarts; FedEvPrompt's annealing, docs/methods.md 1.3.
"""

import math
from typing import Final, Literal

AnnealClock = Literal["run", "round"]

_PROMPT_RATES: Final = {"prompts.b": "lr_b", "prompts.g": "lr_b", "prompts.t": "lr_t"}


def cosine_rate(done: float, whole: float, warmup: float = 0.0) -> float:
    """Give the share of the peak rate at a moment of a run.

    Args:
        done: steps or epochs behind, with fractions.
        whole: of the run, in the same unit.
        warmup: of these, those in which the rate rises from zero.
    """
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - warmup) / max(1e-12, whole - warmup))))


def falling_rate(peak: float, done: float, rounds: int, epochs: int) -> float:
    """Give the learning rate at a moment of a run: from its peak to 0 along one cosine over all rounds.

    Args:
        peak: rate of the first step.
        done: epochs behind, see `epochs_done`.
        rounds: R of the run.
        epochs: E of a round.
    """
    return peak * cosine_rate(done, rounds * epochs)


def epochs_done(round_: int, epochs: int, epoch: int, step: int, steps: int) -> float:
    """Give the epochs of a run that are behind before a step; rounds count from 1, epochs and steps from 0."""
    return (round_ - 1) * epochs + epoch + step / steps


def rate_setting(name: str) -> str:
    """Return the setting that holds the learning rate of one of FedEvPrompt's tensors: `lr_b`, `lr_t` or `lr_head`."""
    return _PROMPT_RATES.get(name, "lr_head")


def kl_weight(epoch: int, behind: int, anneal_epochs: int, clock: AnnealClock) -> float:
    """Give the weight of FedEvPrompt's KL term, min(1, t / anneal_epochs).

    Args:
        epoch: of the round, from 0.
        behind: epochs of the rounds before.
        anneal_epochs: t at which the weight is 1.
        clock: whether t counts epochs over the whole run, or from each round's start.
    """
    return min(1.0, (epoch if clock == "round" else behind + epoch) / anneal_epochs)

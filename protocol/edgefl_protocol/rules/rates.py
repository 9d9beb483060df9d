"""Learning rates over a run: a linear warm-up, then one cosine down to zero. Source: SGDR (arXiv 1608.03983), eq. 5."""

import math


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


def epochs_done(round_: int, epochs: int, epoch: int, step: int, steps: int) -> float:
    """Give the epochs of a run that are behind before a step.

    Args:
        round_: train round, from 1.
        epochs: E, of a round.
        epoch: of the round, from 0.
        step: of the epoch, from 0.
        steps: of an epoch.
    """
    return (round_ - 1) * epochs + epoch + step / steps

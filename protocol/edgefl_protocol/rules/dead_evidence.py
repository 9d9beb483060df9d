"""Pictures without evidence, which teach a ReLU head nothing, and when a person should hear of them.

Source: docs/methods.md 1.3.
"""

from typing import Final

NO_EVIDENCE: Final = 1e-6  # summed over the classes, at most
MOST_DEAD: Final = 0.5  # share of an epoch's pictures without evidence, above which a warning is due


def dead_warning(share: float, round_: int, epoch: int) -> str | None:
    """Say that most pictures raise no evidence, as a clause; None where few do, or in the first epoch of a run.

    Args:
        share: of an epoch's pictures without evidence.
        round_: train round, from 1.
        epoch: of the round, from 0.
    """
    if share <= MOST_DEAD or (round_, epoch) <= (1, 0):
        return None
    return f"{share:.0%} of the pictures raise no evidence and teach nothing"

"""What a method's sites release under Gaussian noise, phase by phase: what a ledger counts and a privacy budget bounds.

Guarantees: a method tells it itself (`Declaration.release`). Source: docs/decisions/0066.
"""

from edgefl_trainer.contract import Method, Phase, declared
from edgefl_trainer.gaussian_noise import NoisyRelease


def release_of(method: Method, phase: Phase) -> NoisyRelease | None:
    """Return the noise on what a method's sites send in a phase; None where there is none that can be accounted."""
    told = declared(method).release
    return told(method, phase) if told else None


def releases_of(method: Method, rounds: int) -> tuple[NoisyRelease, ...]:
    """Return what a site that takes part each time releases in a run of that many rounds; empty: a budget is idle."""
    return tuple(one for phase in method.phases(rounds) if (one := release_of(method, phase)) is not None)

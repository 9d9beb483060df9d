"""What follows a run, and what it is told: the interface of TensorBoard and MLflow to the thread that feeds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Ending = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class FollowedRun:
    """What a tracker is told of a run before its first figure."""

    name: str
    identity: str  # by which a tracker knows a resumed run again
    settings: Mapping[str, str]


class Tracker(Protocol):
    """What follows a run; each call may fail, and `begin` is called again then."""

    def begin(self, run: FollowedRun) -> None:
        """Begin, or go on with what it has of this run."""

    def figures(self, step: int, seconds: float, figures: Mapping[str, float]) -> None:
        """Take the figures of a round; `seconds` is how long the run has worked until then."""

    def end(self, ending: Ending, texts: Mapping[str, str]) -> None:
        """Take how the run ended, and what its summary says in words."""

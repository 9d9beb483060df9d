"""One round of a federated method on the device: the contract that every kind of learning meets.

A `RoundLearner` is the site half of one method on stock onnxruntime, with the meaning of `Method.local_round` of the
trainer. It sees no network and no federation: pictures, a state and a broadcast in; a new state and a reply out. The
same learner does the rounds of `edgefl train` alone, of a live federation, and of a local engine that a test runs.
Source: docs/design.md, sections 4 and 9.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from edgefl_client.learning.checkpoint import Point, damaged
from edgefl_client.learning.contrast_session import FeatureEncoder
from edgefl_client.learning.errors import LearningError, Paused
from edgefl_client.learning.options import Report, TrainOptions
from edgefl_client.learning.own_pictures import Dealt
from edgefl_client.scoring.checked_file import read_checked, write_checked
from edgefl_client.scoring.personal import PersonalState
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.errors import PayloadError
from edgefl_protocol.payload import Payload
from edgefl_protocol.rules.maps import MAX_MAPS, SentMaps

Arrays = Mapping[str, NDArray[Any]]
ALONE = "device"  # the site's name of a device that is a member of no federation


class RoundLearner(Protocol):
    """The device's half of one method."""

    @property
    def travels(self) -> tuple[str, ...]:
        """What a reply shares, of `rules.travels.KINDS`: what the owner is asked before the work."""

    def start(self) -> Arrays:
        """Return the site's state before its first round."""

    def most_reply_bytes(self, broadcast: Payload) -> int:
        """Tell, before the work, the most bytes that a round's reply takes; 0 where it is small beside any limit."""

    def local_round(self, state: Arrays, broadcast: Payload, report: Report) -> tuple[Arrays, Payload]:
        """Do one round: the same arguments, pictures and number of threads give the same bits.

        Called again with the same arguments after a kill or a pause, it goes on from the last point it kept.

        Args:
            state: after the last round that counted; `start()` before the first. Left as it is.
            broadcast: with the scalars `phase`, `round` and `rounds`; classes numbered as the bundle does.
            report: told what happens: steps (`epoch`, `epochs`, `step`, `steps`, `loss`), `summary`, `warning`.

        Returns:
            The new state, and the reply with the scalar `site_sha256`: the digest of the new state.

        Raises:
            Paused: a limit of the owner stopped it; it goes on another time.
            LearningError: it cannot go on; the state before is the one that counts.
        """


class Learner(Protocol):
    """The device's half of a method before it has pictures: the class in the table of learners."""

    only_in_federations: str | None
    """Why the method cannot be learned alone, as a sentence; None where it can."""

    encoder: type[FeatureEncoder] | None
    """What makes features that a device may contribute without learning; None where the method shares none."""

    def __call__(self, bundle: Bundle, rows: Dealt, around: "Circumstances", /) -> RoundLearner:
        """Make the learner of a bundle's method.

        Args:
            rows: the owner's pictures: those that teach, and those held back where the method judges.
        """


class Points(Protocol):
    """Where a learner keeps how far it has come inside a round."""

    def load(self) -> Payload | None:
        """Return what was kept last, None where nothing was."""

    def save(self, point: Payload) -> None:
        """Keep a point durably, in place of the one before."""


@dataclass(frozen=True)
class PointFile:
    """Points in one file of the learning folder, which exists; its checksum tells a bit that fell over."""

    path: Path

    def load(self) -> Payload | None:
        """See `Points`."""
        if not self.path.exists():
            return None
        try:
            return read_checked(self.path)
        except PayloadError as error:
            raise damaged(self.path) from error

    def save(self, point: Payload) -> None:
        """See `Points`."""
        write_checked(self.path, point)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a learner is told beside bundle and pictures."""

    points: Points  # where the points of a round are kept
    site: str = ALONE  # this member's name, which enters the draws
    # what the owner changes: batch, threads, limits, seconds between points
    options: TrainOptions = field(default_factory=TrainOptions)
    maps_per_class: int = MAX_MAPS  # most rollout maps M of a reply; 0 for a device that shares none
    sent_maps: SentMaps = "each"  # what is sent of them: each, or of every class their mean
    # told what the gate found of values that a round learned, before the reply is made
    judged: Callable[[PersonalState], None] = lambda found: None
    # the personal values that score until now: the gate compares new ones with them, too; None where the bundle's score
    in_use: PersonalState | None = None
    # when the work began, reading the pictures included, by the clock of the limits; None for the call of `local_round`
    started: float | None = None

    def since(self) -> float:
        """Tell when the minutes that the owner allows began, by the clock of the limits."""
        return self.options.limits.clock() if self.started is None else self.started


class Keeper:
    """Keeps points while a round is learned, and ends it between two steps where a limit is reached."""

    def __init__(self, around: Circumstances) -> None:
        self._points, self._options = around.points, around.options
        self._started, self._saved = around.since(), around.options.limits.clock()

    def stepped(self, point: Point) -> None:
        """Hear that a step was taken.

        Raises:
            Paused: a limit is reached; the point is kept.
        """
        limits = self._options.limits
        reason = limits.reached(self._started)
        if reason is not None or limits.clock() - self._saved >= self._options.checkpoint_seconds:
            self._points.save(point.to_payload())
            self._saved = limits.clock()
        if reason is not None:
            raise Paused(reason)

    def learned(self, point: Point) -> Point:
        """Keep the point after all epochs."""
        done = replace(point, stage="learned")
        self._points.save(done.to_payload())
        return done


def phase_and_round(broadcast: Payload) -> tuple[str, int]:
    """Return phase and train round of a broadcast.

    Raises:
        LearningError: it does not tell them (`other_broadcast`).
    """
    phase, round_ = (broadcast.scalars.get(name) for name in ("phase", "round"))
    if not isinstance(phase, str) or not isinstance(round_, int) or round_ < 0:
        raise LearningError("the broadcast names no phase and round; tell the operator", "other_broadcast")
    return phase, round_


def rounds_of(broadcast: Payload) -> int:
    """Return how many train rounds there are, from which a method takes its rates.

    Raises:
        LearningError: it does not tell (`other_broadcast`).
    """
    rounds = broadcast.scalars.get("rounds")
    if not isinstance(rounds, int) or rounds < 1:
        raise LearningError(
            "the broadcast does not say how many rounds there are; tell the operator", "other_broadcast"
        )
    return rounds

"""One line of an audit: what was attacked, how far the attack came, and what the figure has to be compared with.

Guarantees: a line whose control fails is `inconclusive`, whatever its figure; a line is within the target, or no more
than the floor, only where its whole interval is; figures are finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from scipy.special import betaincinv

from edgefl_trainer.evaluate.intervals import LEVEL, RESAMPLES, interval, lesion_weights

Verdict = Literal[
    "within the target",
    "no more than the floor",
    "above the target",
    "not told apart from the target",
    "not told apart from the floor",
    "inconclusive",
]
Between = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class AuditLine:
    """A figure of one attack on one kind of payload; an attack succeeds more, the higher its figures are."""

    kind: str  # what left: of `rules.travels.KINDS`, or "model"
    attack: str  # re-identification, reconstruction or membership
    against: str  # what the attacker has, in words
    measure: str  # which of the attack's ways came farthest
    figure: float
    interval: Between  # 95 %
    floor: float  # what the attack reaches without the payload
    floor_of: str  # what that knows
    control: float  # what it reaches on an unprotected input
    control_of: str  # which input that is
    needs: float  # what the control has to reach
    target: float  # docs/security.md 7
    pictures: int
    sites: tuple[str, ...]
    more: Mapping[str, float] = field(default_factory=dict)  # further figures of the attack by name

    @property
    def verdict(self) -> Verdict:
        """What the figure says, if the control shows that the attack works at all.

        The whole interval has to lie on one side of the target and of the floor, whichever is higher; where it reaches
        over that, the pictures are too few to tell.
        """
        low, high = self.interval
        if self.control < self.needs:
            return "inconclusive"
        if high <= self.target:
            return "within the target"
        if high <= self.floor:
            return "no more than the floor"
        if low > max(self.target, self.floor):
            return "above the target"
        return "not told apart from the target" if self.target >= self.floor else "not told apart from the floor"

    def to_json(self) -> dict[str, Any]:
        """Write the line's values and its verdict."""
        return {**asdict(self), "sites": list(self.sites), "interval": list(self.interval), "verdict": self.verdict}


@dataclass(frozen=True)
class NotAttacked:
    """What an audit left out, and why, as one sentence."""

    kind: str
    attack: str
    why: str


def share_bounds(hits: float, trials: int) -> Between:
    """Compute Clopper and Pearson's 95 % interval (Biometrika 26, 1934) of a share of independent trials.

    Args:
        hits: may be broken, where ties were shared out.
        trials: at least 1.
    """
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits <= 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits >= trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return low, high


def mean_bounds(values: Float[np.ndarray, " n"], lesions: Sequence[str]) -> Between:
    """Compute the 95 % interval of a mean by drawing whole lesions with replacement."""
    draws = np.concatenate([w @ values / w.sum(axis=1) for w in lesion_weights(lesions, RESAMPLES)])
    found = interval(draws)
    assert found is not None  # a mean of finite values is defined in each draw
    return found[0], found[1]


def table(lines: Sequence[AuditLine], left_out: Sequence[NotAttacked]) -> list[str]:
    """Write an audit as text: a row for each line, then what was not attacked."""
    head = ("kind", "attack", "figure", "95 %", "floor", "control", "target", "pictures", "verdict")
    rows = [head, *(_row(line) for line in lines)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    told = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ] * bool(lines)
    for line in lines:
        told.append(
            f"{line.kind}, {line.attack}: {line.against}; by {line.measure}{_more(line)}; floor: {line.floor_of}; "
            f"control: {line.control_of}; sites: {', '.join(line.sites)}"
        )
    return [*told, *(f"not attacked: {one.kind}, {one.attack}: {one.why}" for one in left_out)]


def _row(line: AuditLine) -> tuple[str, ...]:
    low, high = line.interval
    return (
        line.kind, line.attack, f"{line.figure:.3f}", f"{low:.3f} to {high:.3f}", f"{line.floor:.3f}",
        f"{line.control:.3f}", f"{line.target:.3f}", f"{line.pictures:,}", line.verdict,
    )  # fmt: skip


def _more(line: AuditLine) -> str:
    return "".join(f", {name} {value:.3f}" for name, value in line.more.items())

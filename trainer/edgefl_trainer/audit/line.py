"""One line of an audit: what was attacked, how far the attack came, and what the figure has to be compared with.

Guarantees: a line whose control fails is `inconclusive`, whatever its figure; a line is within the target, or no more
than the floor, only where its whole interval is; figures are finite.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

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
MEANINGS: Final[Mapping[Verdict, str]] = {  # docs/reference/runs.md, "What leaves, attacked"
    "within the target": "the control succeeded, and the whole interval is at most the target",
    "no more than the floor": "the whole interval is at most the floor, which is above the target",
    "above the target": "the whole interval is above the target, and above the floor",
    "not told apart from the target": "the interval reaches over the target: more pictures have to tell",
    "not told apart from the floor": "the interval reaches over the floor, which is above the target: more pictures "
    "have to tell",
    "inconclusive": "the control failed, so this attack could not have shown a leak: the figure is no sign of safety",
}
IDENTIFICATION, RECONSTRUCTION, MEMBERSHIP = "re-identification", "reconstruction", "membership"
FIGURES: Final[Mapping[str, str]] = {  # what the figure of an attack is
    IDENTIFICATION: "how often the right candidate is named",
    RECONSTRUCTION: "structural similarity (SSIM) of the decoded picture with the true one; 1 is the same picture",
    MEMBERSHIP: "area under the ROC curve; 0.5 is a guess, 1 tells each row",
}
TRUE_POSITIVES: Final = ("TPR at 1 % FPR", "its low", "its high")  # further figures of membership: names in audit.json


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

    @property
    def family(self) -> str:
        """The attack without its view: a key of `FIGURES`."""
        return self.attack.partition(",")[0]

    def written(self, value: float, digits: int = 1) -> str:
        """Write a figure of this line: a share in per cent, another as it is."""
        return f"{value:.{digits}%}".replace("%", " %") if self.family == IDENTIFICATION else f"{value:.{digits + 2}f}"

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, with the numbers that are compared."""
        digits = 1 if self.written(self.control) != self.written(self.needs) else 3  # 0.7998 is not 0.800
        control = f"control {self.written(self.control, digits)}, needed {self.written(self.needs, digits)}: "
        target, floor = f"the target of {self.written(self.target)}", f"the floor of {self.written(self.floor)}"
        whole = "the attack works, and the whole 95 % interval is"
        wide = "the attack works, but the 95 % interval reaches"
        why: dict[Verdict, str] = {
            "inconclusive": "this attack could not have shown a leak",
            "within the target": f"{whole} at most {target}",
            "no more than the floor": f"{whole} at most {floor}, which it reaches without what was sent",
            "above the target": f"{whole} above {target} and {floor}",
            "not told apart from the target": f"{wide} over {target}",
            "not told apart from the floor": f"{wide} over {floor}, which it reaches without what was sent",
        }
        return control + why[self.verdict]

    @property
    def further(self) -> str:
        """The further figures in words, all of them shares; nothing where there are none."""
        name, *bounds = TRUE_POSITIVES
        told = [f"{key} {100 * value:.1f} %" for key, value in self.more.items() if key not in TRUE_POSITIVES]
        if name in self.more:
            low, high = (f"{100 * self.more[bound]:.1f}" for bound in bounds)
            told.append(f"true positives at 1 % false ones {100 * self.more[name]:.1f} % ({low} to {high} %)")
        return ", ".join(told)

    def to_json(self) -> dict[str, Any]:
        """Write the line's values and its verdict."""
        return {**asdict(self), "sites": list(self.sites), "interval": list(self.interval), "verdict": self.verdict}


@dataclass(frozen=True)
class NotAttacked:
    """What an audit left out, and why, as one sentence."""

    kind: str
    attack: str
    why: str
    sites: tuple[str, ...] = ()  # of which it is so; none where it is so of all

    @property
    def told(self) -> str:
        """What was not attacked, and why, as one line."""
        return f"not attacked: {self.kind}, {self.attack}: {self.why}"


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

"""One line of an audit: what was attacked, how far the attack came, and what the figure has to be compared with.

Guarantees: a line whose control fails is `inconclusive`, whatever its figure; a line is within the target, or no more
than the floor, only where its whole interval is; a line without an interval is on neither side; figures are finite.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from edgefl_protocol.sentences import counted
from edgefl_trainer.audit.bounds import LEAST_UNITS, Between

Verdict = Literal[
    "within the target",
    "no more than the floor",
    "above the target",
    "not told apart from the target",
    "not told apart from the floor",
    "inconclusive",
]
FloorVerdict = Literal["above the floor", "no more than the floor", "not told apart from the floor", "inconclusive"]
MEANINGS: Final[Mapping[Verdict, str]] = {  # docs/reference/runs.md, "What leaves, attacked"
    "within the target": "the control succeeded, and the whole interval is at most the target",
    "no more than the floor": "the whole interval of figure minus floor is at most 0; the floor is above the target",
    "above the target": "the whole interval is above the target, and that of figure minus floor above 0",
    "not told apart from the target": "the interval reaches over the target, or there is none: more pictures, or where "
    "they share what was sent more sites, have to tell",
    "not told apart from the floor": "the same of figure minus floor and 0, where the floor is above the target or the "
    "whole interval is",
    "inconclusive": "the control failed, so this attack could not have shown a leak: the figure is no sign of safety",
}
IDENTIFICATION, RECONSTRUCTION, MEMBERSHIP = "re-identification", "reconstruction", "membership"
FIGURES: Final[Mapping[str, str]] = {  # what the figure of an attack is
    IDENTIFICATION: "how often the right candidate is named",
    RECONSTRUCTION: "structural similarity (SSIM) of the decoded picture with the true one; 1 is the same picture",
    MEMBERSHIP: "area under the ROC curve; 0.5 is a guess, 1 tells each row",
}
DRAWN_OF: Final[Mapping[str, tuple[str, str]]] = {  # what an interval draws: as in audit.json, and several of them
    "lesion": ("lesion", "lesions"),
    "site and class": ("pair of site and class", "pairs of site and class"),
    "site": ("site", "sites"),
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
    interval: Between | None  # 95 %; none where fewer than `LEAST_UNITS` could be drawn
    floor: float  # what the attack reaches without the payload
    floor_of: str  # what that knows
    control: float  # what it reaches on an unprotected input
    control_of: str  # which input that is
    needs: float  # what the control has to reach
    target: float  # docs/security.md 7
    pictures: int
    sites: tuple[str, ...]
    more: Mapping[str, float] = field(default_factory=dict)  # further figures of the attack by name
    # What follows is None in a file of an edgefl that counted each picture by itself.
    drawn: int | None = None  # how many the intervals draw
    drawn_of: str | None = None  # of what: of `DRAWN_OF`
    minus_floor: float | None = None  # figure minus floor, of the same pictures
    minus_floor_interval: Between | None = None  # 95 %

    @property
    def verdict(self) -> Verdict:
        """What the figure says, if the control shows that the attack works at all.

        The whole interval has to lie on one side of the target, and that of figure minus floor on one side of 0; where
        either reaches over, the pictures are too few to tell.
        """
        if self.control < self.needs:
            return "inconclusive"
        beside_target, beside_floor = _side(self.interval, self.target), _side(self.minus_floor_interval, 0.0)
        if self.minus_floor is None:
            beside_floor = _side(self.interval, self.floor)
        if beside_target < 0:
            return "within the target"
        if beside_floor < 0 and self.floor > self.target:
            return "no more than the floor"
        if beside_target > 0 and beside_floor > 0:
            return "above the target"
        over_floor = beside_target > 0 or (self.floor > self.target and beside_floor == 0)
        return "not told apart from the floor" if over_floor else "not told apart from the target"

    @property
    def floor_verdict(self) -> FloorVerdict | None:
        """What figure minus floor says; None where it was not kept."""
        if self.minus_floor is None:
            return None
        if self.control < self.needs:
            return "inconclusive"
        side = _side(self.minus_floor_interval, 0.0)
        if side == 0:
            return "not told apart from the floor"
        return "above the floor" if side > 0 else "no more than the floor"

    @property
    def family(self) -> str:
        """The attack without its view: a key of `FIGURES`."""
        return self.attack.partition(",")[0]

    def written(self, value: float, digits: int = 1) -> str:
        """Write a figure of this line: a share in per cent, another as it is."""
        return f"{value:.{digits}%}".replace("%", " %") if self.family == IDENTIFICATION else f"{value:.{digits + 2}f}"

    def between(self, bounds: Between | None) -> str:
        """Write an interval of this line's figures."""
        if bounds is None:
            return "no interval"
        low, high = map(self.written, bounds)
        return f"{low.removesuffix(' %')} to {high}"

    @property
    def beside_floor(self) -> str:
        """Figure minus floor with its verdict, and what the intervals draw, in words."""
        if self.minus_floor is None:
            return (
                "not kept by the earlier edgefl that made this line, whose interval is too narrow where pictures share "
                "what was sent"
            )
        unit = " points" if self.family == IDENTIFICATION else ""
        sign = "+" if self.minus_floor >= 0 else ""
        value = f"{sign}{self.written(self.minus_floor).removesuffix(' %')}{unit}"
        between = self.between(self.minus_floor_interval).removesuffix(" %")
        few = f", and an interval needs {LEAST_UNITS}" if self.minus_floor_interval is None else ""
        return f"{value} ({between}), {self.floor_verdict}; drawn: {self._drawn}{few}"

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, with the numbers that are compared."""
        digits = 1 if self.written(self.control) != self.written(self.needs) else 3  # 0.7998 is not 0.800
        control = f"control {self.written(self.control, digits)}, needed {self.written(self.needs, digits)}: "
        target, floor = f"the target of {self.written(self.target)}", f"the floor of {self.written(self.floor)}"
        whole = "the attack works, and the whole 95 % interval is"
        unclear = "the attack works, but is not told apart from"
        few = ""
        if self.interval is None:
            few = f": there is no interval, for it would draw {self._drawn}, and {LEAST_UNITS} are needed"
        why: dict[Verdict, str] = {
            "inconclusive": "this attack could not have shown a leak",
            "within the target": f"{whole} at most {target}",
            "no more than the floor": f"the attack works, and comes no farther than {floor}, which needs nothing sent",
            "above the target": f"{whole} above {target}, and the figure above {floor}",
            "not told apart from the target": f"{unclear} {target}{few or ', over which the 95 % interval reaches'}",
            "not told apart from the floor": f"{unclear} {floor}, which needs nothing sent{few}",
        }
        return control + why[self.verdict]

    @property
    def _drawn(self) -> str:
        """What the intervals draw; of a line that has `minus_floor`."""
        assert self.drawn is not None and self.drawn_of is not None
        return counted(self.drawn, *DRAWN_OF[self.drawn_of])

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
        lists = {
            name: None if bounds is None else list(bounds)
            for name, bounds in (("interval", self.interval), ("minus_floor_interval", self.minus_floor_interval))
        }
        verdicts = {"verdict": self.verdict, "floor_verdict": self.floor_verdict}
        return {**asdict(self), **lists, "sites": list(self.sites), **verdicts}


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


def _side(bounds: Between | None, value: float) -> int:
    """Say on which side of a value a whole interval is: 1 above, -1 at most that, 0 on neither, or no interval."""
    return 0 if bounds is None else int(bounds[0] > value) - int(bounds[1] <= value)

"""Who learns in which situation, on the page of what a federation gives, and the scores of those that are there.

An arm is a finished run (its folder in RUNS) or a frozen start (files of `frozen_starts.py` in RUNS/frozen); the centre
that joins later is in RUNS/joining (`joining_centre.py`). Runs are scored on reported rows once (RUNS/scores): each
centre's model on its own patients, and on those of every other centre.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from federation_scores import Centres, mean_over_centres, reported, scored_rows, scores_elsewhere, scores_of

from edgefl_trainer.data import Federation
from edgefl_trainer.engine.models import FinishedRun, open_run
from edgefl_trainer.evaluate.intervals import Scored

JOINING = "vidir_modern"  # the centre that joins later
DRAWS = 3  # of 60 labels
WAYS = ("probe", "home", "whole")  # in which the centre that joins can learn
MANY, FEW = "up to 2,000 labels", "60 labels"


@dataclass(frozen=True)
class Arm:
    """Who learns: the name of its run's folder or of its frozen start, and what the page calls it."""

    name: str
    label: str
    labels: str
    frozen: bool = False
    elsewhere: bool = False  # whether a run's models are also judged on the patients of the other centres


STARTS = {
    "colours": "alone, colours only",
    "fedmae": "alone, head on FedMAE's network",
    "imagenet": "alone, head on ImageNet's network",
}
ALONE, TOGETHER = "alone, ImageNet's network fine-tuned", "federation, statistics of home"
FITTED = "federation, fitted at home"
ARMS = (
    *(Arm(f"{start}-2000", label, MANY, frozen=True) for start, label in STARTS.items()),
    Arm("nothing2000", "alone, untrained network", MANY),
    Arm("alone2000", ALONE, MANY, elsewhere=True),
    Arm("fedevprompt2000", "FedEvPrompt on FedMAE's network", MANY, elsewhere=True),
    Arm("together2000s", TOGETHER, MANY),
    Arm("together2000", FITTED, MANY, elsewhere=True),
    Arm("fedbn2000", "federation, head and batch norm private", MANY),
    Arm("pooled2000", "all pictures in one place", MANY),
    *(Arm(f"{start}-60", label, FEW, frozen=True) for start, label in STARTS.items()),
    Arm("few60-alone", ALONE, FEW),
    Arm("few60", TOGETHER, FEW),
    Arm("few60-fit", FITTED, FEW),
)


@dataclass(frozen=True)
class Found:
    """Everything that is there. An arm has one element for each draw of labels."""

    runs: Mapping[str, FinishedRun]
    own: Mapping[str, Sequence[Centres]]  # each centre's own patients
    elsewhere: Mapping[str, Sequence[Centres]]  # a centre's model on another's patients, by `BCN at MSK`
    joining: Mapping[str, Sequence[Centres]]  # of `alone-home` and the like

    @property
    def missing(self) -> list[str]:
        """What the page lacks, by label, or by start and way of joining."""
        gone = [f"{arm.label} ({arm.labels})" for arm in ARMS if arm.name not in self.own]
        wanted = [
            "federation-none",
            "federation-statistics",
            *(f"{start}-{way}" for start in ("alone", "federation") for way in WAYS),
        ]
        few = [f"{n} ({len(self.joining.get(n, ()))} of {_draws_of(n)} draws)" for n in wanted if self.lacks(n)]
        return [*gone, *few]

    def lacks(self, name: str) -> bool:
        """Whether draws of a way of joining are missing."""
        return len(self.joining.get(name, ())) < _draws_of(name)


def _draws_of(name: str) -> int:
    return 1 if name.endswith(("none", "statistics")) else DRAWS


def find(runs: Path) -> Found:
    """Score the runs that are finished, and read what the other benchmarks left."""
    finished = {arm.name: arm for arm in ARMS if (runs / arm.name / "summary.json").exists()}
    opened = {name: open_run(runs / name) for name in finished}
    own: dict[str, Sequence[Centres]] = {}
    elsewhere: dict[str, Sequence[Centres]] = {}
    data = None
    for name, run in opened.items():
        data = reported(run)
        own[name] = [scores_of(run, data, runs / "scores")]
        if finished[name].elsewhere:
            elsewhere[name] = [scores_elsewhere(run, data, runs / "scores")]
    for arm in ARMS:
        files = sorted((runs / "frozen").glob(f"{arm.name}-*.npz")) if arm.frozen and data is not None else []
        if files and data is not None and len(files) == (DRAWS if arm.labels == FEW else 1):
            draws = [_pairs(file, data) for file in files]
            own[arm.name] = [{a: scored for (a, b), scored in draw.items() if a == b} for draw in draws]
            elsewhere[arm.name] = [{f"{a} at {b}": s for (a, b), s in draw.items() if a != b} for draw in draws]
    joining: dict[str, list[Centres]] = {}
    for file in sorted((runs / "joining" / JOINING).glob("*.npz")):
        start, way, _, _ = file.stem.split("-")
        joining.setdefault(f"{start}-{way}", []).append({JOINING: _of_file(file)})
    return Found(opened, own, elsewhere, joining)


def _pairs(file: Path, data: Federation) -> dict[tuple[str, str], Scored]:
    """By learner and judged centre."""
    held = np.load(file)
    pairs = [(name.partition(".")[0], name.partition(".")[2]) for name in held.files]
    return {(one, other): scored_rows(held[f"{one}.{other}"], data, other) for one, other in pairs}


def _of_file(file: Path) -> Scored:
    held = np.load(file)
    probabilities = held["probabilities"]
    return Scored(probabilities, held["target"], probabilities.argmax(axis=1), None, tuple(map(str, held["lesions"])))


def mean_of(draws: Sequence[Centres]) -> float:
    """Balanced accuracy in per cent: the mean of the draws of labels, each centre counting once."""
    return float(np.mean([mean_over_centres(draw).value for draw in draws]))


def best_alone(scores: Mapping[str, Sequence[Centres]], labels: str) -> str:
    """The best arm that learns alone, which a federation is compared with; empty where none is there."""
    alone = [arm.name for arm in ARMS if arm.labels == labels and arm.label.startswith("alone")]
    there = [name for name in alone if name in scores]
    return max(there, key=lambda name: mean_of(scores[name])) if there else ""


def best_alone_joining(found: Found) -> str:
    """The best way for the centre that joins to go alone; empty where one of the ways is missing."""
    there = [name for name in (f"alone-{way}" for way in WAYS) if not found.lacks(name)]
    return max(there, key=lambda name: mean_of(found.joining[name])) if len(there) == len(WAYS) else ""

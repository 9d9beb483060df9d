"""Who learns in which situation, on the page of what a federation gives, and the scores of those that are there.

An arm is a finished run of each seed (RUNS/NAME-s0 and so on) or a frozen start (files of `frozen_starts.py` in
RUNS/frozen, where a seed draws the labels). The centre that joins later is in RUNS/joining-s0 and so on
(`joining_centre.py`), and what each centre makes of the network of one place in RUNS/pooled2000-home-s0. Runs are
scored on reported rows once (RUNS/scores): each centre's model on its own patients, and on those of every other centre.
A kept run (`keep_run.py`) brings its scores along.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.federation.federation_scores import (
    SEEDS,
    Centres,
    average,
    of_every_seed,
    reported,
    scored_rows,
    scores_elsewhere,
    scores_of,
)
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.intervals import Scored

JOINING = "vidir_modern"  # the centre that joins later
DRAWS = 3  # of the 60 labels of the centre that joins, at each seed
UNLABELLED = ("federation-none", "federation-statistics")
FITS = ("probe", "home", "whole")
LABELLED = (*(f"{start}-{way}" for start in ("alone", "federation") for way in FITS), "alone-longer")
MANY, FEW = "up to 2,000 labels", "60 labels"

Seeds = Mapping[int, Sequence[Centres]]  # of each seed one element for each draw of labels


@dataclass(frozen=True)
class Arm:
    """Who learns: the name of its runs or of its frozen start, and what the page calls it."""

    name: str
    label: str
    labels: str
    frozen: bool = False
    moves_pictures: bool = False  # whether they leave their centre
    elsewhere: bool = False  # whether a run's models are also judged on the patients of the other centres
    handed_on: bool = False  # whether each centre fitted a finished network at home (`joining_centre.py`)


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
    Arm("network2000", "federation, whole network fitted at home", MANY),
    Arm("pooled2000", "all pictures in one place", MANY, moves_pictures=True),
    Arm("pooled2000-home", "all pictures in one place, fitted at home", MANY, moves_pictures=True, handed_on=True),
    *(Arm(f"{start}-60", label, FEW, frozen=True) for start, label in STARTS.items()),
    Arm("few60-alone", ALONE, FEW, elsewhere=True),
    Arm("few60", TOGETHER, FEW, elsewhere=True),
    Arm("few60-fit", FITTED, FEW, elsewhere=True),
)


@dataclass(frozen=True)
class Found:
    """Everything that is there, by arm and seed."""

    runs: Mapping[str, Mapping[int, FinishedRun]]
    own: Mapping[str, Seeds]  # each centre's own patients
    elsewhere: Mapping[str, Seeds]  # a centre's model on another's patients, by `BCN at MSK`
    joining: Mapping[str, Seeds]  # of `alone-home` and the like

    @property
    def missing(self) -> list[str]:
        """What the page lacks: whole situations, else arms by label, each with the seeds that are not there."""
        gone: list[str] = []
        for labels in (MANY, FEW):
            arms = {f"{arm.label} ({labels})": self.own.get(arm.name, {}) for arm in ARMS if arm.labels == labels}
            gone += _lacking(f"every way with {labels}", arms)
        joins = {f"joining, {name}": self.joining.get(name, {}) for name in (*UNLABELLED, *LABELLED)}
        return gone + _lacking("a centre that joins", joins)


def _lacking(situation: str, there: Mapping[str, Seeds]) -> list[str]:
    gone = {name: [str(seed) for seed in SEEDS if seed not in seeds] for name, seeds in there.items()}
    if all(seeds == next(iter(gone.values())) for seeds in gone.values()):
        gone = {situation: next(iter(gone.values()))}
    return [
        name + (f", seed {' and '.join(seeds)}" if len(seeds) < len(SEEDS) else "")
        for name, seeds in gone.items()
        if seeds
    ]


def find(runs: Path) -> Found:
    """Score the runs that are finished, and read what the other benchmarks left."""
    opened = {arm.name: of_every_seed(runs, arm.name) for arm in ARMS if not arm.frozen and not arm.handed_on}
    own: dict[str, Seeds] = {}
    elsewhere: dict[str, Seeds] = {}
    data = None
    for arm in ARMS:
        for seed, run in opened.get(arm.name, {}).items():
            data = data or reported(run)
            own[arm.name] = {**own.get(arm.name, {}), seed: [scores_of(run, data, runs / "scores")]}
            if arm.elsewhere:
                abroad = [scores_elsewhere(run, data, runs / "scores")]
                elsewhere[arm.name] = {**elsewhere.get(arm.name, {}), seed: abroad}
    for arm in (arm for arm in ARMS if arm.frozen and data is not None):
        files = {seed: runs / "frozen" / f"{arm.name}-{seed}.npz" for seed in SEEDS}
        pairs = {seed: _pairs(file, data) for seed, file in files.items() if file.exists() and data is not None}
        if pairs:
            own[arm.name] = {seed: [_at_home(draw)] for seed, draw in pairs.items()}
            elsewhere[arm.name] = {seed: [_abroad(draw)] for seed, draw in pairs.items()}
    own |= handed_on(runs, data.sites) if data is not None else {}
    return Found({name: found for name, found in opened.items() if found}, own, elsewhere, _joining(runs))


def _joining(runs: Path) -> dict[str, Seeds]:
    """Of each start and way the seeds that have all their draws."""
    found: dict[str, dict[int, list[Centres]]] = {}
    for name in (*UNLABELLED, *LABELLED):
        for seed in SEEDS:
            files = sorted((runs / f"joining-s{seed}" / JOINING).glob(f"{name}-*.npz"))
            if len(files) == (1 if name in UNLABELLED else DRAWS):
                found.setdefault(name, {})[seed] = [{JOINING: _of_file(file)} for file in files]
    return dict(found)


def handed_on(runs: Path, centres: Collection[str]) -> dict[str, Seeds]:
    """Of each arm in which centres fit one network at home, the seeds for which every centre has done so once."""
    found: dict[str, dict[int, list[Centres]]] = {}
    for arm in (arm for arm in ARMS if arm.handed_on):
        for seed in SEEDS:
            files = sorted((runs / f"{arm.name}-s{seed}").glob(f"*/federation-home-*-{seed}.npz"))
            if sorted(file.parent.name for file in files) == sorted(centres):
                found.setdefault(arm.name, {})[seed] = [{file.parent.name: _of_file(file) for file in files}]
    return dict(found)


def _pairs(file: Path, data: Federation) -> dict[tuple[str, str], Scored]:
    """By learner and judged centre."""
    held = np.load(file)
    pairs = [(name.partition(".")[0], name.partition(".")[2]) for name in held.files]
    return {(one, other): scored_rows(held[f"{one}.{other}"], data, other) for one, other in pairs}


def _at_home(pairs: Mapping[tuple[str, str], Scored]) -> Centres:
    return {one: scored for (one, other), scored in pairs.items() if one == other}


def _abroad(pairs: Mapping[tuple[str, str], Scored]) -> Centres:
    return {f"{one} at {other}": scored for (one, other), scored in pairs.items() if one != other}


def _of_file(file: Path) -> Scored:
    held = np.load(file)
    probabilities = held["probabilities"]
    return Scored(probabilities, held["target"], probabilities.argmax(axis=1), None, tuple(map(str, held["lesions"])))


def every(arm: Seeds, seeds: Iterable[int] | None = None) -> list[Centres]:
    """All draws of these seeds, or of every seed that is there."""
    return [draw for seed in (sorted(arm) if seeds is None else seeds) for draw in arm[seed]]


def best_alone(scores: Mapping[str, Seeds], labels: str, seeds: Iterable[int]) -> tuple[str, list[int]]:
    """The best arm that learns alone, over those of some seeds that every such arm has; no seeds where there is none.

    A federation is compared with it over these seeds: where one arm lacks a seed, that seed counts for none.
    """
    alone = [arm.name for arm in ARMS if arm.labels == labels and arm.label.startswith("alone")]
    return _best(scores, [name for name in alone if scores.get(name)], seeds)


def best_alone_joining(joining: Mapping[str, Seeds], seeds: Iterable[int]) -> tuple[str, list[int]]:
    """The same for the centre that joins; no seeds where one of its ways to go alone is missing."""
    return _best(joining, [name for name in LABELLED if name.startswith("alone")], seeds)


def _best(scores: Mapping[str, Seeds], names: Sequence[str], seeds: Iterable[int]) -> tuple[str, list[int]]:
    common = sorted(set(seeds).intersection(*(scores.get(name, {}) for name in names))) if names else []
    if not common:
        return "", []
    return max(names, key=lambda name: average(every(scores[name], common)).value), common

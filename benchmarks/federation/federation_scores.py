"""Scores of several finished runs on the same reported rows, and how far apart two of them are, lesion by lesion.

Guarantees: two arms are compared on the same rows in the same order, and every draw of the bootstrap takes the same
lesions in both (`evaluate.intervals`, whose draws depend on the lesions alone). A score is kept in a file beside the
digest of the run's state, and made again where that differs. A kept run (`keep_run.py`) has its scores and no models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.folder import SUMMARY
from edgefl_trainer.engine.judging.suspicion import reported_scores
from edgefl_trainer.engine.models import FinishedRun, open_run, predict_rows
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.intervals import RESAMPLES, Scored, interval, lesion_weights, pooled
from edgefl_trainer.evaluate.metrics import predicted_classes

Centres = Mapping[str, Scored]  # of each centre its reported rows
SEEDS = (0, 1, 2)
SCORES, ELSEWHERE = "scores.npz", "elsewhere.npz"  # of a kept run
_NAMED = " named"  # ends the name of the classes that belong to probabilities


@dataclass(frozen=True)
class Figure:
    """Points of a hundred, with the middle 95 % over draws of lesions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f} to {self.high:.1f}]"

    @property
    def signed(self) -> str:
        """As a difference."""
        return f"{self.value:+.1f} [{self.low:+.1f} to {self.high:+.1f}]"


def reported(run: FinishedRun) -> Federation:
    """The data of a run as its own centres have it, whoever learned from it together."""
    settings = run.settings
    px = settings.image_px or run.backbone.spec.image_px
    return load_federation(settings.data, image_px=px, colour=settings.colour, task=settings.task, seed=0)


def scores_of(run: FinishedRun, federation: Federation, cache: Path) -> Centres:
    """Score every centre's reported rows with its own model, or with the one model that a run has."""
    found = _of_kept_run(run, SCORES)
    if found is None:
        only = run.sites[0] if len(run.sites) == 1 and run.sites[0] not in federation.sites else None
        names = [name for name in federation.sites if only is not None or name in run.sites]
        found = _made_once(run, federation, cache / f"{run.folder.name}.npz", {n: (only or n, n) for n in names})
    return {name: scored_rows(scores, federation, name, named) for name, (scores, named) in found.items()}


def scores_elsewhere(run: FinishedRun, federation: Federation, cache: Path) -> Centres:
    """Score each centre's model on the reported rows of every other centre, by ``LEARNER at JUDGED``."""
    found = _of_kept_run(run, ELSEWHERE)
    if found is None:
        pairs = {f"{one} at {other}": (one, other) for one in run.sites for other in federation.sites if one != other}
        found = _made_once(run, federation, cache / f"{run.folder.name}.elsewhere.npz", pairs)
    judged = {name: name.rpartition(" at ")[2] for name in found}
    return {name: scored_rows(scores, federation, judged[name], named) for name, (scores, named) in found.items()}


Rows = Bool[np.ndarray, " B"]
Named = Int[np.ndarray, " B"]  # the class that is named: the likeliest of those that the model's site has seen
Found = dict[str, tuple[Float[np.ndarray, "B K"], Named]]  # by what was asked


def _of_kept_run(run: FinishedRun, name: str) -> Found | None:
    """What a kept run brings along; None of a run that has models. A `ValueError` where it was not kept."""
    if run.sites:
        return None
    file = run.folder / name
    kept = dict(np.load(file)) if file.exists() else {}
    if str(kept.pop("state", "")) != str(run.summary["state_sha256"]):
        raise ValueError(f"{run.folder} has neither models nor the scores {name} of its state: make the run again")
    return _paired(kept)


def _made_once(run: FinishedRun, federation: Federation, file: Path, wanted: Mapping[str, tuple[str, str]]) -> Found:
    """Probabilities of (model, judged centre) pairs, made once for a run's state, or as its own judging kept them."""
    state = str(run.summary["state_sha256"])
    kept = dict(np.load(file)) if file.exists() else {}
    if str(kept.get("state", "")) != state:
        kept = {"state": np.array(state)}
        for name, (model, judged) in wanted.items():
            predictor, rows = run.predictor(model), report_rows(federation, judged)
            own = reported_scores(run, judged) if model == judged else None
            same = own is not None and np.array_equal(own.targets, rows.targets)
            kept[name] = own.probabilities if own and same else predict_rows(predictor, rows).probabilities
            kept[name + _NAMED] = predicted_classes(kept[name], None, predictor.seen)
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, **kept)
    return _paired({name: kept[name] for name in kept if name != "state"})


def _paired(kept: Mapping[str, np.ndarray]) -> Found:
    return {name: (kept[name], kept[name + _NAMED]) for name in kept if not name.endswith(_NAMED)}


def scored_rows(
    probabilities: Float[np.ndarray, "B K"], federation: Federation, name: str, named: Named | None = None
) -> Scored:
    """Put beside the scores of a centre's reported rows what is true of them; without `named`, the likeliest is."""
    named = probabilities.argmax(axis=1) if named is None else named
    rows = report_rows(federation, name)
    if len(rows.rows) != len(probabilities):
        raise ValueError(f"{len(probabilities)} scores are of other rows than the {len(rows.rows)} of {name}")
    lesions = tuple(federation.lesions[i] for i in rows.rows)
    return Scored(probabilities, rows.targets, named, None, lesions)


def mean_over_centres(centres: Centres) -> Figure:
    """Balanced accuracy, each centre counting once."""
    return average([centres])


def average(arm: Sequence[Centres]) -> Figure:
    """Balanced accuracy, each centre counting once; seeds and draws of labels are averaged lesion draw by lesion draw.

    A `ValueError` where they do not judge the same rows.
    """
    names = _same_rows(arm)
    values = [float(np.mean([accuracy(draw[name]) for draw in arm])) for name in names]
    return _figure(values, [np.mean([_draws(draw[name]) for draw in arm], axis=0) for name in names])


def of_every_seed(runs: Path, name: str) -> dict[int, FinishedRun]:
    """The finished runs RUNS/NAME-s0 and so on, by seed; a `ValueError` where a run has another seed than its name."""
    folders = {seed: runs / f"{name}-s{seed}" for seed in SEEDS}
    found = {seed: open_run(folder) for seed, folder in folders.items() if (folder / SUMMARY).exists()}
    for seed, run in found.items():
        if run.settings.seed != seed:
            raise ValueError(f"{run.folder} has the seed {run.settings.seed}: its name says {seed}")
    return found


def of_the_same_seeds(runs: Path, names: Sequence[str]) -> list[list[FinishedRun]]:
    """Of each arm its runs, in the order of their seeds; a `ValueError` where an arm lacks a seed of another's."""
    found = {name: of_every_seed(runs, name) for name in names}
    wanted = sorted({seed for arm in found.values() for seed in arm}) or [SEEDS[0]]
    lacking = [f"{name}-s{seed}" for name, arm in found.items() for seed in wanted if seed not in arm]
    if lacking:
        raise ValueError(f"no finished run in {runs}: {', '.join(lacking)}; every arm needs each seed that another has")
    return [[arm[seed] for seed in wanted] for arm in found.values()]


def by_seed(values: Sequence[float]) -> str:
    """What each seed alone would say, as a cell beside the mean of all."""
    return ", ".join(f"{value:+.1f}" for value in values)


def over_all_rows(centres: Centres) -> Figure:
    """Balanced accuracy over the rows of all centres together."""
    together = pooled([centres[name] for name in sorted(centres)])
    return _figure([accuracy(together)], [_draws(together)])


def difference(one: Sequence[Centres], other: Sequence[Centres]) -> Figure:
    """How much better `one` is, each centre counting once; several draws of labels on a side are averaged first.

    A `ValueError` where the two do not judge the same rows.
    """
    values, draws = [], []
    for name in _same_rows([*one, *other]):
        values.append(float(np.mean([accuracy(a[name]) for a in one]) - np.mean([accuracy(b[name]) for b in other])))
        draws.append(
            np.mean([_draws(arm[name]) for arm in one], axis=0) - np.mean([_draws(arm[name]) for arm in other], axis=0)
        )
    return _figure(values, draws)


def _same_rows(arms: Sequence[Centres]) -> list[str]:
    """The centres that all judge; a `ValueError` where these, or the rows of one, differ."""
    names = sorted(arms[0])
    if any(sorted(arm) != names for arm in arms):
        raise ValueError("not all judge the same centres")
    for name in names:
        if len({arm[name].lesions for arm in arms}) > 1:
            raise ValueError(f"not all judge the same rows of {name}")
    return names


def share_draws(lesions: Sequence[str], asked: Rows, right: Rows | Float[np.ndarray, " B"]) -> Float[np.ndarray, " R"]:
    """Share of the asked rows that is right, over draws of lesions; NaN where a draw has none of them.

    Of several seeds `right` is the share of them in which a row is right.
    """
    parts = []
    for weights in lesion_weights(lesions, RESAMPLES):
        with np.errstate(invalid="ignore"):
            parts.append((weights @ (asked * right)) / (weights @ asked))
    return np.concatenate(parts)


def accuracy(scored: Scored) -> float:
    """Balanced accuracy of some rows: the mean recall of the classes that they show."""
    right = scored.predicted == scored.target
    return float(np.mean([right[scored.target == k].mean() for k in np.unique(scored.target)]))


def _draws(scored: Scored) -> Float[np.ndarray, " R"]:
    """Balanced accuracy over draws of lesions."""
    right, truth = scored.predicted == scored.target, np.eye(scored.probabilities.shape[1])[scored.target]
    parts = []
    for weights in lesion_weights(scored.lesions, RESAMPLES):
        rows, hits = weights @ truth, weights @ (truth * right[:, None])  # (R, K)
        shown = rows > 0
        parts.append((hits / np.maximum(rows, 1)).sum(axis=1) / shown.sum(axis=1))
    return np.concatenate(parts)


def _figure(values: Sequence[float], draws: Sequence[Float[np.ndarray, " R"]]) -> Figure:
    low, high = interval(np.mean(draws, axis=0)) or (float("nan"), float("nan"))
    return Figure(100 * float(np.mean(values)), 100 * low, 100 * high)

"""Scores of several finished runs on the same reported rows, and how far apart two of them are, lesion by lesion.

Guarantees: two arms are compared on the same rows in the same order, and every draw of the bootstrap takes the same
lesions in both (`evaluate.intervals`, whose draws depend on the lesions alone). A score is kept in a file beside the
digest of the run's state, and made again where that differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.engine.models import FinishedRun, predict_rows
from edgefl_trainer.engine.sites import report_rows
from edgefl_trainer.evaluate.intervals import Scored, interval, pooled, resample

FIGURE = "balanced_accuracy"
Centres = Mapping[str, Scored]  # of each centre its reported rows


@dataclass(frozen=True)
class Figure:
    """Points of a hundred, with the middle 95 % over draws of lesions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} [{self.low:.1f} to {self.high:.1f}]"


def reported(run: FinishedRun) -> Federation:
    """The data of a run as its own centres have it, whoever learned from it together."""
    settings = run.settings
    px = run.backbone.spec.image_px
    return load_federation(settings.data, image_px=px, colour=settings.colour, task=settings.task, seed=0)


def scores_of(run: FinishedRun, federation: Federation, cache: Path) -> Centres:
    """Score every centre's reported rows with its own model, or with the one model that a run has."""
    only = run.sites[0] if len(run.sites) == 1 and run.sites[0] not in federation.sites else None
    names = [name for name in federation.sites if only is not None or name in run.sites]
    file = cache / f"{run.folder.name}.npz"
    state = str(run.summary["state_sha256"])
    kept = dict(np.load(file)) if file.exists() else {}
    if str(kept.get("state", "")) != state:
        found = {
            name: predict_rows(run.predictor(only or name), report_rows(federation, name)).probabilities
            for name in names
        }
        kept = {"state": np.array(state), **found}
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(file, **kept)
    return {name: scored_rows(kept[name], federation, name) for name in names}


def scored_rows(probabilities: Float[np.ndarray, "B K"], federation: Federation, name: str) -> Scored:
    """Put beside the scores of a centre's reported rows what is true of them."""
    rows = report_rows(federation, name)
    lesions = tuple(federation.lesions[i] for i in rows.rows)
    return Scored(probabilities, rows.targets, probabilities.argmax(axis=1), None, lesions)


def mean_over_centres(centres: Centres) -> Figure:
    """Balanced accuracy, each centre counting once."""
    return _figure([accuracy(scored) for scored in centres.values()], [_draws(scored) for scored in centres.values()])


def over_all_rows(centres: Centres) -> Figure:
    """Balanced accuracy over the rows of all centres together."""
    together = pooled([centres[name] for name in sorted(centres)])
    return _figure([accuracy(together)], [_draws(together)])


def difference(one: Sequence[Centres], other: Sequence[Centres]) -> Figure:
    """How much better `one` is, each centre counting once; several draws of labels on a side are averaged first.

    A `ValueError` where the two do not judge the same rows.
    """
    names = sorted(one[0])
    if any(sorted(arm) != names for arm in (*one, *other)):
        raise ValueError("two arms of a difference judge different centres")
    values, draws = [], []
    for name in names:
        if len({arm[name].lesions for arm in (*one, *other)}) > 1:
            raise ValueError(f"two arms of a difference judge different rows of {name}")
        values.append(float(np.mean([accuracy(a[name]) for a in one]) - np.mean([accuracy(b[name]) for b in other])))
        draws.append(
            np.mean([_draws(arm[name]) for arm in one], axis=0) - np.mean([_draws(arm[name]) for arm in other], axis=0)
        )
    return _figure(values, draws)


def accuracy(scored: Scored) -> float:
    """Balanced accuracy of some rows: the mean recall of the classes that they show."""
    right = scored.predicted == scored.target
    return float(np.mean([right[scored.target == k].mean() for k in np.unique(scored.target)]))


def _draws(scored: Scored) -> Float[np.ndarray, " R"]:
    return resample(scored)[FIGURE]


def _figure(values: Sequence[float], draws: Sequence[Float[np.ndarray, " R"]]) -> Figure:
    low, high = interval(np.mean(draws, axis=0)) or (float("nan"), float("nan"))
    return Figure(100 * float(np.mean(values)), 100 * low, 100 * high)

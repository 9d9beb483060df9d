"""Which round's model a site keeps, by its `tune` rows. Source: docs/design.md 5, rows; docs/decisions/0015.

A judged round costs one pass over the tune rows. A run that keeps its last round only watches: a bounded draw shows the
trend. A run that selects judges on every tune row, because differences between rounds are as small as the error of a
draw; and a site with too few of them does not select at all. One round for all sites is that of the highest figure
over the tune rows of all sites together (FedCLF and FedMAE, arXiv 2208.11278, section V-B: "the best global model").
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Method, Phase, Scalar, Site, State
from edgefl_trainer.engine.checkpoint import Best, Candidate
from edgefl_trainer.engine.models import predict_rows
from edgefl_trainer.evaluate.calibration import MIN_ROWS
from edgefl_trainer.evaluate.metrics import JUDGED_ROWS, shares_of_right
from edgefl_trainer.method_halves import call_predictor

JUDGED = "tune_balanced_accuracy"  # the figure of a site's model after a round, where it has one
RIGHT = "tune_accuracy"  # the same of a model that answers questions
OPEN = "tune_open_accuracy"  # the same for tables whose paper lets a model name any class
RIGHT_OF = "tune_right_of"  # of each class the right ones of its rows, as "7/10 3/5", where one round is for all sites
WATCHED_ROWS = 200  # enough to see a trend, few enough not to slow the round

Judge = Callable[[str, State, Payload], Mapping[str, Scalar]]


def selecting_sites(sites: Mapping[str, Site]) -> frozenset[str]:
    """Name the sites whose tune rows can tell rounds apart: enough of them to calibrate on, of two classes at least."""
    return frozenset(
        name
        for name, site in sites.items()
        if len(site.tune) >= MIN_ROWS and np.count_nonzero(site.tune.counts(len(site.task.classes))) >= 2
    )


def most_judged(select: str) -> int | None:
    """Return how many tune rows of a site its rounds are judged on, by the run's `select`; None is all."""
    return WATCHED_ROWS if select == "last" else None


def judged_rows(site: Site, most: int | None = WATCHED_ROWS) -> Examples:
    """Return the tune rows of a site that its rounds are judged on: at most `most`, the same in each; None is all."""
    drawn = site.rng("judge").permutation(len(site.tune))[:most]
    return replace(site.tune, rows=site.tune.rows[np.sort(drawn)])


def judge_for(select: str, method: Method, sites: Mapping[str, Site]) -> Judge:
    """Make the judge that a way of choosing rounds needs: who chooses judges on every tune row."""
    return tune_judge(method, sites, most_judged(select), counts=select == "pooled")


def tune_judge(
    method: Method, sites: Mapping[str, Site], most: int | None = WATCHED_ROWS, *, counts: bool = False
) -> Judge:
    """Make a function that scores a site's current model on its tune rows, and says on how many.

    At most `most` of them, drawn once for the whole run; None takes all. With `counts` it tells of each class how many
    are right, too.
    """
    return partial(judge_site, method, sites, most, counts)


def judge_site(
    method: Method,
    sites: Mapping[str, Site],
    most: int | None,
    counts: bool,
    name: str,
    state: State,
    broadcast: Payload,
) -> Mapping[str, Scalar]:
    """Score a site's current model on its tune rows; nothing where it has no model or no such row."""
    site = sites[name]
    predictor = call_predictor(method, site, state, broadcast)
    some = judged_rows(site, most)
    if predictor is None or len(some) == 0:
        return {}
    scores = predict_rows(predictor, some, site.device)
    figures = shares_of_right(scores.probabilities, some.targets, scores.predicted)
    if some.tokens is not None:  # of hundreds of answers most are given to one question
        found = {RIGHT: figures.get("accuracy")}
    else:
        found = {JUDGED: figures.get("balanced_accuracy"), OPEN: figures.get("open_accuracy")}
    known: dict[str, Scalar] = {name: figure for name, figure in found.items() if figure is not None}
    if known and counts:
        known[RIGHT_OF] = right_of(scores.predicted, some.targets, len(site.task.classes))
    return known | {JUDGED_ROWS: len(some)} if known else {}


def right_of(predicted: NDArray[np.int64], target: NDArray[np.int64], classes: int) -> str:
    """Write of each class how many of its rows are right, and how many there are."""
    known = target >= 0  # an answer that no training row has is of no class
    rows, hits = (np.bincount(target[mask], minlength=classes) for mask in (known, known & (predicted == target)))
    return " ".join(f"{hit}/{row}" for hit, row in zip(hits, rows, strict=True))


def pooled_figure(figures: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Compute the figure that rounds are compared by over the tune rows of all sites together, each row counting once.

    None below `MIN_ROWS` rows, or where they are of one class.
    """
    told = [one for one in figures.values() if RIGHT_OF in one]
    if not told:
        return None
    each = np.array([[pair.split("/") for pair in one[RIGHT_OF].split()] for one in told], dtype=np.int64)
    hits, rows = each.sum(axis=0).T  # (K,) each
    if rows.sum() < MIN_ROWS or np.count_nonzero(rows) < 2:
        return None
    if RIGHT in told[0]:
        return float(hits.sum() / sum(int(one[JUDGED_ROWS]) for one in told))
    return float((hits[rows > 0] / rows[rows > 0]).mean())


def judged_figure(metrics: Mapping[str, Any]) -> float | None:
    """Return the figure that rounds of a site are compared by; None where it has no tune rows."""
    found: float | None = metrics.get(RIGHT, metrics.get(JUDGED))
    return found


def better_sites(
    phase: Phase,
    figures: Mapping[str, Mapping[str, Any]],
    broadcasts: Mapping[str, Payload],
    best: Mapping[str, Best],
) -> dict[str, Candidate]:
    """Name the sites whose model after this phase is at least as good as their best before: ties go to the later."""
    better = {}
    for name in sorted(figures):
        figure = judged_figure(figures[name])
        if figure is not None and (name not in best or figure >= best[name].figure):
            better[name] = Candidate(phase.round, figure, broadcasts[name])
    return better


def better_for_all(
    phase: Phase,
    figures: Mapping[str, Mapping[str, Any]],
    broadcasts: Mapping[str, Payload],
    best: Mapping[str, Best],
) -> dict[str, Candidate]:
    """Name all sites where this phase is at least as good for all together as the best before; else none."""
    figure = pooled_figure(figures)
    if figure is None or any(figure < entry.figure for entry in best.values()):
        return {}
    return {name: Candidate(phase.round, figure, broadcasts[name]) for name in sorted(broadcasts)}

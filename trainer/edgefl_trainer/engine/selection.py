"""Which round's model a site keeps, by its `tune` rows. Source: docs/design.md 5, rows; docs/decisions/0015.

A judged round costs one pass over the tune rows. A run that keeps its last round only watches: a bounded draw shows the
trend. A run that selects judges on every tune row, because differences between rounds are as small as the error of a
draw; and a site with too few of them does not select at all.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from edgefl_protocol import Payload
from edgefl_trainer.contract import Examples, Method, Scalar, Site, State
from edgefl_trainer.engine.local_engine import JUDGED, OPEN, RIGHT
from edgefl_trainer.engine.models import predict_rows
from edgefl_trainer.evaluate.calibration import MIN_ROWS
from edgefl_trainer.evaluate.metrics import JUDGED_ROWS, site_metrics
from edgefl_trainer.method_halves import call_predictor

WATCHED_ROWS = 200  # enough to see a trend, few enough not to slow the round


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


def tune_judge(
    method: Method, sites: Mapping[str, Site], most: int | None = WATCHED_ROWS
) -> Callable[[str, State, Payload], Mapping[str, Scalar]]:
    """Make a function that scores a site's current model on its tune rows, and says on how many.

    At most `most` of them, drawn once for the whole run; None takes all.
    """
    return partial(judge_site, method, sites, most)


def judge_site(
    method: Method, sites: Mapping[str, Site], most: int | None, name: str, state: State, broadcast: Payload
) -> Mapping[str, Scalar]:
    """Score a site's current model on its tune rows; nothing where it has no model or no such row."""
    site = sites[name]
    predictor = call_predictor(method, site, state, broadcast)
    some = judged_rows(site, most)
    if predictor is None or len(some) == 0:
        return {}
    scores = predict_rows(predictor, some, site.device)
    figures = site_metrics(scores.probabilities, some.targets, predicted=scores.predicted, vacuity=scores.vacuity)
    if some.tokens is not None:  # of hundreds of answers most are given to one question
        found = {RIGHT: figures.get("accuracy")}
    else:
        found = {JUDGED: figures.get("balanced_accuracy"), OPEN: figures.get("open_accuracy")}
    known = {name: figure for name, figure in found.items() if figure is not None}
    return known | {JUDGED_ROWS: len(some)} if known else {}

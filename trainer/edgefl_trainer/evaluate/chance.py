"""What an answer that never changes gets: at each site by the classes it is judged on, and in the mean over sites.

Such an answer is right about one of the K classes of a site's rows: 1/K, of test rows as of tune rows. A site of one
class, or without a figure, has none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgefl_trainer.evaluate.one_class import is_one_class

BY_CLASSES = ("balanced_accuracy", "macro_recall", "open_balanced_accuracy")  # one of K classes: 1/K
MAX_NAMED = 2  # lines or sites of one chance


@dataclass(frozen=True)
class Chance:
    """Chance by site, and the mean over the sites that trained; nothing where it is not known."""

    sites: Mapping[str, float]
    mean: float | None


def chance_of(runs: Sequence[Mapping[str, Any]], metric: str) -> Chance:
    """Return the chance of the runs of one row; over several seeds the mean."""
    found: dict[str, list[float]] = {}
    means = []
    for run in runs:
        sites = run.get("sites", {})
        known = {name: value for name, site in sites.items() if (value := _at(site, run, metric)) is not None}
        for name, value in known.items():
            found.setdefault(name, []).append(value)
        if trained := [value for name, value in known.items() if not sites[name].get("held_out")]:
            means.append(float(np.mean(trained)))
    by_site = {name: float(np.mean(values)) for name, values in found.items()}
    return Chance(by_site, float(np.mean(means)) if means else None)


def _at(site: Mapping[str, Any], run: Mapping[str, Any], metric: str) -> float | None:
    of_tune = metric.startswith("tune_")
    if is_one_class(site, tuned=of_tune) or (metric in site and site[metric] is None):
        return None
    if metric == "auroc":
        return 0.5
    if metric.removeprefix("tune_") not in BY_CLASSES:
        return None
    judged = site.get("classes_tuned") or site.get("classes_learned") if of_tune else site.get("classes_tested")
    number = judged or len(run.get("classes") or ())  # of a run from before that was kept: all classes
    return 1 / number if number else None


def labels_of(chances: Iterable[tuple[str, float | None]]) -> dict[float, str]:
    """Return each chance once, with its label: of whom it is where there are several."""
    whose: dict[float, dict[str, None]] = {}
    for name, value in chances:
        if value is not None:
            whose.setdefault(rounded(value), {})[name] = None
    if len(whose) == 1:
        return {value: f"chance {value:.3g}" for value in whose}
    return {value: f"chance {value:.3g}: {_named(list(names))}" for value, names in sorted(whose.items())}


def rounded(value: float) -> float:
    """Return a chance so that equal ones are equal, whatever they are the mean of."""
    return round(value, 6)


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")

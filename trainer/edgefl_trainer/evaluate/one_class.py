"""Sites that are judged on fewer classes than the run has; above all those with one class, whose figures say nothing.

A site of one class has a balanced accuracy of 1 for an answer that never changes, and with fewer classes chance is
higher. Guarantee: they stay in every figure of `summary.json` that was there before; texts mark them, and say the mean
without those of one class beside it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from edgefl_protocol.sentences import counted

MARK, FEWER = "*", "†"
SAYS = "one class only in the rows it learned from or is judged on: says nothing"

FEWER_SAYS = (
    "judged on fewer classes than the run has: neither this figure nor the mean compares with one over all classes, "
    "and both come out too high where the model can name no other class"
)


def is_one_class(site: Mapping[str, Any], *, tuned: bool = False) -> bool:
    """Tell whether a site's rows, learned from or judged on, hold one class; False where that was not kept.

    With `tuned`, also whether its tune rows do: those that a run judges on between rounds.
    """
    return 1 in (site.get("classes_tested"), site.get("classes_learned"), site.get("classes_tuned") if tuned else None)


def mark_of(site: Mapping[str, Any], classes: int) -> str:
    """Return the mark of a site's figure in a run of so many classes; empty where it is judged on all of them."""
    if is_one_class(site):
        return MARK
    return FEWER if 0 < (site.get("classes_tested") or classes) < classes else ""


def one_class_of(summary: Mapping[str, Any], *, tuned: bool = False) -> set[str]:
    """Name the sites of a run's summary whose figures say nothing; with `tuned`, those on tune rows."""
    return {name for name, site in summary["sites"].items() if is_one_class(site, tuned=tuned)}


def others(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Give the one-class sites by name, and number and mean balanced accuracy of the others; empty where none is one.

    Sites without a figure count nowhere.
    """
    found = {name: site for name, site in sites.items() if site.get("balanced_accuracy") is not None}
    marked = sorted(name for name, site in found.items() if is_one_class(site))
    if not marked:
        return {}
    mean, number = mean_of((site["balanced_accuracy"] for name, site in found.items() if name not in marked))
    return {"one_class": marked, "sites": number, "mean_balanced_accuracy": mean}


def mean_of(figures: Iterable[float | None]) -> tuple[float | None, int]:
    """Return the mean of the figures that are there, and their number."""
    known = [float(figure) for figure in figures if figure is not None]
    return (float(np.mean(known)) if known else None), len(known)


def beside(mean: str, sites: int) -> str:
    """Write, as a clause, the mean over the sites that have more than one class."""
    if not sites:
        return "no site has more than one class"
    return f"mean of the {counted(sites, 'site')} with more than one class {mean}"

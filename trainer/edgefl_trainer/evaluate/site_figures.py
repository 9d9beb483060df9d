"""What a set of scored sites is reported as: figures and intervals of each site, of all rows together, and over sites.

Definitions: docs/methods.md, "evaluation". Each site counts once in the means over sites, each row once in `pooled`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from edgefl_protocol.sentences import counted
from edgefl_trainer.evaluate.answer_figures import answer_figures
from edgefl_trainer.evaluate.confusion import confusions, recalls
from edgefl_trainer.evaluate.intervals import Scored, interval, pooled, resample, share_interval
from edgefl_trainer.evaluate.metrics import METRIC_NAMES, OF_RIGHT, site_metrics
from edgefl_trainer.evaluate.overconfidence import KEYS, overconfidence
from edgefl_trainer.evaluate.risk_coverage import curves_of, referral_figures
from edgefl_trainer.evaluate.undefined import without_interval

Resamples = dict[str, Float[np.ndarray, " R"]]
MOST_NAMED, MOST_LINES = 4, 10  # classes of a sentence, sentences of a federation
MAX_CURVES = 100  # sites; of more, curves would fill the file, and nobody reads them
NO_FIGURES = dict.fromkeys(
    [*(name + end for name in (*METRIC_NAMES, "recall") for end in ("", "_interval")), "recall_lesions", *KEYS]
)


def figures_of_sites(scored: Mapping[str, Scored], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the figures of `summary.json` that need every row: of each site, and of all rows of sites not held out.

    Gives `sites`, `pooled`, the interval of the mean balanced accuracy over sites (null where a site has none: it would
    count as certain), and of each site that is not held out `confusion`: its rows by true and by answered class, and
    `curves`: see `risk_coverage.curves_of`; null beyond `MAX_CURVES` sites.

    Args:
        scored: scored rows by site; without the sites for which there is no model.
        facts: of every site, what else stands beside its figures; `held_out` where it never trained, `refer_above`
            where what that threshold costs is wanted (`referral`).
    """
    draws = {name: _draws_of(rows) for name, rows in scored.items()}
    figures = {
        name: {
            **facts[name],
            **(figures_of(scored[name], draws[name]) if name in scored else NO_FIGURES),
            **(_referral(scored[name], facts[name]) if name in scored else {}),
        }
        for name in sorted(facts)
    }
    trained = [name for name in sorted(scored) if not facts[name].get("held_out")]
    everything = pooled([scored[name] for name in trained])
    counted_in = {name: figures[name] for name in trained if figures[name]["balanced_accuracy"] is not None}
    known = bool(counted_in) and not without_interval(counted_in)
    drawn = [draws[name]["balanced_accuracy"] for name in counted_in if known]
    return {
        "sites": figures,
        "pooled": figures_of(everything, _draws_of(everything)),
        "mean_balanced_accuracy_interval": interval(np.mean(drawn, axis=0)) if known else None,
        "confusion": confusions({name: scored[name] for name in trained}),
        "curves": {name: curves_of(scored[name]) for name in trained} if len(trained) <= MAX_CURVES else None,
    }


def _referral(scored: Scored, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"referral": referral_figures(scored, facts["refer_above"])} if "refer_above" in facts else {}


def figures_of(scored: Scored, draws: Resamples) -> dict[str, Any]:
    """Compute every figure with its interval as `NAME_interval`; null where undefined."""
    figures = site_metrics(scored.probabilities, scored.target, predicted=scored.predicted, vacuity=scored.vacuity)
    intervals = {
        f"{name}_interval": _interval(name, draws[name], figures[name], scored) if draws else None
        for name in METRIC_NAMES
    }
    tested = {"classes_tested": len(np.unique(scored.target))}
    return {**figures, **intervals, **overconfidence(scored), **recalls(scored), **tested, **answer_figures(scored)}


def _interval(
    name: str, values: Float[np.ndarray, " R"], figure: float | int | None, scored: Scored
) -> list[float] | None:
    if figure is None:
        return None
    return share_interval(values, figure, len(set(scored.lesions))) if name in OF_RIGHT else interval(values)


def thin_sites(
    scored: Mapping[str, Scored], seen: Mapping[str, Sequence[bool]], classes: Sequence[str], rows: str
) -> list[str]:
    """Write a sentence for each site whose figures cover fewer classes than the run has.

    In name order; from the tenth site on one for all that are left. `seen` are the classes that each site can name,
    `rows` is the kind of the scored rows, `test` or `val`.
    """
    found = []
    for name in sorted(scored):
        known = [label for label, can in zip(classes, seen[name], strict=True) if can]
        missing = [label for i, label in enumerate(classes) if i not in scored[name].target]
        if not len(scored[name].target):
            found.append(f"site {name} has no {rows} row, so it has no figures")
        elif len(known) == 1 < len(classes):
            one = "class" if scored[name].asked is None else "answer"
            found.append(
                f"site {name} has one {one} in its training rows, {known[0]}: it can predict no other, so its "
                "figures mean nothing"
            )
        elif missing and scored[name].asked is None:  # of hundreds of answers, most stand in no row of a site
            some = ", ".join(missing[:MOST_NAMED]) + (" and others" if len(missing) > MOST_NAMED else "")
            found.append(
                f"site {name} has no {rows} row of class {some}: its figures cover the "
                f"{len(classes) - len(missing)} of {len(classes)} classes that it has"
            )
    if len(found) > MOST_LINES:
        left = len(found) - MOST_LINES + 1
        found[MOST_LINES - 1 :] = [
            f"{counted(left, 'more site is', 'more sites are')} judged on fewer classes; see "
            "classes_tested of each site"
        ]
    return found


def _draws_of(scored: Scored) -> Resamples:
    """The figures over draws; none where there are not two lesions to draw from."""
    return resample(scored) if len(set(scored.lesions)) > 1 else {}

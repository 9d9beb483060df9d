"""Figures of what `uncertainty.py` scored: of a site, a seed, and means over them, draw by draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.uncertainty.uncertainty_measures import ONE_HEAD, TODAY, Said, Values
from benchmarks.uncertainty.uncertainty_shown import CURVE, MODELS
from edgefl_protocol.errors import EdgeflError
from edgefl_trainer.evaluate.calibration import refer_threshold
from edgefl_trainer.evaluate.intervals import Scored, aurc_of_draws, interval, lesion_weights, weighted_figures
from edgefl_trainer.evaluate.risk_coverage import risk_at, told_apart

DRAWS = 1000
COVERAGES = (0.7, 0.9, 1.0)
Parts = Mapping[str, Mapping[str, "Part"]]  # site → kind of rows
Draws = dict[str, dict[str, Values]]  # measure → figure → its value, then its draws, (1 + R,)


@dataclass(frozen=True)
class Part:
    """Rows of one kind at a site, with what is said of them and of the pictures that do not belong."""

    targets: NDArray[np.int64]
    lesions: tuple[str, ...]
    said: tuple[Said, ...]  # the model; then all together, where there are several
    outside: Mapping[str, tuple[tuple[str, ...], tuple[Said, ...]]]  # source → lesions, and what is said of them


def figures_of_seeds(each: Sequence[Parts]) -> dict[str, Any]:
    """Every figure as the mean of the seeds, with rows, foreign pictures and risk-coverage curves."""
    alike = of_the_same_rows(each)
    thresholds = [{site: thresholds_of(both["tune"]) for site, both in parts.items()} for parts in each]
    first, found = each[0], dict[str, Any]()
    for kind in ("tune", "reported"):
        draws = [
            {site: draws_of(both[kind], chosen[site]) for site, both in parts.items()}
            for parts, chosen in zip(each, thresholds, strict=True)
        ]
        sites = {site: mean_of_seeds([one[site] for one in draws], drawn=alike or kind != "tune") for site in first}
        found[kind] = {site: figures_of(one) for site, one in sites.items()}
        found[kind]["mean"] = figures_of(mean_over(list(sites.values())))
        apart_by_seed(found[kind]["mean"], [mean_over(list(one.values())) for one in draws])
    found["rows"] = {site: {kind: len(part.targets) for kind, part in both.items()} for site, both in first.items()}
    found["outside"] = {
        site: {source: len(names) for source, (names, _) in both["reported"].outside.items()}
        for site, both in first.items()
    }
    found["curves"] = {site: mean_curves([curves_of(parts[site]["reported"]) for parts in each]) for site in first}
    return found


def draws_of(part: Part, thresholds: Mapping[str, float]) -> Draws:
    """Every figure of every measure: first the figure itself, then its draws."""
    weights = weights_of(part.lesions)
    strangers = {source: weights_of(names) for source, (names, _) in part.outside.items()}
    found: Draws = {}
    for number, said in enumerate(part.said):
        wrong = said.predicted != part.targets
        model = {
            name: values
            for name, values in weighted_figures(
                Scored(said.probabilities, part.targets, said.predicted, None, part.lesions), weights
            ).items()
            if name in ("ece", "brier", "accuracy", "balanced_accuracy")
        }
        found[MODELS[number]] = model
        for name, values in said.measures.items():
            risk = risk_at(values, wrong, weights, COVERAGES)
            figures = {"aurc": aurc_of_draws(values, wrong, weights)}
            for column, coverage in enumerate(COVERAGES[:-1]):
                figures[f"risk {coverage:.0%}"] = risk[:, column] / np.where(risk[:, -1] > 0, risk[:, -1], np.nan)
            for source, (_, others) in part.outside.items():
                figures[source] = told_apart(values, others[number].measures[name], weights, strangers[source])
            kept = values <= thresholds[name]
            counted = (weights * kept).sum(axis=1)
            figures["referred"] = 1 - counted / weights.sum(axis=1)
            figures["error of the rest"] = (weights * (kept & wrong)).sum(axis=1) / np.where(
                counted > 0, counted, np.nan
            )
            found[name] = figures
    return found


def weights_of(lesions: Sequence[str]) -> Values:
    """A row of ones, then the draws, (1 + R, n)."""
    return np.concatenate([np.ones((1, len(lesions))), *lesion_weights(lesions, DRAWS)])


def thresholds_of(tune: Part) -> dict[str, float]:
    """What the rule of docs/methods.md 1.8 chooses for each measure, on tune rows."""
    found = {}
    for said in tune.said:
        correct = said.predicted == tune.targets
        for name, values in said.measures.items():
            ceiling = 0.999 if "vacuity" in name else float(np.inf)
            found[name] = refer_threshold(values, correct, ceiling=ceiling)
    return found


def mean_over(sites: Sequence[Draws]) -> Draws:
    """The mean of every figure over the sites that have it."""
    names = {name: {figure for site in sites for figure in site[name]} for name in sites[0]}
    return {
        name: {
            figure: mean_of_those([site[name][figure] for site in sites if figure in site[name]])
            for figure in sorted(figures)
        }
        for name, figures in names.items()
    }


def mean_of_seeds(seeds: Sequence[Draws], *, drawn: bool) -> Draws:
    """The mean of every figure over all seeds; NaN at a draw where one of them has none.

    Args:
        drawn: whether all seeds drew the same lesions; without it there is no interval, but the figure alone.
    """
    kept = slice(None) if drawn else slice(1)
    return {
        name: {figure: np.mean([seed[name][figure][kept] for seed in seeds], axis=0) for figure in figures}
        for name, figures in seeds[0].items()
    }


def mean_of_those(values: Sequence[Values]) -> Values:
    """The mean at each draw of those that have a value there; NaN where none has (`np.nanmean` warns then)."""
    stacked = np.stack(values)
    there = (~np.isnan(stacked)).sum(axis=0)
    return np.where(there, np.nansum(stacked, axis=0) / np.maximum(there, 1), np.nan)


def figures_of(draws: Draws) -> dict[str, dict[str, dict[str, object]]]:
    """Value and interval of every figure, and of its difference from that of vacuity as it is used today.

    Of several heads together also how they differ from one of them.
    """
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name, figures in draws.items():
        found[name] = {}
        alone = draws.get(one_head_beside(name), {})
        for figure, values in figures.items():
            told: dict[str, object] = {"value": float(values[0]), "interval": interval(values[1:])}
            others = {"difference": draws[TODAY] if name != TODAY else {}, "over_one": alone}
            for key, other in others.items():
                if figure in other:
                    less = values - other[figure]
                    told |= {key: float(less[0]), f"{key}_interval": interval(less[1:])}
            found[name][figure] = told
    return found


def one_head_beside(name: str) -> str:
    """Name what one new head has in the place of a measure, or a figure, of several; "" of what is not theirs."""
    if name == MODELS[2]:
        return MODELS[1]
    many, comma, measure = name.partition(" heads, ")
    return f"{ONE_HEAD}, {measure}" if comma and many.isdigit() else ""


def of_the_same_rows(each: Sequence[Parts]) -> bool:
    """Tell whether the seeds also have the same `tune` rows, which a run's seed draws.

    Raises:
        EdgeflError: they are not judged on the same reported rows, so that no mean of them could be taken.
    """

    def rows(kind: str) -> list[dict[str, tuple[Sequence[str], list[int]]]]:
        return [
            {site: (both[kind].lesions, both[kind].targets.tolist()) for site, both in parts.items()} for parts in each
        ]

    if any(one != rows("reported")[0] for one in rows("reported")[1:]):
        raise EdgeflError("the runs are judged on different rows: name the seeds of one command", "run")
    return all(one == rows("tune")[0] for one in rows("tune")[1:])


def apart_by_seed(mean: Mapping[str, dict[str, dict[str, object]]], seeds: Sequence[Draws]) -> None:
    """Note beside every difference from today's measure what it is with each seed."""
    for name, figures in mean.items():
        for figure, told in figures.items():
            if "difference" in told:
                told["by_seed"] = [float(one[name][figure][0] - one[TODAY][figure][0]) for one in seeds]


def mean_curves(each: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The mean of the seeds' curves."""
    return {name: np.mean([one[name] for one in each], axis=0).tolist() for name in each[0]}


def curves_of(part: Part) -> dict[str, list[float]]:
    """The risk at each coverage of `CURVE`, of each measure."""
    once = np.ones((1, len(part.targets)))
    return {
        name: [float(value) for value in risk_at(values, said.predicted != part.targets, once, CURVE)[0]]
        for said in part.said
        for name, values in said.measures.items()
    }

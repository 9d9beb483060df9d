"""A centre with its own model and the federation's: the better of the two, or the mean of their answers.

Better means a higher balanced accuracy on the centre's `tune` rows, which no model learned from and no table reports.
The mean of two models is often better than either, whoever made them. So the mean of the federation's and the centre's
own stands beside the mean of two of the centre's own, which differ by their seed.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks.federation.federation_scores import Centres, average, by_seed, difference
from edgefl_trainer.engine.folder import read_metrics
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.intervals import Scored

Tune = Mapping[str, float]  # balanced accuracy on `tune` rows, by centre


def tune_figures(run: FinishedRun) -> tuple[Tune, Tune | None]:
    """After the last round, and after the phase at home; None without one."""
    lines = read_metrics(run.folder)
    last = max(one["round"] for one in lines if one["phase"] == "train")
    before = {one["site"]: one["tune_balanced_accuracy"] for one in lines if one["round"] == last}
    final = {one["site"]: one["tune_balanced_accuracy"] for one in lines if one["phase"] == "final"}
    return before, final or None


def better_on_tune(models: Sequence[tuple[Centres, Tune]]) -> Centres:
    """Each centre takes the model that is better on its `tune` rows; of equals, the first."""
    names = models[0][0]
    return {name: max(models, key=lambda model: model[1][name])[0][name] for name in names}


def mean_answers(models: Sequence[Centres]) -> Centres:
    """Each centre takes the mean of the models' probabilities, and names the likeliest class."""
    return {name: _mean([model[name] for model in models]) for name in models[0]}


def _mean(of_rows: Sequence[Scored]) -> Scored:
    first = of_rows[0]
    if any(one.lesions != first.lesions for one in of_rows):
        raise ValueError("not all judge the same rows")
    probabilities = np.mean([one.probabilities for one in of_rows], axis=0)
    return Scored(probabilities, first.target, probabilities.argmax(axis=1), None, first.lesions)


def rows_of_two(
    alone: Mapping[int, Centres], together: Mapping[int, Centres], tune: Callable[[str, int], Tune]
) -> list[list[str]]:
    """Each way of having two models: its mean, its difference from the model alone, and that of each seed.

    Args:
        alone, together: the scores of both arms, by seed.
        tune: the `tune` figures of an arm, ``alone`` or ``together``, and a seed.
    """
    seeds = sorted({*alone} & {*together})
    if len(seeds) < 2:  # two models of one centre need two seeds
        return []
    following = dict(zip(seeds, [*seeds[1:], seeds[0]], strict=True))
    ways: dict[str, list[Centres]] = {
        "its own": [alone[seed] for seed in seeds],
        "the better of its own and the federation's, on tune rows": [
            better_on_tune([(alone[seed], tune("alone", seed)), (together[seed], tune("together", seed))])
            for seed in seeds
        ],
        "the mean answer of its own and the federation's": [mean_answers([alone[s], together[s]]) for s in seeds],
        "the mean answer of two of its own": [mean_answers([alone[s], alone[following[s]]]) for s in seeds],
    }
    own = ways.pop("its own")
    rows = [["its own", str(average(own)), "", ""]]
    own_and_other, two_of_own = list(ways.values())[-2:]
    for label, draws in ways.items():
        each = [difference([one], [other]).value for one, other in zip(draws, own, strict=True)]
        rows.append([label, str(average(draws)), difference(draws, own).signed, by_seed(each)])
    each = [difference([one], [other]).value for one, other in zip(two_of_own, own_and_other, strict=True)]
    rows.append(["the last minus the one before", "", difference(two_of_own, own_and_other).signed, by_seed(each)])
    return rows

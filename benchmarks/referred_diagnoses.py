"""What a federation gives as a referral: the models of `rare_diagnoses.py` at other thresholds.

Two models can name a diagnosis more or less often because they tell the pictures apart better or worse, or because they
draw the line elsewhere. So the arms are compared at one line: each centre's threshold on the summed probability of the
classes that ask for a look is chosen on its own `tune` rows, once by the rule that `edgefl score` has, and once where
four in five benign `tune` rows lie below it. The area under the curve needs no line.

The last column compares the last arm with the first over the same draws of lesions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from federation_scores import Centres, Figure, share_draws
from jaxtyping import Bool, Float
from sklearn.metrics import roc_auc_score

from edgefl_protocol.pictures.class_info import KNOWN, suspicious_classes
from edgefl_protocol.pictures.referral import DEFAULT_SUSPICIOUS_FROM
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.suspicion import TuneScores, site_suspicion, tune_scores
from edgefl_trainer.evaluate.intervals import Scored, interval, resample
from edgefl_trainer.evaluate.tables.text import markdown

REFERRALS = "<!-- referrals: written by benchmarks/rare_diagnoses.py -->", "<!-- end of referrals -->"
SPARED = 0.8  # of the benign tune rows, at the line that is the same for all arms
MELANOMA = "MEL"


@dataclass(frozen=True)
class Arm:
    """The scores of a way of learning, and each centre's lines."""

    scores: Centres
    product: Mapping[str, float]  # as `edgefl score` has it, which also refers where such a class is named
    spared: Mapping[str, float]


def spared_line(tune: TuneScores, asks: Bool[np.ndarray, " K"]) -> float:
    """The line at or below which `SPARED` of a centre's benign tune rows lie; above it a picture is referred."""
    benign = ~asks[tune.targets]
    if not benign.any():
        raise ValueError("a centre has no benign tune row, so no line can be drawn there")
    together = tune.probabilities[benign][:, asks].sum(axis=1, dtype=np.float64)
    return float(np.quantile(together, SPARED, method="higher"))


def arm_of(run: FinishedRun, scores: Centres, asks: Bool[np.ndarray, " K"]) -> Arm:
    """Draw a run's lines on its `tune` rows."""
    product, spared = {}, {}
    for name in scores:
        tune = tune_scores(run, name)
        if tune is None:
            raise ValueError(f"{run.folder} kept no scores of the tune rows of {name}: run it again")
        chosen = site_suspicion(run, name, KNOWN).threshold
        product[name] = DEFAULT_SUSPICIOUS_FROM if chosen is None else chosen
        spared[name] = spared_line(tune, asks)
    return Arm(scores, product, spared)


def asked(scored: Scored, asks: Bool[np.ndarray, " K"]) -> Float[np.ndarray, " B"]:
    """Summed probability of the classes that ask for a look."""
    return np.asarray(scored.probabilities[:, asks].sum(axis=1, dtype=np.float64))


def referred(arm: Arm, asks: Bool[np.ndarray, " K"], *, by_product: bool) -> Bool[np.ndarray, " N"]:
    """Which reported rows are referred, the centres one after the other by name."""
    parts = []
    for name in sorted(arm.scores):
        scored = arm.scores[name]
        together = asked(scored, asks)
        if by_product:
            parts.append(asks[scored.predicted] | (together >= arm.product[name]))
        else:
            parts.append(together > arm.spared[name])
    return np.concatenate(parts)


def area(arm: Arm, columns: Bool[np.ndarray, " K"]) -> tuple[float, Float[np.ndarray, " R"]]:
    """Area under the curve of these classes against the others in per cent, mean of the centres, and its draws."""
    values, draws = [], []
    for name in sorted(arm.scores):
        scored = arm.scores[name]
        inside = columns[scored.target]
        if inside.all() or not inside.any():
            raise ValueError(f"{name} shows one kind of rows alone, so it has no area under a curve")
        together = asked(scored, columns)
        two = np.stack([1 - together, together], axis=1)
        judged = Scored(two, inside.astype(int), two.argmax(axis=1), None, scored.lesions)
        values.append(float(roc_auc_score(inside, together)))
        draws.append(resample(judged)["auroc"])
    return 100 * float(np.mean(values)), 100 * np.mean(draws, axis=0)


def row(label: str, rows: int, values: Sequence[float], gap: Figure) -> list[str]:
    """A line of the table."""
    return [label, str(rows), *(f"{value:.1f}" for value in values), gap.signed]


def shares(
    label: str, arms: Sequence[Arm], hits: Sequence[Bool[np.ndarray, " N"]], within: Bool[np.ndarray, " N"]
) -> list[str]:
    """The share of some rows that is hit in each arm, and how much larger it is in the last than in the first."""
    lesions = [lesion for name in sorted(arms[0].scores) for lesion in arms[0].scores[name].lesions]
    values = [100 * float(one[within].mean()) for one in hits]
    before, after = (share_draws(lesions, within, one) for one in (hits[0], hits[-1]))
    return row(label, int(within.sum()), values, _gap(values, 100 * (after - before)))


def table(classes: Sequence[str], arms: Sequence[Arm]) -> str:
    """Both areas, then what each line refers."""
    asks = np.array(suspicious_classes(classes, KNOWN))
    melanoma = np.array([name == MELANOMA for name in classes])
    target = np.concatenate([arms[0].scores[name].target for name in sorted(arms[0].scores)])
    body = []
    for label, columns in (("asks for a look", asks), (MELANOMA, melanoma)):
        found = [area(arm, columns) for arm in arms]
        values = [value for value, _ in found]
        gap = _gap(values, found[-1][1] - found[0][1])
        body.append(row(f"area under the curve, {label}", len(target), values, gap))
    lines = (("by the rule of `edgefl score`", True), (f"where {SPARED:.0%} of benign tune rows are spared", False))
    for told, by_product in lines:
        hits = [referred(arm, asks, by_product=by_product) for arm in arms]
        body.append(shares(f"referred {told}: asks for a look", arms, hits, asks[target]))
        body.append(shares(f"referred {told}: {MELANOMA}", arms, hits, melanoma[target]))
        body.append(shares(f"spared {told}: benign", arms, [~one for one in hits], ~asks[target]))
    head = ["", "rows", "alone", "federation, averaged", "federation, fitted at home", "fitted minus alone"]
    return markdown(head, body, "").strip()


def referrals(classes: Sequence[str], runs: Sequence[FinishedRun], scores: Sequence[Centres]) -> str:
    """The table of finished runs, whose lines are drawn on their own `tune` rows."""
    asks = np.array(suspicious_classes(classes, KNOWN))
    return table(classes, [arm_of(run, each, asks) for run, each in zip(runs, scores, strict=True)])


def _gap(values: Sequence[float], draws: Float[np.ndarray, " R"]) -> Figure:
    low, high = interval(draws) or (float("nan"), float("nan"))
    return Figure(values[-1] - values[0], low, high)

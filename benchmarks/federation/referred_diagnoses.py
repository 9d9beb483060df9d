"""What a federation gives as a referral: the models of `rare_diagnoses.py` at other thresholds.

Two models can name a diagnosis more or less often because they tell the pictures apart better or worse, or because they
draw the line elsewhere. So the arms are compared at one line: each centre's threshold on the summed probability of the
classes that ask for a look is chosen on its own `tune` rows, once by the rule that `edgefl score` has, and once where
four in five benign `tune` rows lie below it. The area under the curve needs no line.

The last arm is compared with the first over the same draws of lesions. Of several seeds each figure is the mean; a
line is drawn for each seed, and the last column has the difference of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from sklearn.metrics import roc_auc_score

from benchmarks.federation.federation_scores import Centres, Figure, by_seed, share_draws
from edgefl_protocol.pictures.class_info import KNOWN, suspicious_classes
from edgefl_protocol.pictures.suspicious import DEFAULT_SUSPICIOUS_FROM
from edgefl_trainer.engine.judging.suspicion import KeptScores, site_suspicion, tune_scores
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.evaluate.intervals import Scored, interval, resample
from edgefl_trainer.evaluate.tables.text import markdown

REFERRALS = "<!-- referrals: written by benchmarks/federation/rare_diagnoses.py -->", "<!-- end of referrals -->"
SPARED = 0.8  # of the benign tune rows, at the line that is the same for all arms
MELANOMA = "MEL"


@dataclass(frozen=True)
class Arm:
    """The scores of a way of learning, and each centre's lines."""

    scores: Centres
    product: Mapping[str, float]  # as `edgefl score` has it, which also refers where such a class is named
    spared: Mapping[str, float]


Arms = Sequence[Sequence[Arm]]  # of each way, one for each seed


def spared_line(tune: KeptScores, asks: Bool[np.ndarray, " K"]) -> float:
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


def row(label: str, rows: int, values: Sequence[Sequence[float]], draws: Float[np.ndarray, " R"]) -> list[str]:
    """A line of the table, of each arm the values of all seeds, and draws of the last arm's mean less the first's."""
    before, after = np.array(values[0]), np.array(values[-1])
    low, high = interval(draws) or (float("nan"), float("nan"))
    gap = Figure(float(after.mean() - before.mean()), low, high)
    return [label, str(rows), *(f"{np.mean(one):.1f}" for one in values), gap.signed, by_seed(after - before)]


def areas(label: str, arms: Arms, columns: Bool[np.ndarray, " K"], rows: int) -> list[str]:
    """The area under the curve of each arm."""
    found = [[area(seed, columns) for seed in arm] for arm in arms]
    before, after = (np.mean([draws for _, draws in arm], axis=0) for arm in (found[0], found[-1]))
    return row(f"area under the curve, {label}", rows, [[value for value, _ in arm] for arm in found], after - before)


def shares(
    label: str, lesions: Sequence[str], hits: Sequence[Bool[np.ndarray, "S N"]], within: Bool[np.ndarray, " N"]
) -> list[str]:
    """The share of some rows that is hit in each arm by each of S seeds, and how much larger it is in the last arm."""
    values = [(100 * arm[:, within].mean(axis=1)).tolist() for arm in hits]
    before, after = (share_draws(lesions, within, arm.mean(axis=0)) for arm in (hits[0], hits[-1]))
    return row(label, int(within.sum()), values, 100 * (after - before))


def table(classes: Sequence[str], arms: Arms) -> str:
    """Both areas, then what each line refers."""
    asks = np.array(suspicious_classes(classes, KNOWN))
    melanoma = np.array([name == MELANOMA for name in classes])
    first = arms[0][0].scores
    target = np.concatenate([first[name].target for name in sorted(first)])
    lesions = [lesion for name in sorted(first) for lesion in first[name].lesions]
    body = [areas(label, arms, one, len(target)) for label, one in (("suspicious", asks), (MELANOMA, melanoma))]
    lines = (("by the rule of `edgefl score`", True), (f"where {SPARED:.0%} of benign tune rows are spared", False))
    for told, by_product in lines:
        hits = [np.array([referred(seed, asks, by_product=by_product) for seed in arm]) for arm in arms]
        body.append(shares(f"referred {told}: suspicious", lesions, hits, asks[target]))
        body.append(shares(f"referred {told}: {MELANOMA}", lesions, hits, melanoma[target]))
        body.append(shares(f"spared {told}: benign", lesions, [~one for one in hits], ~asks[target]))
    head = [
        "",
        "rows",
        "alone",
        "federation, statistics of home",
        "federation, fitted at home",
        "fitted minus alone",
        "by seed",
    ]
    return markdown(head, body, "").strip()


def referrals(
    classes: Sequence[str], runs: Sequence[Sequence[FinishedRun]], scores: Sequence[Sequence[Centres]]
) -> str:
    """The table of finished runs, of each arm one of each seed; their lines are drawn on their own `tune` rows."""
    asks = np.array(suspicious_classes(classes, KNOWN))
    arms = [
        [arm_of(run, each, asks) for run, each in zip(arm, those, strict=True)]
        for arm, those in zip(runs, scores, strict=True)
    ]
    return table(classes, arms)

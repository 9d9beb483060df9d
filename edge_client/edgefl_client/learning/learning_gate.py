"""The learning gate: bundle and personal values answer for the pictures held back; `LearningVerdict` judges them.

Where personal values are in use already, they answer, too. Two questions are put to each.

* *Which class of the table is it?* Both choose among the same classes: a bundle of eight classes must not lose to one
  of two for naming one that could not occur. The measure is balanced accuracy of all pictures.
* *What would `edgefl score` say?* Each names its own classes, under all the referral rules with the thresholds of the
  card. Counted is how many pictures are referred, how right the others are told, and how many of these are missed:
  told wrongly, and of a class that is not known to be benign.

A picture without a prediction, or with numbers that are not finite, is not recognised and is referred. One that the
gate before the model refers is referred by both. Where no class is known to be benign, `suspicious_class` refers every
picture and says nothing of either: then it is left out, and every wrong answer counts as missed.
Source: docs/decisions/0042, docs/design.md 7.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.runtime import run_graph
from edgefl_client.scoring.learning_verdict import Answers, LearningVerdict
from edgefl_client.scoring.personal import PersonalState
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.pictures.referral import JudgedPicture, Measures, ReferralRules, predicted_class, refer_reasons
from edgefl_protocol.rules.accuracy import balanced_accuracy

BATCH = 8
_ASKED = ("probabilities", "vacuity", "dissonance")


@dataclass(frozen=True, kw_only=True)
class _Question:
    """How a set of values is asked."""

    among: Sequence[bool]  # per class, whether both may choose it
    seen: Sequence[bool]  # per class, whether these values may name it in a score
    rules: ReferralRules
    benign: Sequence[bool]  # per class, whether it is known to be benign


def judge(
    graph: onnxruntime.InferenceSession,
    bundle: Bundle,
    personal: Mapping[str, NDArray[Any]],
    seen: Sequence[bool],
    held: PreparedRows,
    report: Callable[[int], None] = lambda done: None,
    *,
    in_use: PersonalState | None = None,
) -> LearningVerdict:
    """Compare personal values with the bundle's, and with those in use, on the pictures held back.

    Args:
        personal: the new ones.
        seen: per class, whether the new values were learned on it.
        report: called with the number of pictures scored so far, of all together.
        in_use: the personal values that score until now; None where the bundle's do.
    """
    rules, class_rule = _rules(bundle)
    suspicious = referral_rules(bundle.labels, bundle.card).suspicious or (True,) * len(bundle.labels.classes)
    benign = [not asks for asks in suspicious]

    def asked(of: Sequence[bool]) -> _Question:
        """Ask values that were learned on these classes: they choose among those that the new ones know, too."""
        common = [new and other for new, other in zip(seen, of, strict=True)]
        return _Question(among=common, seen=of, rules=rules, benign=benign)

    counts = np.bincount(held.labels, minlength=len(benign))
    may_miss = np.array(bundle.labels.seen) & ~np.array(benign)  # suspicious classes that the bundle may name
    return LearningVerdict(
        bundle=_answers(graph, bundle.weights, asked(bundle.labels.seen), held, report),
        personal=_answers(graph, personal, asked(seen), held, lambda done: report(len(held) + done)),
        before=None
        if in_use is None
        else _answers(graph, in_use.weights, asked(in_use.seen), held, lambda done: report(2 * len(held) + done)),
        held=len(held),
        least_of_a_class=int(counts[counts > 0].min()),
        class_rule=class_rule,
        suspicious_judged=bool(counts[may_miss].any() or not may_miss.any()),
        classes=int(np.count_nonzero(counts)),
    )


def class_weighted_accuracy(
    right: NDArray[np.bool_], asked: NDArray[np.bool_], labels: NDArray[np.int64]
) -> float | None:
    """Return the share of `right` among the rows `asked`, each class with the same weight; None where none is asked.

    A row weighs 1 / (rows of its class, asked or not). Where all are asked that is balanced accuracy. Weights from the
    rows asked alone would let the only melanoma among thirty moles count as much as all of them.

    Args:
        labels: class index of each row, (n,).
    """
    weights = 1.0 / np.bincount(labels)[labels]
    return float(weights[asked & right].sum() / weights[asked].sum()) if asked.any() else None


def _rules(bundle: Bundle) -> tuple[ReferralRules, bool]:
    """The bundle's rules, and whether `suspicious_class` is one of them: it is left out where it always refers."""
    rules = referral_rules(bundle.labels, bundle.card)
    if rules.suspicious is not None and not all(rules.suspicious):
        return rules, True
    return replace(rules, suspicious=(False,) * len(bundle.labels.classes), suspicious_from=None), False


def _answers(
    graph: onnxruntime.InferenceSession,
    weights: Mapping[str, NDArray[Any]],
    question: _Question,
    rows: PreparedRows,
    report: Callable[[int], None],
) -> Answers:
    """Score the rows and count."""
    chosen, named = (np.full(len(rows), -1, np.int64) for _ in range(2))  # -1: none
    told = np.zeros(len(rows), np.bool_)  # not referred
    for start in range(0, len(rows), BATCH):
        images = rows.images[start : start + BATCH]
        found = run_graph(graph, _ASKED, {"image": images, **weights}, "the model")
        for row, outputs in enumerate(zip(*(found[name] for name in _ASKED), strict=True), start=start):
            if not all(np.isfinite(output).all() for output in outputs):
                continue
            values, vacuity, dissonance = outputs
            measures = Measures(
                probabilities=values, vacuity=float(vacuity), dissonance=float(dissonance), entropy_nats=0.0
            )
            chosen[row], named[row] = (_index(measures, seen) for seen in (question.among, question.seen))
            # Light is left out: the bundle asks about nearly every picture of another camera (decision 0057).
            reasons = refer_reasons(measures, question.seen, question.rules, picture=JudgedPicture(), expired=None)
            told[row] = not reasons and row not in rows.unfit
        report(min(start + BATCH, len(rows)))
    right = named == rows.labels
    wrong = told & ~right
    return Answers(
        balanced_accuracy=balanced_accuracy(chosen, rows.labels) or 0.0,
        referred=int(np.count_nonzero(~told)),
        balanced_accuracy_not_referred=class_weighted_accuracy(right, told, rows.labels),
        wrong_not_referred=int(np.count_nonzero(wrong)),
        missed=int(np.count_nonzero(wrong & ~np.asarray(question.benign)[rows.labels])),
    )


def _index(measures: Measures, seen: Sequence[bool]) -> int:
    index = predicted_class(measures, seen)
    return -1 if index is None else index

"""The gate: personal values are used only where they are at least as good as the bundle's on pictures held back.

The measure is balanced accuracy of both on the same pictures, at least 20 of each class. A picture for which nothing is
predicted, or no finite number comes, counts as not recognised. Both choose among the same classes, those of the table:
personal values name no other, and a bundle of eight classes must not lose to one of two for naming one that could not
occur.

Beside the rule the gate tells how many pictures were predicted wrongly without being referred. It takes the threshold
of the card, which was fitted to the bundle's values. Source: docs/design.md 7, personal values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgefl_client.learning.picture_rows import PreparedRows
from edgefl_client.runtime import run_graph
from edgefl_client.scoring.gate_verdict import GateVerdict
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.pictures.referral import Measures, ReferralRules, predicted_class, refer_reasons
from edgefl_protocol.rules.accuracy import balanced_accuracy

BATCH = 8


def judge(
    graph: onnxruntime.InferenceSession,
    bundle: Bundle,
    personal: Mapping[str, NDArray[Any]],
    seen: Sequence[bool],
    held: PreparedRows,
    report: Callable[[int], None] = lambda done: None,
) -> GateVerdict:
    """Compare bundle and personal values on the pictures held back.

    Args:
        seen: per class, whether the personal values were learned on it.
        report: called with the number of pictures scored so far, of both together.
    """
    common = [ours and theirs for ours, theirs in zip(seen, bundle.labels.seen, strict=True)]
    rules = referral_rules(bundle.labels, bundle.card)
    own, told = _predict(graph, bundle.weights, common, rules, held, report)
    learned, said = _predict(graph, personal, seen, rules, held, lambda done: report(len(held) + done))
    counts = np.bincount(held.labels)
    return GateVerdict(
        bundle=balanced_accuracy(own, held.labels) or 0.0,
        personal=balanced_accuracy(learned, held.labels) or 0.0,
        held=len(held),
        least_of_a_class=int(counts[counts > 0].min()),
        bundle_unnoticed=int(np.count_nonzero(told & (own != held.labels))),
        personal_unnoticed=int(np.count_nonzero(said & (learned != held.labels))),
    )


def _predict(
    graph: onnxruntime.InferenceSession,
    weights: Mapping[str, NDArray[Any]],
    seen: Sequence[bool],
    rules: ReferralRules,
    rows: PreparedRows,
    report: Callable[[int], None],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the predicted class of each row, −1 for none, (n,); whether it would be told without a referral, (n,)."""
    predicted, told = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.bool_)
    for start in range(0, len(rows), BATCH):
        images = rows.images[start : start + BATCH]
        found = run_graph(graph, ("probabilities", "vacuity"), {"image": images, **weights}, "the model")
        for row, (values, known) in enumerate(zip(found["probabilities"], found["vacuity"], strict=True), start=start):
            measures = Measures(probabilities=values, vacuity=float(known), dissonance=None, entropy_nats=0.0)
            index = predicted_class(measures, seen)
            if index is not None and np.isfinite(values).all() and np.isfinite(known):
                predicted[row] = index
                told[row] = not refer_reasons(measures, seen, rules, gate=(), expired=None)
        report(min(start + BATCH, len(rows)))
    return predicted, told

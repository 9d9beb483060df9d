"""May personal values be used? Only where they are at least as good as the bundle's on pictures held back.

Balanced accuracy, the mean over classes of the share recognised, of both on the same pictures, at least 20 of each
class; a picture for which nothing is predicted counts as not recognised. Both choose among the same classes, those of
the table: personal values name no other, and a bundle of eight classes must not lose to one of two for having named one
that could not occur. Source: docs/design.md, section 7, graphs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgefl_client.learning.rows import Rows
from edgefl_client.learning.verdict import Verdict
from edgefl_client.runtime import RUNTIME_ERRORS, first_line
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.errors import BundleError
from edgefl_protocol.referral import Measures, predicted_class

BATCH = 8


def judge(
    graph: onnxruntime.InferenceSession,
    bundle: Bundle,
    personal: Mapping[str, NDArray[Any]],
    seen: Sequence[bool],
    held: Rows,
    report: Callable[[int], None] = lambda done: None,
) -> Verdict:
    """Compare bundle and personal values.

    Args:
        graph: the loaded scoring graph.
        bundle: with its own values.
        personal: tensors by name.
        seen: per class, whether the personal values were learned on it.
        held: the pictures held back.
        report: called with the number of pictures scored so far, of both together.

    Raises:
        BundleError: the runtime failed.
    """
    common = [ours and theirs for ours, theirs in zip(seen, bundle.labels.seen, strict=True)]
    own = _predict(graph, bundle.weights, common, held, report)
    learned = _predict(graph, personal, seen, held, lambda done: report(len(held) + done))
    counts = np.bincount(held.labels)
    return Verdict(
        bundle=balanced_accuracy(own, held.labels),
        personal=balanced_accuracy(learned, held.labels),
        held=len(held),
        least_of_a_class=int(counts[counts > 0].min()),
    )


def balanced_accuracy(predicted: NDArray[np.int64], labels: NDArray[np.int64]) -> float:
    """Mean over the classes that occur of the share of their pictures that was recognised.

    Args:
        predicted: class indices, −1 for none, (n,).
        labels: class indices, (n,).
    """
    return float(np.mean([np.mean(predicted[labels == label] == label) for label in np.unique(labels)]))


def _predict(
    graph: onnxruntime.InferenceSession,
    weights: Mapping[str, NDArray[Any]],
    seen: Sequence[bool],
    rows: Rows,
    report: Callable[[int], None],
) -> NDArray[np.int64]:
    predicted = []
    for start in range(0, len(rows), BATCH):
        images = rows.images[start : start + BATCH]
        try:
            probabilities, vacuity = graph.run(["probabilities", "vacuity"], {"image": images, **weights})
        except RUNTIME_ERRORS as error:
            raise BundleError(f"the model cannot run: {first_line(error)}", "graph_run") from error
        for values, known in zip(probabilities, vacuity, strict=True):
            measures = Measures(probabilities=values, vacuity=float(known), dissonance=None, entropy_nats=0.0)
            index = predicted_class(measures, seen)
            predicted.append(-1 if index is None else index)
        report(min(start + BATCH, len(rows)))
    return np.array(predicted, np.int64)

"""Which class is taken for which: the confusion matrix as figures and as lines of text.

Rows are true classes, columns what was answered; the last column counts rows without an answer. Values in, values out;
the picture is in `plots.confusion_plot`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from edgefl_protocol.sentences import listed
from edgefl_trainer.evaluate.intervals import Scored, lesions_of_classes, recall_intervals
from edgefl_trainer.evaluate.metrics import confusion_matrix

MAX_CLASSES = 40  # beyond, nobody reads the matrix, and of many sites it fills files
INTERVAL_WIDTH = 31
NO_ANSWER = "no answer"

Matrix = Int[np.ndarray, "K K1"]


def confusions(scored: Mapping[str, Scored]) -> dict[str, list[list[int]]] | None:
    """Count each site's answers by true class; None where there are too many classes, or questions were asked."""
    if any(rows.probabilities.shape[1] > MAX_CLASSES or rows.asked is not None for rows in scored.values()):
        return None
    return {
        name: confusion_matrix(rows.target, rows.predicted, rows.probabilities.shape[1]).tolist()
        for name, rows in sorted(scored.items())
    }


def pooled_matrix(found: Mapping[str, Sequence[Sequence[int]]]) -> Matrix:
    """Sum the matrices of sites."""
    return np.asarray(np.sum([np.array(matrix, dtype=np.int64) for matrix in found.values()], axis=0))


def recalls(scored: Scored) -> dict[str, list[Any] | None]:
    """Compute `recall`, `recall_interval` and `recall_lesions`, in class order; None as in `confusions`."""
    classes = scored.probabilities.shape[1]
    if classes > MAX_CLASSES or scored.asked is not None:
        return {"recall": None, "recall_interval": None, "recall_lesions": None}
    matrix = confusion_matrix(scored.target, scored.predicted, classes)
    rows = matrix.sum(axis=1)
    shares = [float(hit / n) if n else None for hit, n in zip(np.diagonal(matrix), rows, strict=True)]
    return {"recall": shares, "recall_interval": recall_intervals(scored), "recall_lesions": lesions_of_classes(scored)}


def recall_lines(
    matrix: Matrix,
    classes: Sequence[str],
    intervals: Sequence[Sequence[float] | None] | None = None,
    kind: str = "test",
) -> list[str]:
    """Write for each class its recall, interval and rows, and what it is most often taken for; or that it has no row.

    Args:
        intervals: those of `recalls`; None for a run from before they were kept.
        kind: of the rows, `test` or `val`.
    """
    width = max(map(len, classes)) + 2
    lines = []
    for k, name in enumerate(classes):
        rows = int(matrix[k].sum())
        if not rows:
            lines.append(f"  {name:<{width}}{f'no {kind} picture'}")
            continue
        taken = _taken_for(k, matrix[k], classes)
        told = "" if intervals is None else f"{_spoken(intervals[k], int(matrix[k, k]), rows):<{INTERVAL_WIDTH}}"
        lines.append(f"  {name:<{width}}{matrix[k, k] / rows:>7.1%} {told}of {rows:,}{taken}")
    return lines


def _taken_for(k: int, answers: Int[np.ndarray, " K1"], classes: Sequence[str]) -> str:
    """What rows of class `k` are most often taken for, all that share the place; nothing where all are right."""
    others = np.where(np.arange(len(answers)) == k, 0, answers)
    most = int(others.max())
    if not most:
        return ""
    tied = [name for name, count in zip([*classes, NO_ANSWER], others, strict=True) if count == most]
    each = " each" if len(tied) > 1 else ""
    return f"   most often taken for {listed(tied)}: {most / answers.sum():.1%}{each}"


def _spoken(bounds: Sequence[float] | None, right: int, rows: int) -> str:
    """An interval in per cent, or why there is none: rows that are all right, or all wrong, do not vary when drawn."""
    if bounds is None:
        why = {rows: "all are right", 0: "all are wrong"}.get(right, "too few lesions")
        return f"(no interval: {why})"
    return f"({bounds[0]:.1%} to {bounds[1]:.1%})"

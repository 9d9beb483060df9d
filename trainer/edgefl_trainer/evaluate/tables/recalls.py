"""A table of recalls: a line for each run, a column for each class, over the rows of all sites together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgefl_trainer.evaluate.confusion import pooled_matrix
from edgefl_trainer.evaluate.tables.rows import row_names
from edgefl_trainer.evaluate.tables.text import UNDEFINED, markdown

MAX_COLUMNS = 12  # classes that a page still holds
CAPTION = (
    "Recall of each class, and balanced accuracy with its 95 % interval by lesion, over the rows of all sites "
    "together, without held-out ones."
)


def render_recall(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return the table in Markdown; empty where no run kept its answers, or runs have other or too many classes."""
    known = [summary for summary in summaries if summary.get("confusion")]
    classes = {tuple(summary["classes"]) for summary in known}
    if len(classes) != 1 or len(names := next(iter(classes))) > MAX_COLUMNS:
        return ""
    called = dict(zip(map(id, summaries), row_names(summaries), strict=True))
    head = ["method", "seed", *names, "balanced, all rows"]
    return markdown(
        head, [[called[id(run)], str(run["seed"]), *_recalls(run), _balanced(run)] for run in known], CAPTION
    )


def _recalls(run: Mapping[str, Any]) -> list[str]:
    matrix = pooled_matrix(run["confusion"])
    rows = matrix.sum(axis=1)
    return [f"{hit / n:.3f}" if n else UNDEFINED for hit, n in zip(np.diagonal(matrix), rows, strict=True)]


def _balanced(run: Mapping[str, Any]) -> str:
    figure, bounds = (run["pooled"].get(f"balanced_accuracy{end}") for end in ("", "_interval"))
    if figure is None:
        return UNDEFINED
    return f"{figure:.3f}" + (f" ({bounds[0]:.3f} to {bounds[1]:.3f})" if bounds and bounds[0] < bounds[1] else "")

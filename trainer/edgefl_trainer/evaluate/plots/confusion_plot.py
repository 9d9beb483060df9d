"""Which class is taken for which, as a PNG: a field for each true class (down) and answer (across).

A last column counts rows without an answer, where there are any. Values in, bytes out: no file, no display, no global
state of the plotting library.
"""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from edgefl_trainer.evaluate.confusion import NO_ANSWER, Matrix
from edgefl_trainer.evaluate.plots.style import png

TITLE_POINTS = 10
LETTER = 0.62  # width of the title's letters, in times their height; fewer than one in a thousand lines is wider


def plot_confusion(matrix: Matrix, classes: Sequence[str], title: str) -> bytes:
    """Return the matrix as PNG bytes: shades are shares of a true class, figures are numbers of pictures."""
    columns = [*classes, *([NO_ANSWER] if matrix[:, -1].any() else [])]
    shown = matrix[:, : len(columns)]
    shares = shown / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = max(4.5, 1.6 + 0.62 * len(columns))
    letters = int((size + 1.0) * 72 / (LETTER * TITLE_POINTS))  # that fit in a line across the picture
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, letters)]
    figure = Figure(figsize=(size + 1.0, size + 0.17 * len(lines)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    for row, column in np.ndindex(*shown.shape):
        if matrix[row].sum():  # a class without a picture has an empty row
            colour = "white" if shares[row, column] > 0.55 else "black" if shown[row, column] else "0.6"
            axes.text(column, row, f"{shown[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    axes.set_yticks(range(len(classes)), [f"{name} ({matrix[k].sum():,})" for k, name in enumerate(classes)])
    axes.set_xlabel("answer")
    axes.set_ylabel("true class (pictures)")
    figure.suptitle("\n".join(lines), fontsize=TITLE_POINTS)
    return png(figure, metadata={"Software": None})

"""What the pictures of runs have alike: colours, dashes and markers, a legend below the axes, the bytes of a PNG."""

import io
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with colour-blind eyes too; black is kept for the mean.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C564B", "#7F7F7F")
DASHES = ("-", "--", "-.", (0, (1, 1.2)))
MARKERS = "osD^vPX*"
LEGEND_WIDTH, LEGEND_PT, LEGEND_LINE_INCHES = 80, 9, 0.2  # characters of a line, size of its letters, height
CHANCE: Mapping[str, Any] = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 1.2, "zorder": 0}


def draw_legend(figure: Figure, axes: Axes, most_columns: int) -> None:
    """Draw a legend below the axes, in as many columns as the picture has room for; the picture grows by its lines."""
    handles, labels = axes.get_legend_handles_labels()
    folded = [fill(label, LEGEND_WIDTH) for label in labels]
    for columns in range(min(most_columns, len(folded)), 0, -1):
        legend = figure.legend(
            handles, folded, loc="outside lower center", ncols=columns, frameon=False, fontsize=LEGEND_PT
        )
        if legend.get_window_extent().width <= figure.bbox.width:
            break
        if columns > 1:
            legend.remove()
    lines = sum(label.count("\n") + 1 for label in folded) / columns
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE_INCHES * max(0.0, lines - 1))


def png(figure: Figure, **options: Any) -> bytes:
    """Write a figure as the bytes of a PNG."""
    out = io.BytesIO()
    figure.savefig(out, format="png", **options)
    return out.getvalue()
